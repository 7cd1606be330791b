"""A kernel is used once it gave the definition's bits on this device, in this process and way.

What it has to give them on are `cases` that were chosen to be hard. A kernel that does not, or that
cannot be compiled, is told of once, and left alone from then on.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

DEVICES = {"cuda"}
"""Types of devices that there can be kernels for."""
_verdicts: dict[Hashable, bool] = {}
_held = threading.RLock()


class KernelWarning(UserWarning):
    """A kernel is not used: its results differ from the definition's, or it does not run."""


def serves(device: torch.device) -> bool:
    """If there can be kernels for tensors of this device."""
    return device.type in DEVICES and _there()


def _there() -> bool:
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def proven(way: Hashable, device: torch.device, what: str, prove: Callable[[], str]) -> bool:
    """Whether a kernel may be used in this way; `prove` says what is wrong, or nothing."""
    key = (way, device)
    with _held:
        if key not in _verdicts:
            _verdicts[key] = True  # for what the proof itself asks
            try:
                wrong = prove()
            except Exception as error:
                wrong = f"{type(error).__name__}: {_first_line(error)}"
            _verdicts[key] = not wrong
            if wrong:
                warnings.warn(
                    f"qgate computes {what} on {device} with torch alone, which is slower and the "
                    f"same to the last bit: its kernel was tried and failed ({wrong}).",
                    KernelWarning,
                    stacklevel=2,
                )
        return _verdicts[key]


def difference(actual: Tensor, expected: Tensor, given: Tensor | None = None) -> str:
    """Where two results differ in a bit, the empty text where none do; a NaN equals a NaN."""
    a, e = actual.cpu(), expected.cpu()
    if a.shape != e.shape or a.dtype != e.dtype:
        return f"{a.dtype} {tuple(a.shape)} instead of {e.dtype} {tuple(e.shape)}"
    if a.dtype.is_floating_point:
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
        differs = a.view(integer) != e.view(integer)
        differs &= ~(a.isnan() & e.isnan())
    else:
        differs = a != e
    if not differs.any():
        return ""
    place = int(differs.reshape(-1).nonzero()[0])
    of = "" if given is None else f" of {given.cpu().reshape(-1)[place].item()!r}"
    return (
        f"{int(differs.sum())} of {a.numel()} values differ, the first is "
        f"{a.reshape(-1)[place].item()!r} instead of {e.reshape(-1)[place].item()!r}{of}"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "without a message"
