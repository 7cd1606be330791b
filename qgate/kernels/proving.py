"""A kernel is used after it gave the definition's bits on this device, in this process and way.

It has to give them on hard `cases`. A kernel that does not, or that cannot be compiled, is reported
once and not used.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Hashable
from functools import lru_cache

import torch
from torch import Tensor

from qgate.errors import first_line

DEVICES = {"cuda"}
"""Types of devices that may have kernels."""
_verdicts: dict[Hashable, bool] = {}
_lock = threading.RLock()


class KernelWarning(UserWarning):
    """A kernel is not used: its results differ from the definition's, or it does not run."""


def serves(device: torch.device) -> bool:
    """Tell whether tensors of this device may have kernels."""
    return device.type in DEVICES and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def verdicts() -> dict[Hashable, bool]:
    """Return what the proofs said: the same dictionary as long as they hold."""
    return _verdicts


def is_known(way: Hashable, device: torch.device) -> bool:
    """Tell whether a kernel was proved in this way, well or not."""
    return (way, device) in _verdicts


def prove_once(
    way: Hashable,
    device: torch.device,
    work: str,
    prove: Callable[[], str],
    instead: str = "torch alone",
) -> bool:
    """Tell whether a kernel may be used in this way; `prove` describes its first error or none."""
    key = (way, device)
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = True  # for casts inside the proof itself
            try:
                wrong = prove()
            except Exception as error:
                wrong = f"{type(error).__name__}: {first_line(error, 200)}"
            _verdicts[key] = not wrong
            if wrong:
                warnings.warn(
                    f"qgate computes {work} on {device} with {instead}, which is slower and the "
                    f"same to the last bit: its kernel was tried and failed ({wrong}).",
                    KernelWarning,
                    stacklevel=2,
                )
        return _verdicts[key]


def first_difference(actual: Tensor, expected: Tensor, inputs: Tensor | None = None) -> str:
    """Describe where two results differ in a bit, or return an empty text; NaN equals NaN."""
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
    index = int(differs.reshape(-1).nonzero()[0])
    of = "" if inputs is None else f" of {inputs.cpu().reshape(-1)[index].item()!r}"
    return (
        f"{int(differs.sum())} of {a.numel()} values differ, the first is "
        f"{a.reshape(-1)[index].item()!r} instead of {e.reshape(-1)[index].item()!r}{of}"
    )
