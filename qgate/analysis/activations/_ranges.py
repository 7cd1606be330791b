"""Percentiles of the signed values of each channel, from a compact histogram per channel."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.analysis.activations._reading import Reading
from qgate.results.activations import ChannelRanges

Floats = npt.NDArray[np.float64]
Table = npt.NDArray[np.uint32]
PERCENTILES = (0.0, 0.01, 1.0, 25.0, 50.0, 75.0, 99.0, 99.99, 100.0)
ERROR = 1 / 32 + 2.0**-8
_STEPS = 16  # bins per power of two
_BELOW = 20  # powers of two under the largest of the first tensor; what is smaller counts as zero
_ROWS = 2048, 512  # that are held: so many at most, and at least so many of wide tables
_TOGETHER = 2**21
_PIECE = 2**19, 128  # elements that stay in the cache, and rows at least
_PLACES = 2**15
_INFINITY = 0x7F80


class _Scratch(threading.local):
    """Memory that is used again: fresh pages cost more than what is done in them."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.int16, device="cpu")

    def of(self, rows: int, columns: int) -> Tensor:
        if len(self._room) < rows * columns:
            self._room = torch.empty(rows * columns, dtype=torch.int16, device="cpu")
        return self._room[: rows * columns].view(rows, columns)


_scratch = _Scratch()


class ChannelCounts:
    """A histogram per channel: 16 bins per power of two and sign, as in a bfloat16 with four bits
    of fraction.

    Bytes per channel: 4 × 2 × 16 × (20 + the powers of two from the largest value of the first
    tensor to the largest of all, and one) — 2.7 KB where that does not move. Magnitudes below
    2^-20 of the largest of the first tensor count as zero.

    Going through a histogram costs as much as counting some hundred values, so a few samples are
    held as bfloat16 numbers until they are worth it: 1 to 4 KB per channel more.
    """

    def __init__(self) -> None:
        self._base, self._bins = 1, 0  # until a value is not zero
        # Channels by magnitudes, zero first, by signs.
        self._table: Table = np.zeros((0, 1, 2), dtype=np.uint32)
        # Blocks of channels by tokens, one behind the other: twice the bin, and one if negative.
        self._room: Tensor | None = None
        self._width = 0
        self._blocks: list[Tensor] = []
        self._held = self._top = 0
        self._odd = False

    def add(self, reading: Reading) -> None:
        if reading.amax:
            top = _bin(reading.amax)
            if not self._bins:
                base = max(top - _BELOW * _STEPS, 1)
                self._table = self._moved(base, top + 1)
                self._base, self._bins = base, top + 1 - base
            self._top = max(self._top, top)
        width = reading.table.shape[1]
        if width != self._width:
            self.settle()
            self._width = width
        most = min(max(_TOGETHER // width, _ROWS[1]), _ROWS[0])
        for rows in reading.table.split(min(max(_PIECE[0] // width, _PIECE[1]), most)):
            if self._held + len(rows) > most:
                self._count()
            if len(rows):
                self._hold(rows, reading.finite, most)

    def _hold(self, rows: Tensor, finite: bool, most: int) -> None:
        if self._room is None:
            self._room = torch.empty(most * self._width, dtype=torch.int16, device="cpu")
        rows = rows if finite else rows.where(rows.isfinite(), math.nan)
        if rows.dtype != torch.bfloat16:
            rows = _scratch.of(*rows.shape).view(torch.bfloat16).copy_(rows)
        start, count = self._held * self._width, rows.numel()
        block = self._room[start : start + count].view(self._width, len(rows))
        block.copy_(rows.view(torch.int16).T)
        signs = torch.bitwise_right_shift(block, 15, out=_scratch.of(*block.shape))
        block.bitwise_and_(0x7FFF)
        odd = None if finite else block > _INFINITY
        block.bitwise_right_shift_(3).clamp_(min=self._base - 1).sub_(self._base - 1)
        block.mul_(2).sub_(signs)
        if odd is not None:
            block.masked_fill_(odd, -1)
            self._odd = True
        self._blocks.append(block)
        self._held += len(rows)

    def _count(self) -> None:
        """Those that are held."""
        if not self._held:
            return
        if self._top >= self._base + self._bins:
            self._widen(self._top + 1 - self._base - self._bins)
        if self._width > len(self._table):
            more = self._width - len(self._table), *self._table.shape[1:]
            self._table = np.concatenate([self._table, np.zeros(more, dtype=np.uint32)])
        places = 2 * (self._bins + 1)
        step = max(_PLACES // places, 1)
        offsets = torch.arange(step, dtype=torch.int16, device="cpu")[:, None] * places
        # Few channels at a time: their histograms stay in the cache.
        for start in range(0, self._width, step):
            table = self._table[start : start + step]
            index = _scratch.of(len(table), self._held).view(-1)
            end = 0
            for block in self._blocks:
                part = block[start : start + step]
                if self._odd:
                    kept = (part + offsets[: len(part)])[part >= 0]
                    index[end : end + len(kept)] = kept
                    end += len(kept)
                    continue
                into = index[end : end + part.numel()].view(part.shape)
                torch.add(part, offsets[: len(part)], out=into)
                end += part.numel()
            found = torch.bincount(index[:end], minlength=len(table) * places)
            table += found.to(torch.int32).numpy().view(np.uint32).reshape(table.shape)
        self._blocks, self._held, self._odd = [], 0, False

    def settle(self) -> None:
        """Counts what is held, and gives the memory for it back."""
        self._count()
        self._room = None

    def merge(self, other: ChannelCounts) -> None:
        self.settle()
        other.settle()
        base = max(each._base for each in (self, other))
        top = max(self._base + self._bins, other._base + other._bins)
        mine, theirs = self._moved(base, top), other._moved(base, top)
        if len(mine) < len(theirs):
            mine, theirs = theirs, mine
        mine[: len(theirs)] += theirs
        self._base, self._bins, self._table = base, top - base, mine
        self._top = max(self._top, other._top)

    def _moved(self, base: int, top: int) -> Table:
        """The same counts in bins from `base` to `top`; those below it count as zero."""
        found = np.zeros((len(self._table), top - base + 1, 2), dtype=np.uint32)
        low = base - self._base
        if low <= 0:
            found[:, 0] = self._table[:, 0]
            found[:, 1 - low : 1 - low + self._bins] = self._table[:, 1:]
        else:
            found[:, 0] = self._table[:, : low + 1].sum(axis=1)
            kept = self._table[:, low + 1 :]
            found[:, 1 : 1 + kept.shape[1]] = kept
        return found

    def _widen(self, more: int) -> None:
        # Some room, so that a slowly growing maximum does not copy the table each time.
        self._table = self._moved(self._base, self._base + self._bins + more + _STEPS)
        self._bins += more + _STEPS

    @property
    def nbytes(self) -> int:
        return self._table.nbytes + (0 if self._room is None else self._room.nbytes)

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
        self.settle()
        sizes = [_value(self._base + k) for k in range(self._bins)]
        low, high = np.nan_to_num(lows), np.nan_to_num(highs)
        if absolute:
            counts, values = self._table.sum(axis=2, dtype=np.int64), np.array([0.0, *sizes])
            low, high = np.zeros_like(low), np.maximum(high, -low)
        else:
            above, below = self._table[:, :, 0].astype(np.int64), self._table[:, :0:-1, 1]
            above[:, 0] += self._table[:, 0, 1]
            counts = np.concatenate([below, above], axis=1)
            values = np.array([*(-s for s in reversed(sizes)), 0.0, *sizes])
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
