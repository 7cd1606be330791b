"""One pass over a tensor of activations: the figures that all statistics start from."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from qgate.activation_stats.record import HeatMap, Magnitude
from qgate.errors import QgateError
from qgate.stats import Counts, serial
from qgate.stats.moments import ExactSum, PowerPass, PowerSums
from qgate.stats.summary import Floats, Ints

Figures = tuple[list[float], float, list[float]]
ENDS = 3
"""How many of the largest and of the smallest magnitudes of a vector a record has."""
_CHUNK = 2**19
_PART = 2**17  # with what is made of them, values of this many stay in the cache
_AT_ONCE = 2**19
_HALF = 2**15
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of rounding to a dtype that is counted."""
MAP_ROWS, MAP_COLUMNS = 96, 160
_serials = itertools.count(1)


@dataclass(eq=False)
class TensorReading:
    """A tensor as tokens by channels, with the figures of one pass over it.

    Magnitudes and ends are of finite values; where there is none, a magnitude is 0 and an end NaN.

    tokens, channels  largest magnitudes
    lows, highs    ends by channel
    counts         of bit patterns, after rounding to `counted_as` where the tensor is wider
    """

    table: Tensor = field(repr=False)
    counted_as: str
    tokens: Floats
    channels: Floats
    lows: Floats
    highs: Floats
    counts: Ints = field(repr=False)
    kinds: Sequence[int] = (0, 0, 0)
    """NaN, infinities, negative infinities."""
    vanished: int = 0
    powers: PowerPass | None = field(default=None, repr=False)
    serial: int = field(default_factory=lambda: next(_serials))

    @staticmethod
    def of(tensor: Tensor, counted_as: str | None = None, channel_axis: int = -1) -> TensorReading:
        """Read a tensor: the last dimension, or `channel_axis`, are channels, all others tokens."""
        with serial(), torch.no_grad():
            return _read(_as_table(tensor, channel_axis), counted_as)

    @property
    def wide(self) -> bool:
        """True if values were rounded before they were counted."""
        return self.table.dtype.itemsize > 2

    @cached_property
    def amax(self) -> float:
        return float(self.tokens.max(initial=0.0))

    @cached_property
    def finite(self) -> bool:
        return not any(self.kinds)

    @cached_property
    def counted(self) -> Counts:
        """The counts as pages that are not empty."""
        return Counts(self.counted_as, self.counts)

    @cached_property
    def moments(self) -> PowerSums:
        """Exact sums of powers of the finite values, of a wide tensor to float64's rounding."""
        return self.counted.moments if self.powers is None else self.powers.moments()

    @cached_property
    def token_figures(self) -> Figures:
        return figures_of(self.tokens)

    @cached_property
    def channel_figures(self) -> Figures:
        return figures_of(self.channels)

    def channel_squares(self) -> Floats:
        """Return the sum of squares of each channel."""
        sums = np.zeros(self.table.shape[1])
        for part in chunks(self.table):
            wide = part.double()
            wide = wide if self.finite else wide.where(wide.isfinite(), 0.0)
            sums += wide.square_().sum(0).numpy()
        return sums

    def sizes(self) -> Ints:
        """Return how often each magnitude was counted, in ascending order of magnitudes."""
        return np.asarray(self.counts[:_HALF] + self.counts[_HALF:])

    @cached_property
    def least_size(self) -> float:
        """The least magnitude that was counted and is not zero; infinity if there is none."""
        # The sums of both signs, as in `sizes`, would cost twice as much.
        signs = (half[1 : infinity(self.counted_as)] > 0 for half in np.split(self.counts, 2))
        firsts = [int(occurs.argmax()) for occurs in signs if occurs.any()]
        return size_value(min(firsts) + 1, self.counted_as) if firsts else math.inf

    @cached_property
    def least(self) -> float:
        """The exact least magnitude that is not zero; a pass of its own."""
        if not self.wide:
            return self.least_size
        least = math.inf
        zeros = bool(self.counts[0] or self.counts[_HALF])
        for part in chunks(self.table):
            sizes = part.abs()
            if zeros or not self.finite:
                sizes = sizes[(sizes > 0) & sizes.isfinite()]
            least = min(least, float(sizes.min())) if sizes.numel() else least
        return least

    def size_quantile(self, p: float) -> float:
        """Return a quantile of finite magnitudes, by numpy's method "lower"; NaN of none."""
        ends = np.cumsum(self.sizes()[: infinity(self.counted_as)])
        if not ends[-1]:
            return math.nan
        rank = int((int(ends[-1]) - 1) * p)
        at = int(np.searchsorted(ends, rank, side="right"))
        value = size_value(at, self.counted_as)
        if not self.wide:
            return value
        # Only values that were rounded to this number can be it.
        counted = getattr(torch, self.counted_as)
        sizes = (part.abs().view(-1) for part in chunks(self.table))
        near = torch.cat([part_sizes[part_sizes.to(counted) == value] for part_sizes in sizes])
        return float(near.kthvalue(rank - (int(ends[at - 1]) if at else 0) + 1).values)

    def ends_of_all(self) -> tuple[list[float], list[float]]:
        """Return the largest magnitudes and the smallest ones."""
        tops: list[float] = []
        lows: list[float] = []
        for part in chunks(self.table):
            sizes = part.abs().view(-1)
            sizes = sizes if self.finite else sizes[sizes.isfinite()]
            count = min(ENDS, sizes.numel())
            tops += sizes.topk(count).values.tolist()
            lows += sizes.topk(count, largest=False).values.tolist()
        return sorted(tops, reverse=True)[:ENDS], sorted(lows)[:ENDS]

    def heat_map(self, sample: int) -> HeatMap:
        """Return the largest finite magnitude of each cell, with figures of all magnitudes."""
        tokens, channels = self.table.shape
        heat_map = HeatMap(sample=sample, tokens=tokens, channels=channels, cells=[], stats={})
        if not tokens * channels:
            return heat_map
        starts, lines = _starts(channels, MAP_COLUMNS), []
        total = square = 0.0
        for part in chunks(self.table):
            sizes = part.abs() if self.finite else part.where(part.isfinite(), 0.0).abs()
            wide = sizes.double()
            total, square = total + float(wide.sum()), square + float(wide.square().sum())
            lines.append(np.maximum.reduceat(wide.numpy(), starts, axis=1))
        rows = np.maximum.reduceat(np.concatenate(lines), _starts(tokens, MAP_ROWS), axis=0)
        heat_map["cells"] = rows.tolist()
        mean = total / (tokens * channels)
        std = max(square / (tokens * channels) - mean * mean, 0.0) ** 0.5
        beyond = sum(int((part.abs() > mean + 3 * std).sum()) for part in chunks(self.table))
        p99 = self.size_quantile(0.99)
        least = min(float(part.abs().nan_to_num(math.inf).min()) for part in chunks(self.table))
        heat_map["stats"] = {"mean": mean, "std": std, "max": self.amax, "p99": p99}
        if math.isfinite(least):
            heat_map["stats"]["min"] = least
        heat_map["stats"]["beyond_3_std"] = float(beyond)
        if p99 > 0:
            heat_map["stats"]["max_over_p99"] = self.amax / p99
        return heat_map


