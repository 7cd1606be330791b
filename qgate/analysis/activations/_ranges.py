"""Percentiles of the signed values of each channel, from a compact histogram per channel."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.analysis.activations._reading import Reading
from qgate.results.activations import ChannelRanges

Floats = npt.NDArray[np.float64]
PERCENTILES = (0.0, 0.01, 1.0, 25.0, 50.0, 75.0, 99.0, 99.99, 100.0)
ERROR = 1 / 32 + 2.0**-8
_STEPS = 16  # bins per power of two
_BELOW = 20  # powers of two under the largest of the first tensor; what is smaller counts as zero
_ROOM = 2**16
_PART = 2**19


class ChannelCounts:
    """A histogram per channel: 16 bins per power of two and sign, as in a bfloat16 with four bits
    of fraction.

    Bytes per channel: 4 × 2 × 16 × (20 + the powers of two from the largest value of the first
    tensor to the largest of all, and one) — 2.7 KB where that does not move. Magnitudes below
    2^-20 of the largest of the first tensor count as zero.
    """

    def __init__(self) -> None:
        self._base = 0
        self._bins = 0
        self._table: npt.NDArray[np.uint32] = np.zeros((0, 1), dtype=np.uint32)
        self._at: tuple[tuple[int, int], Tensor] | None = None

    def add(self, reading: Reading) -> None:
        top = _bin(reading.amax) if reading.amax else self._base + self._bins - 1
        if not self._bins:
            self._base, self._bins = top - _BELOW * _STEPS, _BELOW * _STEPS + 1
            self._table = np.zeros((0, 2 * self._bins + 1), dtype=np.uint32)
        if top >= self._base + self._bins:
            self._widen(top + 1 - self._base - self._bins)
        width = reading.table.shape[1]
        if width > len(self._table):
            more = np.zeros((width - len(self._table), self._table.shape[1]), dtype=np.uint32)
            self._table = np.concatenate([self._table, more])
        places = 2 * self._bins + 1
        step = max(_ROOM // places, 1)
        offsets = torch.arange(step, dtype=torch.int32, device="cpu")[:, None] * places
        at = self._lookup()
        for rows in reading.table.split(max(_PART // width, 1)):
            # A channel after the other, and few at a time: their histograms stay in the cache.
            turned = rows.to(torch.bfloat16).T.contiguous()
            for start in range(0, width, step):
                part = turned[start : start + step]
                bits = part.view(torch.uint16).to(torch.int32)
                index = at.index_select(0, bits.view(-1)).view(bits.shape)
                index.add_(offsets[: len(part)])
                if not reading.finite:
                    index = index[part.isfinite()]
                counted = torch.bincount(index.view(-1), minlength=len(part) * places)
                counted = counted.view(len(part), places)
                self._table[start : start + step] += counted.numpy().astype(np.uint32)

    def _lookup(self) -> Tensor:
        """The bin of each bfloat16 pattern."""
        if self._at is None or self._at[0] != (self._base, self._bins):
            patterns = np.arange(2**16)
            sizes = (((patterns & 0x7FFF) >> 3) - (self._base - 1)).clip(0, self._bins)
            bins = np.where(patterns >> 15, -sizes, sizes) + self._bins
            self._at = (self._base, self._bins), torch.from_numpy(bins.astype(np.int32))
        return self._at[1]

    def merge(self, other: ChannelCounts) -> None:
        if not other._bins:
            return
        if not self._bins:
            self._base, self._bins, self._table = other._base, other._bins, other._table.copy()
            return
        base = max(self._base, other._base)
        top = max(self._base + self._bins, other._base + other._bins)
        mine, theirs = self._moved(base, top), other._moved(base, top)
        if len(mine) < len(theirs):
            mine, theirs = theirs, mine
        mine[: len(theirs)] += theirs
        self._base, self._bins, self._table = base, top - base, mine

    def _moved(self, base: int, top: int) -> npt.NDArray[np.uint32]:
        """The same counts in bins from `base` to `top`; those below it count as zero."""
        bins = top - base
        found = np.zeros((len(self._table), 2 * bins + 1), dtype=np.uint32)
        own = np.arange(-self._bins, self._bins + 1)
        sizes = np.maximum(np.abs(own) + (self._base - base), 0)
        places = np.where(own == 0, 0, np.sign(own) * sizes) + bins
        for place, column in zip(places.tolist(), self._table.T, strict=True):
            found[:, place] += column
        return found

    def _widen(self, more: int) -> None:
        # Some room, so that a slowly growing maximum does not copy the table each time.
        self._table = self._moved(self._base, self._base + self._bins + more + _STEPS)
        self._bins += more + _STEPS

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def ranges(
        self,
        lows: Floats,
        highs: Floats,
        percentiles: tuple[float, ...] = PERCENTILES,
        *,
        absolute: bool = False,
    ) -> ChannelRanges:
        """Of each channel the value that numpy's method "lower" finds, to the middle of its bin;
        the ends are exact, except the least magnitude. Without finite values there are zeros."""
        counts = self._table.astype(np.int64)
        sizes = [_value(self._base + k) for k in range(self._bins)]
        values = np.array([*(-s for s in reversed(sizes)), 0.0, *sizes])
        low, high = np.nan_to_num(lows), np.nan_to_num(highs)
        if absolute:
            above, below = counts[:, self._bins :], counts[:, self._bins :: -1]
            counts, values = above + below, values[self._bins :]
            counts[:, 0] -= below[:, 0]
            low, high = np.zeros_like(low), np.maximum(high, -low)
        ends = np.cumsum(counts, axis=1)
        last = (ends[:, -1] - 1).clip(0)
        found: dict[str, list[float]] = {}
        for p in percentiles:
            if p == 100.0 or (p == 0.0 and not absolute):
                found[_name(p)] = (low if p == 0.0 else high).tolist()
                continue
            place = np.floor(last * (p / 100))
            at = (ends <= place[:, None]).sum(axis=1).clip(0, len(values) - 1)
            found[_name(p)] = values[at].clip(low, high).tolist()
        return ChannelRanges(percentiles=found, error=ERROR)


def _bin(value: float) -> int:
    """The bin of a magnitude, as its bfloat16 pattern without the last three bits."""
    bits = torch.tensor([value], dtype=torch.float64, device="cpu").to(torch.bfloat16)
    return int(bits.view(torch.int16)) >> 3


def _value(place: int) -> float:
    """The middle of a bin."""
    bits = torch.tensor([(place << 3) + 4, place << 3], dtype=torch.int16, device="cpu")
    middle = float(bits.view(torch.bfloat16)[0].double()) if place >= 0 else 0.0
    return middle if math.isfinite(middle) else float(bits.view(torch.bfloat16)[1].double())


def _name(p: float) -> str:
    return f"{p:g}"
