"""The error for a sample that a model does not run on: which one, its shapes, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qgate.device_errors import device_error
from qgate.errors import QgateError
from qgate.text import beginning, one_line

REFUSALS = (ValueError, TypeError, RuntimeError, AssertionError)
"""Exceptions with which a module says that it does not take an input."""
LENGTH_REFUSALS = (*REFUSALS, IndexError)
"""Those of a whole model at a length that it was not made for: tables of positions end."""
_MOST = 300
_MIXED = "on the same device"
"""Words of torch about tensors of two devices."""


class RefusedSampleError(QgateError, RuntimeError):
    """A sample that a model does not run on; its cause is the model's own error."""


def refusal(
    name: str, which: str, sample: Any, error: BaseException, module: nn.Module | None = None
) -> QgateError:
    """Return the error, on one line; an error of the device is no refusal."""
    own = device_error(error, f"{which} of {one_line(name)} ({_shapes(sample)})")
    if own is not None:
        return own
    reason = beginning(f"{type(error).__name__}: {error}", _MOST)
    text = f"{one_line(name)} cannot run {which} ({_shapes(sample)}): {reason}"
    if module is not None and _MIXED in str(error):
        text = f"{text.rstrip('.!')}; {_places_of(module)}."
    return RefusedSampleError(text)


def _places_of(module: nn.Module) -> str:
    """Say on which devices the weights of a model are, and what to do about a mixture."""
    by_device: dict[str, list[str]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        by_device.setdefault(str(tensor.device), []).append(name)
    if len(by_device) < 2:
        return (
            f"its weights are all on {''.join(by_device) or 'no device'}: its code makes or keeps "
            "another tensor elsewhere, which register_buffer or device=x.device would move along"
        )
    places = [
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} on {device}"
        for device, names in by_device.items()
    ]
    return (
        f"it has {', '.join(places)}: move it to one device with .to(DEVICE), or let its own code "
        "move what flows between them"
    )


def which_of(inputs: Sequence[Any], sample: Any) -> str:
    """Say which of the inputs a sample is, from 0, or which of them it holds side by side."""
    numbers = [k for k, own in enumerate(inputs) if own is sample]
    if not numbers and isinstance(sample, Tensor) and sample.dim():
        rows = sample.cpu()
        numbers = [k for k, own in enumerate(inputs) if _is_within(own, rows)]
    if not numbers:
        return "a sample"
    several = len(numbers) > 1
    return f"sample{'s' * several} {', '.join(map(str, numbers))} of 0 to {len(inputs) - 1}"


def _is_within(own: Any, rows: Tensor) -> bool:
    """Tell if a batch has a sample as its rows."""
    if not (
        isinstance(own, Tensor) and own.dim() == rows.dim() and own.shape[1:] == rows.shape[1:]
    ):
        return False
    own = own.cpu()
    return any(torch.equal(part, own) for part in rows.split(max(1, len(own))))


def _shapes(sample: Any) -> str:
    """Describe the tensors of a sample, with the names of keyword arguments."""
    if isinstance(sample, Tensor):
        shape = " x ".join(map(str, sample.shape)) or "one number"
        return f"{str(sample.dtype).removeprefix('torch.')} {shape}"
    if isinstance(sample, Mapping):
        return ", ".join(f"{key} {_shapes(value)}" for key, value in sample.items())
    if isinstance(sample, list | tuple):
        return ", ".join(map(_shapes, sample))
    return type(sample).__name__
