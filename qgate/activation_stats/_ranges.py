"""Percentiles of the signed values of each channel, from a compact histogram per channel."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.activation_stats._tensor_pass import TensorReading
from qgate.activation_stats.record import ChannelRanges

Floats = npt.NDArray[np.float64]
Table = npt.NDArray[np.uint32]
PERCENTILES = (0.0, 0.01, 1.0, 25.0, 50.0, 75.0, 99.0, 99.99, 100.0)
ERROR = 1 / 32 + 2.0**-8
_STEPS = 16  # bins per power of two
_BELOW = 20  # powers of two under that of the largest value; what is smaller counts as zero
_BINS = _STEPS * (_BELOW + 1)
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

    2.7 KB per channel. Magnitudes below 2^-20 of the power of two of the largest of all count as
    zero, also if that one comes last: any order and any parts give the same counts.

    Going through a histogram costs as much as counting some hundred values, so a few samples are
    held as bfloat16 numbers until they are worth it: 1 to 4 KB per channel more.
    """

    def __init__(self) -> None:
        self._base = 1  # the bin of the smallest magnitude that is no zero
        # Channels by magnitudes, zero first, by signs.
        self._table: Table = np.zeros((0, _BINS + 1, 2), dtype=np.uint32)
        # Blocks of channels by tokens, one behind the other: twice the bin, and one if negative.
        self._room: Tensor | None = None
        self._width = 0
        self._blocks: list[Tensor] = []
        self._held = 0
        self._odd = False

    def add(self, reading: TensorReading) -> None:
        if reading.amax:
            self._lift(max((_bin(reading.amax) // _STEPS - _BELOW) * _STEPS, 1))
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
        self._broaden(self._width)
        places = 2 * (_BINS + 1)
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
        self._lift(other._base)
        self._broaden(len(other._table))
        self._table[: len(other._table)] += _lifted(other._table, self._base - other._base)

    def _lift(self, base: int) -> None:
        """The same counts in bins from `base` on, if that is higher; those below count as zero."""
        if base > self._base:
            self._count()
            self._table = _lifted(self._table, base - self._base)
            self._base = base

    def _broaden(self, width: int) -> None:
        if width > len(self._table):
            more = width - len(self._table), *self._table.shape[1:]
            self._table = np.concatenate([self._table, np.zeros(more, dtype=np.uint32)])

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process is counted before."""
        self.settle()
        return self.__dict__

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
        sizes = [_value(self._base + k) for k in range(_BINS)]
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
        exact: list[str] = []
        for p in percentiles:
            if p == 100.0 or (p == 0.0 and not absolute):
                exact.append(_name(p))
                found[_name(p)] = (low if p == 0.0 else high).tolist()
                continue
            place = np.floor(last * (p / 100))
            at = (ends <= place[:, None]).sum(axis=1).clip(0, len(values) - 1)
            found[_name(p)] = values[at].clip(low, high).tolist()
        return ChannelRanges(percentiles=found, error=ERROR, exact=exact)


def _lifted(table: Table, bins: int) -> Table:
    """With so many bins at the lower end in that of zero."""
    bins = min(bins, _BINS)
    if not bins:
        return table
    found = np.zeros_like(table)
    found[:, 0] = table[:, : bins + 1].sum(axis=1)
    found[:, 1 : _BINS + 1 - bins] = table[:, bins + 1 :]
    return found


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
