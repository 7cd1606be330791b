"""Operators of torch as they are called, one by one."""

from __future__ import annotations

import sys

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode that sees operators without torch's compiler, unless that is loaded already.

    torch would load it to keep it from compiling the mode, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return "torch._dynamo" in sys.modules
