"""Errors of devices as one sentence: memory that is too small, and a device that is lost.

A kernel that reads outside of its memory ends the context of its device, and nothing runs there in
this process any more. Such an error shows late, at whatever waits for the device next.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from qgate.errors import QgateError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# Errors after which nothing more runs; others, such as of a launch, fail one call.
_LOST = (
    "device-side assert triggered",
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "unspecified launch failure",
    "hardware stack error",
    "invalid program counter",
    "uncorrectable ECC error",
)
_ADVICE = (
    "fewer or shorter samples (--samples, --seqlen), a device with more memory, or --device cpu"
)
_SIZE = r"([0-9.]+ [KMGT]?i?B)"
_MISSING = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_MEMORY = re.compile(rf"(?:total )?capacity of {_SIZE}(?: of which {_SIZE} is free)?")
_NUMBER = re.compile(r"\b(?:GPU|XPU|NPU|device) ([0-9]+)\b")


class DeviceMemoryWarning(UserWarning):
    """Fewer samples run at a time, as more do not fit the memory of a device."""


class DeviceMemoryError(QgateError):
    """Work that does not fit the memory of a device; `memory` is the device and its size."""

    memory = ""


class LostDeviceError(QgateError):
    """A kernel stopped a device: nothing runs there in this process any more."""


def device_error(
    error: BaseException, what: str = "this", advice: str = _ADVICE
) -> QgateError | None:
    """Return an error of a device as one sentence about `what`; None for any other error."""
    for cause in _causes(error):
        if isinstance(cause, DeviceMemoryError | LostDeviceError):
            return cause
        if _is_out_of_memory(cause):
            memory = _memory(cause)
            shortage = DeviceMemoryError(f"{memory} is too small for {what}. Give {advice}.")
            shortage.memory = memory
            return shortage
        if (words := _words_of_loss(cause)) is not None:
            return LostDeviceError(
                f"a kernel stopped the device for this process ({words}), while {what} ran or "
                "earlier: nothing runs on that device in this process any more. "
                "CUDA_LAUNCH_BLOCKING=1 shows which kernel it was."
            )
    return None


@contextlib.contextmanager
def in_sentences(what: str, advice: str = _ADVICE) -> Iterator[None]:
    """Raise errors of devices as one sentence about `what`, without what torch did."""
    try:
        yield
    except Exception as error:
        own = device_error(error, what, advice)
        if own is None or own is error:
            raise
        raise own from None


def lost_device(error: BaseException) -> bool:
    """Tell if an error says that its device is lost to this process."""
    return any(
        isinstance(cause, LostDeviceError) or _words_of_loss(cause) is not None
        for cause in _causes(error)
    )


def memory_of(error: BaseException) -> str | None:
    """Return the device that ran out of memory with its size; None for another error."""
    shortage = device_error(error)
    return shortage.memory if isinstance(shortage, DeviceMemoryError) else None


def in_parts(
    run: Callable[[int], T],
    most: int,
    name: str,
    device: torch.device,
    undo: Callable[[], object] = lambda: None,
) -> tuple[T, int]:
    """Run what takes up to `most` samples at a time, and half of them while they do not fit.

    Return its result, and how many fitted. `undo` removes what an unfinished run left.
    A sample alone that does not fit is an error.
    """
    at_once, shortage = most, ""
    while True:
        try:
            result = run(at_once)
        except Exception as error:
            memory = memory_of(error)
            if memory is None:
                raise
            if at_once == 1:
                raise (device_error(error, f"one sample of {name}") or error) from error
            shortage = memory
        else:
            break
        # The error held tensors until here.
        undo()
        _empty_cache(device)
        at_once //= 2
    if at_once < most:
        does = "does" if at_once == 1 else "do"
        warnings.warn(
            f"{most} samples of {name} at a time do not fit {shortage}; {at_once} {does}.",
            DeviceMemoryWarning,
            stacklevel=3,
        )
    return result, at_once


def _empty_cache(device: torch.device) -> None:
    """Give back what the allocator of a device keeps of freed tensors."""
    import torch

    gc.collect()
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "empty_cache"):
        module.empty_cache()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_out_of_memory(error: BaseException) -> bool:
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(error, torch_module.OutOfMemoryError)


def _words_of_loss(error: BaseException) -> str | None:
    """Return what a driver calls the loss of a device."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    return next((words for words in _LOST if words in text), None)


def _memory(error: BaseException) -> str:
    """Name the device of an error as far as its text has it: `the memory of GPU 0 (79 GiB)`."""
    text = str(error)
    number, memory, missing = _NUMBER.search(text), _MEMORY.search(text), _MISSING.search(text)
    facts = []
    if memory:
        facts.append(memory[1] + (f", {memory[2]} free" if memory[2] else ""))
    if missing:
        facts.append(f"{missing[1]} more wanted")
    name = f"the memory of {number[0]}" if number else "the memory of the device"
    return f"{name} ({'; '.join(facts)})" if facts else name
