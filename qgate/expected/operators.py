"""References evaluated operator by operator, as real code computes them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from qgate.expected.dispatching import MOVES, DispatchMode
from qgate.expected.intermediates import (
    CODES,
    EXPONENTIAL,
    INSIDE,
    SCALED,
    SUMS,
    Arithmetic,
    AttentionRule,
    Noise,
    attend,
    rounded,
)
from qgate.expected.known_attention import AttentionSides, KnownRule
from qgate.expected.noise import evaluate
from qgate.expected.stages import BEFORE_CAST, QUANTIZED, stage_cast

Scales = Mapping[int, Tensor]
_OPERANDS = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float16,
)  # fmt: skip
_aten = torch.ops.aten


_DECOMPOSED = get_decompositions(
    [
        _aten.addmm, _aten.baddbmm, _aten.addbmm, _aten.native_layer_norm, _aten.native_group_norm,
        _aten._log_softmax, _aten.logsumexp, _aten.gelu, _aten.silu,
    ]
)  # fmt: skip
"""Operators that an author may have written as several: these are sites inside of them."""
_COMPOSED = frozenset({functional.rms_norm, torch.rms_norm, functional.cross_entropy})
"""Functions of several operators that real code computes as one."""


class Operators(DispatchMode):
    """Number the operators inside that compute new values, and compute some of them otherwise.

    change      function from a result, its number and the operator's name to another result
    arithmetic  how products and attention are computed; `noise` moves what is rounded inside
    scales      of arguments by the address of their memory, as tensors of the same layout
    """

    def __init__(
        self,
        change: Callable[[Tensor, int, str], Tensor] | None = None,
        arithmetic: Arithmetic | None = None,
        noise: Noise | None = None,
        scales: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.change, self.noise, self.scales = change, noise, dict(scales or {})
        self.attention = arithmetic.attention if arithmetic else None
        self.product = arithmetic.product if arithmetic else None
        self.splits = arithmetic.splits if arithmetic else 1
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []
        # Scores and probabilities by the address of their memory, which views of them share.
        self.scores: dict[int, tuple[Tensor, Tensor]] = {}
        self.has_attention = self.has_fused_attention = False
        self.keys = 0
        self.depths: list[tuple[int, tuple[torch.dtype, torch.dtype]]] = []
        self.composite = ""
        self.is_changing = False
        self._dequantized: list[Tensor] = []  # whose addresses are keys of scales

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_changing:
            return function(*args, **kwargs)
        name = function._schema.name.split("::")[-1]
        if function in _DECOMPOSED:
            with self:
                return self.compose(name, lambda: _DECOMPOSED[function](*args, **kwargs))
        if name in ("mm", "bmm"):
            result = self._attended(args)
            return self._changed(self._multiplied(name, *args) if result is None else result, name)
        if function is QUANTIZED:
            return self._changed(self._cast(*args), name)
        result = function(*args, **kwargs)
        if name in MOVES or function.is_view:
            self._follow(name, args, result)
            return result
        if name == "_softmax" and args[1] in (-1, args[0].dim() - 1):
            self.scores[result.untyped_storage().data_ptr()] = args[0], result
            if isinstance(self.attention, AttentionRule):  # rounded within the product
                self.names.append(self.composite + name)
                self.dtypes.append(result.dtype)
                return result
        return tree_map(lambda value: self._changed(value, name), result)

    def _cast(self, x: Tensor, call: int) -> Tensor:
        """Quantize what the function quantizes inside; later products are those of its codes."""
        x, cast = self._site(x, BEFORE_CAST), stage_cast(call)
        with torch._C.DisableTorchFunction():
            result = QUANTIZED(x, call) if self.noise is None else self.noise.cast(x, cast)
            scales = cast.scales(x) if x.dtype == torch.float64 else None
        result = result.contiguous()
        if scales is not None:
            self.scales[result.untyped_storage().data_ptr()] = scales.contiguous()
            self._dequantized.append(result)
        return result

    def _follow(self, name: str, args: Any, result: Any) -> None:
        """Know copies of probabilities as such, repeated for several heads or not."""
        if name not in ("clone", "contiguous", "_to_copy") or not isinstance(args[0], Tensor):
            return
        scores = self.scores.get(args[0].untyped_storage().data_ptr())
        if scores is not None and scores[0].dim() == args[0].dim():
            pairs = zip(scores[0].shape, args[0].shape, strict=True)
            if all(old in (1, new) for old, new in pairs):
                repeated = scores[0].expand(args[0].shape)
                self.scores[result.untyped_storage().data_ptr()] = repeated, result

    def _multiplied(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Multiply matrices; products of codes, and those times one scale, are sites inside."""
        scale_a, scale_b = self._scale_of(a, -1), self._scale_of(b, -2)
        if scale_a is not None:
            a = a / scale_a
        if scale_b is not None:
            b = b / scale_b
        result = self._sums(a, b)
        if scale_a is None and scale_b is None:
            return result
        result = self._site(result, name + INSIDE + CODES)
        if scale_a is not None and scale_b is not None:
            result = self._site(result * scale_a, name + INSIDE + SCALED)
        last = scale_b if scale_b is not None else scale_a
        return result if last is None else result * last

    def _sums(self, a: Tensor, b: Tensor) -> Tensor:
        is_trace = self.change is None
        if not is_trace and self.product is None:
            return a @ b
        dtypes = _dtype_of(a), _dtype_of(b)
        self.depths.append((a.shape[-1], dtypes))
        if self.product is None or not self.product.takes(*dtypes):
            return a @ b
        with torch._C.DisableTorchFunction():
            return self.product.sums(a, b.mT, dtypes, self.splits).to(a.dtype)

    def _scale_of(self, x: Tensor, inner: int) -> Tensor | None:
        """Return the scales of an argument, if they are the same along the inner dimension."""
        scales = self.scales.get(x.untyped_storage().data_ptr())
        if scales is None:
            return None
        scales = scales.as_strided(x.shape, x.stride(), x.storage_offset())
        one = scales.narrow(inner, 0, min(1, scales.shape[inner]))
        return one if bool(((scales == one) | scales.isnan()).all()) else None

    def compose(
        self, name: str, compute: Callable[[], Any], instead: Callable[[], Any] | None = None
    ) -> Any:
        """Compute what real code computes as one operator; its own operators stand inside.

        `instead` gives the result in another arithmetic, whose operators are not counted.
        """
        if self.composite:
            return compute() if instead is None else instead()
        self.composite = name + INSIDE
        try:
            result = compute()
        finally:
            self.composite = ""
        if instead is not None:
            result = instead()
        return tree_map(lambda value: self._changed(value, name), result)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let operators pass that are not the function's."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield

    def _attended(self, args: Any) -> Tensor | None:
        """Compute the product of probabilities and values as fused attention does."""
        entry = self.scores.get(args[0].untyped_storage().data_ptr())
        if entry is None or entry[0].shape[-1] != args[0].shape[-1]:
            return None
        scores = entry[0].reshape(-1, *args[0].shape[1:])
        if len(scores) == 1:  # one head for several heads of values
            scores = scores.expand(args[0].shape)
        if scores.numel() != args[0].numel() or not scores.numel():
            return None
        self.has_attention = True
        self.keys = max(self.keys, scores.shape[-1])
        if not isinstance(self.attention, AttentionRule):
            return None
        return attend(scores.reshape(args[0].shape), args[1], self.attention, self.noise)

    def _changed(self, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        return self._site(value, name)

    def _site(self, value: Tensor, name: str) -> Tensor:
        self.names.append(self.composite + name)
        self.dtypes.append(value.dtype)
        if self.change is None:
            return value
        self.is_changing = True  # these operators are not the function's
        try:
            changed = self.change(value, len(self.names) - 1, self.names[-1])
        finally:
            self.is_changing = False
        # Rounded probabilities are probabilities.
        if self.scores and (address := value.untyped_storage().data_ptr()) in self.scores:
            self.scores[changed.untyped_storage().data_ptr()] = self.scores[address][0], changed
        return changed


class _Spelled(TorchFunctionMode):
    """Compute attention by the operators that define it, and others as one operator each."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators = operators

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention:
            self.operators.has_fused_attention = True
            operators, sides = self.operators, AttentionSides.of(*args, **kwargs)
            rule = operators.attention
            instead = None
            if isinstance(rule, KnownRule):
                instead = functools.partial(sides.by_rule, rule, operators.paused)
            return operators.compose("attention", sides.exact, instead)
        if function in _COMPOSED:
            return self.operators.compose(function.__name__, lambda: function(*args, **kwargs))
        return function(*args, **kwargs)


def trace(
    like: Callable[..., Any],
    arguments: Sequence[Any],
    scales: Scales | None = None,
    dtype: torch.dtype = torch.float64,
) -> Operators:
    """Run a function and return its operators, by number, and if they hold an attention."""
    operators = Operators(scales=_by_address(arguments, scales))
    with _Spelled(operators), operators:
        evaluate(like, arguments, dtype)
    return operators


def stored_sites(
    like: Callable[..., Any], arguments: Sequence[Any], names: Sequence[str], dtype: torch.dtype
) -> frozenset[int]:
    """Return the operators whose results a function itself rounds where it gets such arguments.

    What it computes in float32 by its own words, such as a norm, is none of them. Nor is the last
    operator, which gives the result.
    """
    own = trace(like, arguments, dtype=dtype)
    if own.names != list(names):
        return frozenset()
    return frozenset(site for site, of in enumerate(own.dtypes[:-1]) if of == dtype)


def evaluate_changed(
    like: Callable[..., Any],
    arguments: Sequence[Any],
    change: Callable[[Tensor, int, str], Tensor],
) -> Tensor:
    """Return what a function gives whose operators' results are changed, but for the last one."""
    count = len(trace(like, arguments).names)
    operators = Operators(
        lambda value, site, name: value if site == count - 1 else change(value, site, name)
    )
    with _Spelled(operators), operators:
        return evaluate(like, arguments)


def evaluate_as(
    like: Callable[..., Any],
    arguments: Sequence[Any],
    arithmetic: Arithmetic,
    noise: Noise | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Return what a function gives in an arithmetic, in float64 before the last rounding.

    noise   moves values by float noise before they are rounded
    scales  position → scale of each element of a dequantized argument
    """
    near = list(arguments)
    for position in arithmetic.arguments:
        # Codes times scales in float32 first, as real code has them.
        near[position] = rounded(rounded(near[position], torch.float32), arithmetic.dtype)

    names = arithmetic.names
    table = _by_address(near, scales)

    def change(value: Tensor, site: int, name: str) -> Tensor:
        if not arithmetic.rounds(site, name, len(names)):
            return value
        if noise is not None:
            value = noise.inexact(value, EXPONENTIAL if "softmax" in name else SUMS)
        return rounded(value, arithmetic.dtype)

    def evaluated() -> tuple[Tensor, list[str]]:
        operators = Operators(change, arithmetic, noise, table)
        with _Spelled(operators), operators:
            return evaluate(like, near), operators.names

    result, of_these = evaluated()
    if arithmetic.sites and names and len(of_these) != len(names):
        names = tuple(of_these)  # other operators than the example's: again, by their names
        if noise is not None:
            noise.restart()
        result, _ = evaluated()
    return result


def _by_address(arguments: Sequence[Any], scales: Scales | None) -> dict[int, Tensor]:
    """Key scales by the memory of their argument; of arguments in order of their memory."""
    table = {}
    for position, tensor in (scales or {}).items():
        argument = arguments[position]
        if argument.is_contiguous() and argument.dtype == torch.float64 and argument.numel():
            table[argument.untyped_storage().data_ptr()] = tensor.contiguous()
    return table


def _dtype_of(values: Tensor) -> torch.dtype:
    """Return the narrowest dtype that holds values exactly."""
    for dtype in _OPERANDS:
        if bool((rounded(values, dtype) == values).all()):
            return dtype
    return torch.float32
