"""Operators of torch as they are called, one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

MOVES = frozenset((
    "_to_copy", "_unsafe_view", "abs", "amax", "amin", "arange", "bitwise_not", "cat",
    "clamp", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "contiguous", "copy",
    "copy_", "detach", "embedding", "empty", "empty_like", "empty_strided", "expand",
    "fill", "fill_", "flip", "full", "full_like", "gather", "index", "index_put",
    "index_put_", "index_select", "lift_fresh", "masked_fill", "masked_fill_", "max",
    "maximum", "min", "minimum", "neg", "new_empty", "new_empty_strided", "new_full",
    "new_zeros", "ones", "ones_like", "relu", "repeat", "roll", "scalar_tensor", "scatter",
    "select_scatter", "slice_scatter", "sort", "stack", "threshold_backward", "topk",
    "tril", "triu", "unbind", "where", "zero_", "zeros", "zeros_like",
))  # fmt: skip
"""Operators whose results hold no new values, or exact ones."""


class DispatchMode(TorchDispatchMode):
    """A mode that sees operators without torch's compiler, unless that is loaded already.

    torch would load it to keep it from compiling the mode, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return "torch._dynamo" in sys.modules


class MovedOperators(DispatchMode):
    """Change what each operator inside computes anew, forward and backward."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change, self._is_changing = change, False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, name = function(*args, **(kwargs or {})), function._schema.name.split("::")[-1]
        if self._is_changing or name in MOVES or name.endswith("_") or function.is_view:
            return result
        self._is_changing = True  # these operators are not those that are moved
        try:
            return tree_map(self._moved, result)
        finally:
            self._is_changing = False

    def _moved(self, value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        return self._change(value) if is_number else value
