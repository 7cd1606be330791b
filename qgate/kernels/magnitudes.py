"""The largest magnitude of a tensor, in one reading of it."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from qgate.kernels import cases, proving
from qgate.kernels.launching import bits, flat_bits, launch, tile
from qgate.kernels.shapes import kind_of


def largest(x: Tensor) -> Tensor | None:
    """Its bits without the sign, as one int32 of x's dtype's order; None without a kernel."""
    if not proving.serves(x.device) or kind_of(x.dtype) is None or not x.numel():
        return None
    what = f"the largest magnitude of {str(x.dtype).removeprefix('torch.')} tensors"
    way = ("largest", x.dtype)
    return found(x) if proving.proven(way, x.device, what, lambda: _wrong(x)) else None


def found(x: Tensor) -> Tensor:
    """Without the proof."""
    programs = importlib.import_module("qgate.kernels.programs.magnitudes")
    flat, room = flat_bits(x), tile()
    most = torch.zeros(1, dtype=torch.int32, device=x.device)
    mask = 0x7FFF if x.dtype.itemsize == 2 else 0x7FFFFFFF
    launch(programs.largest, -(-len(flat) // room), flat, most, len(flat), TILE=room, MASK=mask)
    return most


def by_torch(x: Tensor) -> Tensor:
    """The definition."""
    native = bits(x.reshape(-1))
    return native.bitwise_and(torch.iinfo(native.dtype).max).amax().reshape(1).to(torch.int32)


def _wrong(x: Tensor) -> str:
    every = cases.numbers(x.dtype)
    finite = every[every.isfinite()]
    for trial in (every, finite, finite[:5], finite[-77:], -finite[1::2], finite[:1] * 0):
        there = found(trial.to(x.device))
        if wrong := proving.difference(there, by_torch(trial)):
            return wrong
    return ""
