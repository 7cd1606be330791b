"""Start a program on the device of a tensor, on its bits."""

from __future__ import annotations

import contextlib
import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qgate.kernels.shapes import TILE

_ALIGNED = 16


def bits(x: Tensor) -> Tensor:
    """View numbers as integers of their width, as programs load them."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def flat_bits(x: Tensor) -> Tensor:
    """Return `bits` of all numbers in a row.

    `reshape` alone leaves the gaps of a view like `x[::2]`, and a negative view has the signs of
    another tensor.
    """
    return bits(x.reshape(-1).contiguous().resolve_neg())


def launch(
    program: Any, programs: int, x: Tensor, *arguments: Any, warps: int = 4, **constants: Any
) -> Any:
    """Start a program without fused multiply-add, which rounds once where torch rounds twice.

    Returns what triton compiled, None in its interpreter.
    """
    for argument in (x, *arguments):
        if isinstance(argument, torch.Tensor) and not argument.is_contiguous():
            raise ValueError("a program got a tensor with gaps: it would read what is in them.")
    with _on(x):
        return program[(programs,)](
            x, *arguments, **constants, num_warps=warps, enable_fp_fusion=False
        )


def to_host(x: Tensor) -> Tensor:
    """Copy a tensor to the host; from CUDA through pinned memory, which saves a second copy."""
    if not x.is_cuda:
        return x.cpu()
    room = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    room.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return room


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


class Step:
    """One launch with all that does not change between calls; the tensors come with the call.

    `slots` says which of the call's tensors the program takes. Triton looks up what it compiled by
    all arguments, which takes longer than the launch, so it is asked once: all numbers are the same
    ever after, and tensors that begin at other places than the first ones are looked up again.
    """

    def __init__(
        self, program: Any, programs: int, slots: tuple[int, ...], numbers: tuple[float, ...],
        warps: int, **constants: Any,
    ) -> None:  # fmt: skip
        self.program, self.programs, self.slots = program, programs, slots
        self.numbers, self.warps, self.constants = numbers, warps, constants
        self._compiled: Any = None
        self._rest: tuple[Any, ...] = (*numbers, *constants.values())

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on contiguous tensors."""
        mine = [tensors[slot] for slot in self.slots]
        compiled = self._compiled
        if compiled is not None and _all_aligned(mine):
            with _on(mine[0]):
                compiled(*mine, *self._rest)
            return
        raw = [
            bits(t) if slot < 2 or t.dtype.itemsize == 2 else t
            for slot, t in zip(self.slots, mine, strict=True)
        ]
        found = launch(
            self.program, self.programs, *raw, *self.numbers, warps=self.warps,
            **self.constants,
        )  # fmt: skip
        if compiled is None and _all_aligned(mine):
            self._compiled = self._handle(found)

    def _handle(self, found: Any) -> Any:
        """Return the compiled program with its grid, None where this triton has none to call.

        It takes the arguments in the order of the program's parameters.
        """
        names = list(getattr(self.program, "arg_names", ()))
        in_order = names[len(self.slots) + len(self.numbers) :] == list(self.constants)
        try:
            return found[(self.programs, 1, 1)] if in_order else None
        except (TypeError, AttributeError):
            return None


def _all_aligned(tensors: list[Tensor]) -> bool:
    return all(t.data_ptr() % _ALIGNED == 0 for t in tensors)


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Tell whether triton runs programs in numpy, on tensors of the CPU."""
    try:
        knobs = importlib.import_module("triton.knobs")
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def tile() -> int:
    """Return the elements per program: what registers hold; the interpreter is faster with more."""
    return 2**16 if interpreted() else TILE