def _starts(n: int, most: int) -> Ints:
    cells = min(n, most)
    return np.arange(cells) * n // cells


def infinity(counted_as: str) -> int:
    """Return the pattern of infinity; those beyond it are NaN."""
    return 0x7F80 if counted_as == "bfloat16" else 0x7C00


@lru_cache(maxsize=4096)
def size_value(pattern: int, counted_as: str) -> float:
    """Return the magnitude that a pattern stands for."""
    bits = torch.tensor([pattern], dtype=torch.int16, device="cpu")
    return float(bits.view(getattr(torch, counted_as)).double())


def _as_table(tensor: Tensor, channel_axis: int) -> Tensor:
    """Return tokens by channels, contiguous on the CPU."""
    if not tensor.is_floating_point():
        raise QgateError(
            f"activation statistics are of floating point numbers, not {tensor.dtype}."
        )
    x = tensor.detach()
    x = x.reshape(1, 1) if x.dim() == 0 else x
    if channel_axis not in (-1, x.dim() - 1) and x.dim() > 1:
        x = x.movedim(channel_axis, -1)
    x = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, max(x.shape[-1], 1))
    x = x.cpu().contiguous()
    return x if x.dtype.itemsize > 1 else x.to(torch.bfloat16)


def chunks(table: Tensor) -> list[Tensor]:
    """Return parts of a table that stay in the cache, in float32 or wider."""
    parts = table.split(max(_CHUNK // max(table.shape[-1], 1), 1))
    return [part.float() if part.dtype.itemsize < 4 else part for part in parts]


# The pass ----------------------------------------------------------------------------------------


class Scratch(threading.local):
    """Buffers that each thread uses again: fresh pages cost more than the work in them."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def buffer(self, dtype: torch.dtype, size: int, keep: int = 0) -> Tensor:
        """Return a buffer of at least this size, with its first `keep` elements as they were."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < size:
            larger = torch.empty(max(size, _AT_ONCE), dtype=dtype, device="cpu")
            if buffer is not None:
                larger[:keep] = buffer[:keep]
            buffer = self._buffers[dtype] = larger
        return buffer


scratch = Scratch()


def _counts(parts: Sequence[Tensor], counted: torch.dtype) -> Ints:
    """Count parts together: a count of few values costs as much as that of all patterns."""
    total: Tensor | None = None
    start = 0
    for at, part in enumerate(parts):
        bits, end = part.view(-1), start + part.numel()
        if part.dtype != counted:
            narrow = scratch.buffer(torch.int16, part.numel())[: part.numel()]
            bits = narrow.view(counted).copy_(bits)
        patterns = scratch.buffer(torch.int32, end, start)
        patterns[start:end].copy_(bits.view(torch.uint16))
        start = end
        if at + 1 == len(parts) or end + parts[at + 1].numel() > _AT_ONCE:
            counts = torch.bincount(patterns[:end], minlength=2**16)
            total, start = counts if total is None else total.add_(counts), 0
    return np.zeros(2**16, dtype=np.int64) if total is None else total.numpy()


def _ends(
    table: Tensor, parts: Sequence[Tensor], kinds: list[int] | None = None
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return lows and highs of rows and of columns; with `kinds`, of finite values alone, and the
    others are counted there by kind."""
    n, width = table.shape
    dtype = table.dtype if table.dtype.itemsize > 2 else torch.float32
    ends = torch.empty(2, n + len(parts) * width, dtype=dtype, device="cpu")
    high, low = ends[:, :n].unbind()
    tops, bottoms = ends[:, n:].view(2, len(parts), width).unbind()
    start = 0
    for at, part in enumerate(parts):
        x = up = down = part if part.dtype.itemsize > 2 else part.float()
        if kinds is not None:
            for k, kind in enumerate((x.isnan(), x == math.inf, x == -math.inf)):
                kinds[k] += int(kind.sum())
            up, down = (x.where(x.isfinite(), fill) for fill in (-math.inf, math.inf))
        rows = slice(start, start + part.shape[0])
        torch.amax(up, -1, out=high[rows])
        torch.amin(down, -1, out=low[rows])
        torch.amax(up, 0, out=tops[at])
        torch.amin(down, 0, out=bottoms[at])
        start = rows.stop
    highs, lows = ends.double().numpy()
    bottom = lows[n:].reshape(-1, width).min(0, initial=math.inf)
    top = highs[n:].reshape(-1, width).max(0, initial=-math.inf)
    return lows[:n], highs[:n], bottom, top


def _read(table: Tensor, counted_as: str | None) -> TensorReading:
    name = counted_as or ("float16" if table.dtype == torch.float16 else "bfloat16")
    n, width = table.shape
    step = max(_PART // width, 1)
    parts = table.split(step) if n > step else (table,) * (n > 0)
    counts = _counts(parts, getattr(torch, name))
    kinds = [0, 0, 0]
    low, high, lows, highs = _ends(table, parts)
    sound = n > 0 and math.isfinite(highs.max()) and math.isfinite(lows.min())
    if not sound:
        low, high, lows, highs = _ends(table, parts, kinds)
    tokens, channels = np.maximum(high, -low), np.maximum(highs, -lows)
    if not sound:
        tokens[~np.isfinite(tokens)] = 0.0
        none = ~np.isfinite(highs)
        channels[none], highs[none], lows[none] = 0.0, math.nan, math.nan
    for magnitudes in (tokens, channels, lows, highs):
        magnitudes += 0.0  # no zero has a sign
    wide = table.dtype.itemsize > 2
    powers = PowerPass(float(channels.max(initial=0.0)))
    for part in parts if wide else ():
        powers.take(part if sound else part[part.isfinite()])
    zeros = int(counts[0] + counts[_HALF])
    vanished = zeros - table.numel() + int(table.count_nonzero()) if zeros and wide else 0
    figures = (tokens, channels, lows, highs, counts)
    return TensorReading(table, name, *figures, kinds, vanished, powers if wide else None)


# Figures of vectors ------------------------------------------------------------------------------


def figures_of(values: Floats) -> Figures:
    """Return the three largest, the lower median, the three smallest."""
    ordered, n = np.sort(values), len(values)
    median = float(ordered[(n - 1) // 2]) if n else 0.0
    return ordered[::-1][:ENDS].tolist(), median, ordered[:ENDS].tolist()


class Vector:
    """Figures of one vector of magnitudes per sample, as exact sums over samples."""

    def __init__(self) -> None:
        self.sums = [ExactSum() for _ in range(2 * ENDS + 1)]
        self.counts = [0] * (2 * ENDS + 1)
        self.most = 0.0

    def add(self, top: Sequence[float], median: float, low: Sequence[float]) -> None:
        if not top:
            return
        slots = (*range(len(top)), ENDS, *range(ENDS + 1, ENDS + 1 + len(low)))
        for slot, value in zip(slots, (*top, median, *low), strict=True):
            self.sums[slot].add(value)
            self.counts[slot] += 1
        self.most = max(self.most, *top)

    def merge(self, other: Vector) -> None:
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            mine.merge(theirs)
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.most = max(self.most, other.most)

    def magnitude(self) -> Magnitude | None:
        """Return the means over samples."""
        if not self.counts[ENDS]:
            return None
        pairs = list(zip(self.sums, self.counts, strict=True))
        top, middle, low = (
            [total.value() / n for total, n in part if n]
            for part in (pairs[:ENDS], pairs[ENDS : ENDS + 1], pairs[ENDS + 1 :])
        )
        return Magnitude(top=top, median=middle[0], low=low, most=self.most)
