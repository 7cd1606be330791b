"""Percentiles of the signed values of each channel, from a compact histogram per channel."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.activation_stats._tensor_pass import TensorReading, scratch
from qgate.activation_stats.record import ChannelRanges
from qgate.stats.summary import Floats

Table = npt.NDArray[np.uint32]
PERCENTILES = (0.0, 0.01, 1.0, 25.0, 50.0, 75.0, 99.0, 99.99, 100.0)
ERROR = 1 / 32 + 2.0**-8
_STEPS = 16  # bins per power of two
_BELOW = 20  # powers of two under that of the largest value; what is smaller counts as zero
_BINS = _STEPS * (_BELOW + 1)
_ROWS = 2048, 512  # that wait: so many at most, and at least so many of wide tables
_TOGETHER = 2**21
_PIECE = 2**19, 128  # elements that stay in the cache, and rows at least
_PLACES = 2**15
_INFINITY = 0x7F80


class ChannelCounts:
    """A histogram per channel: 16 bins per power of two and sign, as in a bfloat16 with four bits
    of fraction.

    It takes 2.7 KB per channel. Magnitudes below 2^-20 of the power of two of the largest of all
    count as zero, also if that one comes last: any order and any parts give the same counts.

    A pass over a histogram costs as much as counting some hundred values, so rows wait as bfloat16
    numbers until there are enough: 1 to 4 KB per channel more.
    """

    def __init__(self) -> None:
        self._base = 1  # the bin of the smallest magnitude that is no zero
        # Channels by magnitudes, zero first, by signs.
        self._table: Table = np.zeros((0, _BINS + 1, 2), dtype=np.uint32)
        # Blocks of channels by tokens, one behind the other: twice the bin, and one if negative.
        self._room: Tensor | None = None
        self._width = 0
        self._blocks: list[Tensor] = []
        self._waiting = 0
        self._has_nonfinite = False

    def add(self, reading: TensorReading) -> None:
        if reading.amax:
            bits = torch.tensor([reading.amax], dtype=torch.float64, device="cpu").bfloat16()
            largest = int(bits.view(torch.int16)) >> 3
            self._lift(max((largest // _STEPS - _BELOW) * _STEPS, 1))
        width = reading.table.shape[1]
        if width != self._width:
            self.settle()
            self._width = width
        most = min(max(_TOGETHER // width, _ROWS[1]), _ROWS[0])
        for rows in reading.table.split(min(max(_PIECE[0] // width, _PIECE[1]), most)):
            if self._waiting + len(rows) > most:
                self._count()
            if len(rows):
                self._hold(rows, reading.finite, most)

    def _hold(self, rows: Tensor, finite: bool, most: int) -> None:
        if self._room is None:
            self._room = torch.empty(most * self._width, dtype=torch.int16, device="cpu")
        rows = rows if finite else rows.where(rows.isfinite(), math.nan)
        if rows.dtype != torch.bfloat16:
            rows = _scratch(*rows.shape).view(torch.bfloat16).copy_(rows)
        start, count = self._waiting * self._width, rows.numel()
        block = self._room[start : start + count].view(self._width, len(rows))
        block.copy_(rows.view(torch.int16).T)
        signs = torch.bitwise_right_shift(block, 15, out=_scratch(*block.shape))
        block.bitwise_and_(0x7FFF)
        nonfinite = None if finite else block > _INFINITY
        block.bitwise_right_shift_(3).clamp_(min=self._base - 1).sub_(self._base - 1)
        block.mul_(2).sub_(signs)
        if nonfinite is not None:
            block.masked_fill_(nonfinite, -1)
            self._has_nonfinite = True
        self._blocks.append(block)
        self._waiting += len(rows)

    def _count(self) -> None:
        """Count the rows that wait."""
        if not self._waiting:
            return
        self._broaden(self._width)
        places = 2 * (_BINS + 1)
        step = max(_PLACES // places, 1)
        offsets = torch.arange(step, dtype=torch.int16, device="cpu")[:, None] * places
        # Few channels at a time: their histograms stay in the cache.
        for start in range(0, self._width, step):
            table = self._table[start : start + step]
            index = _scratch(len(table), self._waiting).view(-1)
            end = 0
            for block in self._blocks:
                part = block[start : start + step]
                own = offsets[: len(part)]
                if self._has_nonfinite:
                    finite_bins = (part + own)[part >= 0]
                    index[end : end + len(finite_bins)] = finite_bins
                    end += len(finite_bins)
                else:
                    torch.add(part, own, out=index[end : end + part.numel()].view(part.shape))
                    end += part.numel()
            counts = torch.bincount(index[:end], minlength=len(table) * places)
            table += counts.to(torch.int32).numpy().view(np.uint32).reshape(table.shape)
        self._blocks, self._waiting, self._has_nonfinite = [], 0, False

    def settle(self) -> None:
        """Count the rows that wait, and free their memory."""
        self._count()
        self._room = None

    def merge(self, other: ChannelCounts) -> None:
        self.settle()
        other.settle()
        self._lift(other._base)
        self._broaden(len(other._table))
        self._table[: len(other._table)] += _lift_bins(other._table, self._base - other._base)

    def _lift(self, base: int) -> None:
        """Move the counts to bins from `base` on, if that is higher; those below are zeros."""
        if base > self._base:
            self._count()
            self._table = _lift_bins(self._table, base - self._base)
            self._base = base

    def _broaden(self, width: int) -> None:
        if width > len(self._table):
            more = width - len(self._table), *self._table.shape[1:]
            self._table = np.concatenate([self._table, np.zeros(more, dtype=np.uint32)])

    def __getstate__(self) -> dict[str, object]:
        """Count before it is sent to another process."""
        self.settle()
        return self.__dict__

    def ranges(
        self,
        lows: Floats,
        highs: Floats,
        percentiles: tuple[float, ...] = PERCENTILES,
        *,
        absolute: bool = False,
    ) -> ChannelRanges:
        """Return percentiles of each channel by numpy's method "lower", at the middles of bins.

        The ends are exact, except the least magnitude. A channel without finite values has zeros.
        """
        self.settle()
        sizes = _middles(self._base)
        low, high = np.nan_to_num(lows), np.nan_to_num(highs)
        if absolute:
            counts, values = self._table.sum(axis=2, dtype=np.int64), np.append(0.0, sizes)
            low, high = np.zeros_like(low), np.maximum(high, -low)
        else:
            above, below = self._table[:, :, 0].astype(np.int64), self._table[:, :0:-1, 1]
            above[:, 0] += self._table[:, 0, 1]
            counts = np.concatenate([below, above], axis=1)
            values = np.concatenate([-sizes[::-1], [0.0], sizes])
        ends = np.cumsum(counts, axis=1)
        last = (ends[:, -1] - 1).clip(0)
        exact = {100.0: high} if absolute else {0.0: low, 100.0: high}
        columns: dict[str, list[float]] = {}
        for p in percentiles:
            if p in exact:
                columns[f"{p:g}"] = exact[p].tolist()
                continue
            rank = np.floor(last * (p / 100))
            at = (ends <= rank[:, None]).sum(axis=1).clip(0, len(values) - 1)
            columns[f"{p:g}"] = values[at].clip(low, high).tolist()
        names = [f"{p:g}" for p in percentiles if p in exact]
        return ChannelRanges(percentiles=columns, error=ERROR, exact=names)


def _scratch(rows: int, columns: int) -> Tensor:
    return scratch.buffer(torch.int16, rows * columns)[: rows * columns].view(rows, columns)


def _lift_bins(table: Table, bins: int) -> Table:
    """Add so many bins at the lower end to that of zero."""
    bins = min(bins, _BINS)
    if not bins:
        return table
    lifted = np.zeros_like(table)
    lifted[:, 0] = table[:, : bins + 1].sum(axis=1)
    lifted[:, 1 : _BINS + 1 - bins] = table[:, bins + 1 :]
    return lifted


def _middles(base: int) -> Floats:
    """Return the middle of each bin; of one that is not finite, its beginning."""
    starts = torch.arange(base, base + _BINS, device="cpu") << 3
    middles, begins = (
        (starts + more).clamp(max=0x7FFF).to(torch.int16).view(torch.bfloat16).double().numpy()
        for more in (4, 0)
    )
    return np.where(np.isfinite(middles), middles, begins)
