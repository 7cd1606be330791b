"""Largest magnitudes by place in the last dimension: which channels stand out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.summaries.record import Channels

_CHUNK = 2**17
_PLACES = 65
_LARGEST = 5
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The least magnitude, as an integer, that is not finite.
_INFINITY = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}


def channel_amax(x: Tensor) -> npt.NDArray[np.float64]:
    """The largest finite magnitude by place in the last dimension; 0 where there is none."""
    length = x.shape[-1] if x.dim() else 1
    table = x.detach().reshape(-1, length) if x.numel() else x.new_empty(0, length)
    if table.dtype not in _INFINITY:
        table = table.to(torch.bfloat16)
    kind = np.dtype(f"u{table.itemsize}")
    # As integers, magnitudes are in order, and no format or NaN is in the way.
    mask = np.array(2 ** (8 * table.itemsize - 1) - 1, dtype=kind)
    infinity = np.array(_INFINITY[table.dtype], dtype=kind)
    bits = table.view(_SIGNED[table.itemsize]).numpy().view(kind)
    largest = np.zeros(length, dtype=kind)
    step, width = max(_CHUNK // max(length, 1), 1), max(min(length, _CHUNK), 1)
    for row in range(0, len(bits), step):
        for column in range(0, length, width):
            there = slice(column, column + width)
            part = bits[row : row + step, there] & mask
            found = part.max(axis=0)
            if (found >= infinity).any():
                part[part >= infinity] = 0
                found = part.max(axis=0)
            np.maximum(largest[there], found, out=largest[there])
    signed = largest.view(np.uint8 if table.itemsize == 1 else f"i{table.itemsize}")
    return np.asarray(torch.from_numpy(signed).view(table.dtype).to(torch.float64).numpy())


def channels_of(x: Tensor) -> Channels:
    """The portrait of a tensor's channels. A tensor without any has none of their figures."""
    sizes = channel_amax(x)
    if not sizes.size:
        return Channels(count=0, median=0.0, largest=[], curve=[])
    order = np.argsort(-sizes, kind="stable")
    places = np.linspace(0, sizes.size - 1, min(_PLACES, sizes.size)).round().astype(np.int64)
    return Channels(
        count=sizes.size,
        median=float(np.median(sizes)),
        largest=[(int(i), float(sizes[i])) for i in order[:_LARGEST]],
        curve=sizes[order[places]].tolist(),
    )
