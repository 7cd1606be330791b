"""One tensor of activations, gone through once: what all of its statistics start from."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.activation_stats._powers import Centered, PowerPass, PowerSums
from qgate.errors import QgateError
from qgate.stats import serial
from qgate.summaries.pool import of_counts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_CHUNK = 2**19
_PART = 2**17  # with what is made of them, values of this many stay in the cache
_HELD = 2**19
PAGE = 128
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of rounding to a dtype that is counted."""
# Between these, fourth powers of float64 numbers neither overflow nor vanish; float32 ends there.
_TAME = (1e-60, 1e60)


Figures = tuple[list[float], float, list[float]]
_serials = itertools.count(1)


@dataclass(eq=False)
class TensorReading:
    """A tensor as tokens by channels, with what one pass over it found.

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
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    vanished: int = 0
    centered: Centered | None = field(default=None, repr=False)
    serial: int = field(default_factory=lambda: next(_serials))

    @staticmethod
    def of(tensor: Tensor, counted_as: str | None = None, channel_axis: int = -1) -> TensorReading:
        """The last dimension, or `channel_axis`, are the channels and all others tokens."""
        with serial(), torch.no_grad():
            return _read(as_table(tensor, channel_axis), counted_as)

    @property
    def wide(self) -> bool:
        """Rounded before it was counted."""
        return self.table.dtype.itemsize > 2

    @cached_property
    def amax(self) -> float:
        return float(self.tokens.max(initial=0.0))

    @property
    def finite(self) -> bool:
        return not (self.nan or self.posinf or self.neginf)

    @cached_property
    def pages(self) -> tuple[Ints, Ints]:
        """The pages of the counts that are not empty, and their numbers."""
        pages = self.counts.reshape(-1, PAGE)
        used = np.flatnonzero(torch.from_numpy(pages).sum(1).numpy())
        return used, pages[used]

    @cached_property
    def powers(self) -> PowerSums:
        """Exact sums of powers of the finite values, of a wide tensor to float64's rounding."""
        if self.centered is not None:
            return PowerSums.of(self.centered)
        return PowerSums.of_counts(*of_counts(self.counted_as, self.counts).weighted)

    @cached_property
    def token_figures(self) -> Figures:
        return figures_of(self.tokens)

    @cached_property
    def _ordered_channels(self) -> Floats:
        return np.sort(self.channels)

    @cached_property
    def channel_figures(self) -> Figures:
        return figures_of_ordered(self._ordered_channels)

    @cached_property
    def channel_median(self) -> float:
        ordered = self._ordered_channels
        n = len(ordered)
        return float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2

    def channel_squares(self) -> Floats:
        """Sums of squares by channel; a pass of its own."""
        found = np.zeros(self.table.shape[1])
        for part in chunks(self.table):
            wide = part.double()
            wide = wide if self.finite else wide.where(wide.isfinite(), 0.0)
            found += wide.square_().sum(0).numpy()
        return found

    def sizes(self) -> Ints:
        """How often each magnitude was counted, in ascending order of magnitudes."""
        return np.asarray(self.counts[:_HALF] + self.counts[_HALF:])

    @cached_property
    def least_size(self) -> float:
        """The least magnitude that was counted and is not zero; infinity if there is none."""
        least = top = infinity(self.counted_as)
        used, pages = self.pages
        for sign in (0, _HALF):
            for at in range(int(np.searchsorted(used, sign // PAGE)), len(used)):
                first = int(used[at]) * PAGE - sign
                if first >= least:
                    break
                there = np.flatnonzero(pages[at, 1:]) + 1 if first == 0 else pages[at].nonzero()[0]
                if len(there):
                    least = min(least, first + int(there[0]))
                    break
        return size_value(least, self.counted_as) if least < top else math.inf

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
        """Of finite magnitudes, by numpy's method "lower"; NaN of none."""
        ends = np.cumsum(self.sizes()[: infinity(self.counted_as)])
        if not ends[-1]:
            return math.nan
        place = int((int(ends[-1]) - 1) * p)
        at = int(np.searchsorted(ends, place, side="right"))
        value = size_value(at, self.counted_as)
        if not self.wide:
            return value
        # Only those that were rounded to this number are looked at.
        counted = getattr(torch, self.counted_as)
        sizes = (part.abs().view(-1) for part in chunks(self.table))
        near = torch.cat([each[each.to(counted) == value] for each in sizes])
        return float(near.kthvalue(place - (int(ends[at - 1]) if at else 0) + 1).values)

    def ends_of_all(self, places: int) -> tuple[list[float], list[float]]:
        """The largest magnitudes and the smallest ones, each as many as `places`."""
        tops: list[Tensor] = []
        lows: list[Tensor] = []
        for part in chunks(self.table):
            sizes = part.abs().view(-1)
            sizes = sizes if self.finite else sizes[sizes.isfinite()]
            count = min(places, sizes.numel())
            tops.append(sizes.topk(count).values)
            lows.append(sizes.topk(count, largest=False).values)
        if not tops:
            return [], []
        top, low = torch.cat(tops).sort(descending=True).values, torch.cat(lows).sort().values
        return top[:places].tolist(), low[:places].tolist()


_HALF = 2**15
ENDS = 3


def figures_of(values: Floats) -> Figures:
    """The three largest, the lower median, the three smallest."""
    return figures_of_ordered(np.sort(values))


def figures_of_ordered(ordered: Floats) -> Figures:
    few, n = min(ENDS, len(ordered)), len(ordered)
    median = float(ordered[(n - 1) // 2]) if n else 0.0
    return ordered[::-1][:few].tolist(), median, ordered[:few].tolist()


def infinity(counted_as: str) -> int:
    """The pattern of infinity; those beyond it are NaN."""
    return 0x7F80 if counted_as == "bfloat16" else 0x7C00


@lru_cache(maxsize=4096)
def size_value(pattern: int, counted_as: str) -> float:
    """The magnitude that a pattern stands for."""
    bits = torch.tensor([pattern], dtype=torch.int16, device="cpu")
    return float(bits.view(getattr(torch, counted_as)).double())


def as_table(tensor: Tensor, channel_axis: int = -1) -> Tensor:
    """Tokens by channels, contiguous on the CPU."""
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
    """Parts of a table that stay in the cache, in float32 or wider."""
    step = max(_CHUNK // max(table.shape[-1], 1), 1)
    parts = table.split(step)
    return [part.float() if part.dtype.itemsize < 4 else part for part in parts]


class _Scratch(threading.local):
    """Memory for patterns that is used again: fresh pages cost more than what is done in them."""

    def __init__(self) -> None:
        self.narrow = torch.empty(0, dtype=torch.int16, device="cpu")
        self.wide = torch.empty(0, dtype=torch.int32, device="cpu")

    def patterns(self, part: Tensor, counted: torch.dtype, start: int) -> int:
        """Adds the bit patterns of a part to those of the parts before it."""
        count = part.numel()
        end = start + count
        if len(self.wide) < end:
            more = torch.empty(max(end, _HELD), dtype=torch.int32, device="cpu")
            more[:start] = self.wide[:start]
            self.wide = more
        bits = part.view(-1)
        if part.dtype != counted:
            if len(self.narrow) < count:
                self.narrow = torch.empty(count, dtype=torch.int16, device="cpu")
            bits = self.narrow[:count].view(counted).copy_(bits)
        self.wide[start:end].copy_(bits.view(torch.uint16))
        return end


_scratch = _Scratch()


class _Counter:
    """Counts parts together: a count of few values costs as much as that of all patterns."""

    def __init__(self, counted: torch.dtype) -> None:
        self.counted, self.found, self._held = counted, torch.empty(0), 0

    def add(self, part: Tensor) -> None:
        if self._held and self._held + part.numel() > _HELD:
            self._count()
        self._held = _scratch.patterns(part, self.counted, self._held)

    def _count(self) -> None:
        found = torch.bincount(_scratch.wide[: self._held], minlength=2**16)
        self.found = self.found.add_(found) if len(self.found) else found
        self._held = 0

    def counts(self) -> Tensor:
        if self._held or not len(self.found):
            self._count()
        return self.found


class _Ends:
    """Ends of rows and of columns of the parts of a table; of finite values if they are
    `masked`."""

    def __init__(self, table: Tensor, parts: Sequence[Tensor], masked: bool) -> None:
        n, width = table.shape
        dtype = table.dtype if table.dtype.itemsize > 2 else torch.float32
        self._made = torch.empty(2, n + len(parts) * width, dtype=dtype, device="cpu")
        self.shape, self.masked, self.kinds = (n, width), masked, [0, 0, 0]
        self._high, self._low = self._made[:, :n].unbind()
        self._tops, self._bottoms = self._made[:, n:].view(2, len(parts), width).unbind()

    def take(self, at: int, part: Tensor, start: int) -> None:
        x = up = down = part if part.dtype.itemsize > 2 else part.float()
        if self.masked:
            there = x.isfinite()
            self.kinds[0] += int(x.isnan().sum())
            self.kinds[1] += int((x == math.inf).sum())
            self.kinds[2] += int((x == -math.inf).sum())
            up, down = x.where(there, -math.inf), x.where(there, math.inf)
        rows = slice(start, start + len(part))
        torch.amax(up, -1, out=self._high[rows])
        torch.amin(down, -1, out=self._low[rows])
        torch.amax(up, 0, out=self._tops[at])
        torch.amin(down, 0, out=self._bottoms[at])

    def found(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Lows and highs of rows and of columns."""
        n, width = self.shape
        high, low = self._made.double().numpy()
        tops, bottoms = high[n:].reshape(-1, width), low[n:].reshape(-1, width)
        lows, highs = bottoms.min(0, initial=math.inf), tops.max(0, initial=-math.inf)
        return low[:n], high[:n], lows, highs


def _read(table: Tensor, counted_as: str | None) -> TensorReading:
    name = counted_as or ("float16" if table.dtype == torch.float16 else "bfloat16")
    n, width = table.shape
    step = max(_PART // width, 1)
    parts = table.split(step) if n > step else (table,) * (n > 0)
    counter, ends = _Counter(getattr(torch, name)), _Ends(table, parts, masked=False)
    wide, powers = table.dtype.itemsize > 2, PowerPass()
    for at, part in enumerate(parts):
        counter.add(part)
        ends.take(at, part, at * step)
        if wide:
            powers.take(part)
    low, high, lows, highs = ends.found()
    sound = n > 0 and math.isfinite(highs.max()) and math.isfinite(lows.min())
    if not sound:
        ends = _Ends(table, parts, masked=True)
        for at, part in enumerate(parts):
            ends.take(at, part, at * step)
        low, high, lows, highs = ends.found()
    tokens, channels = np.maximum(high, -low), np.maximum(highs, -lows)
    if not sound:
        tokens[~np.isfinite(tokens)] = 0.0
        none = ~np.isfinite(highs)
        channels[none], highs[none], lows[none] = 0.0, math.nan, math.nan
    for each in (tokens, channels, lows, highs):
        each += 0.0  # no zero has a sign
    largest = float(channels.max(initial=0.0))
    tame = not largest or _TAME[0] < largest < _TAME[1]
    if wide and not (sound and tame):
        powers = PowerPass(0 if tame else math.frexp(largest)[1])
        for part in parts:
            powers.take(part if sound else part[part.isfinite()])
    counts = counter.counts().numpy()
    zeros = int(counts[0] + counts[_HALF])
    vanished = zeros - int((table == 0).sum()) if zeros and wide else 0
    nan, posinf, neginf = ends.kinds
    found = (tokens, channels, lows, highs, counts)
    centered = powers.centered() if wide else None
    return TensorReading(table, name, *found, nan, posinf, neginf, vanished, centered)
