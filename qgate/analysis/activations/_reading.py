"""One tensor of activations, gone through once: what all of its statistics start from."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.stats import serial

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_CHUNK = 2**19
PAGE = 128
# Between these, squares of float32 numbers neither overflow nor vanish.
_TAME = (1e-15, 1e15)


Figures = tuple[list[float], float, list[float]]
_serials = itertools.count(1)


@dataclass(eq=False)
class Reading:
    """A tensor as tokens by channels, with what one pass over it found.

    Magnitudes and ends are of finite values; where there is none, a magnitude is 0 and an end NaN.

    tokens, channels  largest magnitudes
    lows, highs    ends by channel
    total, square  sums of values and of squares; of float32 tensors to about 1e-6 of their size
    counts         of bit patterns, after rounding to `counted_as` where the tensor is wider
    """

    table: Tensor = field(repr=False)
    counted_as: str
    tokens: Floats
    channels: Floats
    lows: Floats
    highs: Floats
    total: float
    square: float
    counts: Ints = field(repr=False)
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    vanished: int = 0
    serial: int = field(default_factory=lambda: next(_serials))

    @staticmethod
    def of(tensor: Tensor, counted_as: str | None = None, channel_axis: int = -1) -> Reading:
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
        used = np.flatnonzero(pages.sum(axis=1))
        return used, pages[used]

    @cached_property
    def token_figures(self) -> Figures:
        return figures_of(self.tokens)

    @cached_property
    def channel_figures(self) -> Figures:
        return figures_of(self.channels)

    @cached_property
    def channel_median(self) -> float:
        ordered = np.sort(self.channels)
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
        top = infinity(self.counted_as)
        first = [int(np.argmax(self.counts[k + 1 : k + top] > 0)) + k + 1 for k in (0, _HALF)]
        there = [k & (_HALF - 1) for k in first if self.counts[k]]
        return size_value(min(there), self.counted_as) if there else math.inf

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
        """Of finite magnitudes as they were counted, by numpy's method "lower"; NaN of none."""
        ends = np.cumsum(self.sizes()[: infinity(self.counted_as)])
        if not ends[-1]:
            return math.nan
        place = int((int(ends[-1]) - 1) * p)
        return size_value(int(np.searchsorted(ends, place, side="right")), self.counted_as)

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
    ordered = np.sort(values)
    few, n = min(ENDS, len(ordered)), len(ordered)
    median = float(ordered[(n - 1) // 2]) if n else 0.0
    return ordered[::-1][:few].tolist(), median, ordered[:few].tolist()


def infinity(counted_as: str) -> int:
    """The pattern of infinity; those beyond it are NaN."""
    return 0x7F80 if counted_as == "bfloat16" else 0x7C00


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

    def room(self, count: int) -> None:
        if len(self.narrow) < count:
            self.narrow = torch.empty(count, dtype=torch.int16, device="cpu")
            self.wide = torch.empty(count, dtype=torch.int32, device="cpu")


_scratch = _Scratch()


def patterns_of(part: Tensor, counted: torch.dtype) -> Tensor:
    """The bit patterns of a part of a table, until the next part is asked for."""
    count = part.numel()
    _scratch.room(count)
    narrow = _scratch.narrow[:count].view(counted).view(part.shape).copy_(part)
    wide = _scratch.wide[:count].view(part.shape)
    return wide.copy_(narrow.view(torch.uint16))


def _read(table: Tensor, counted_as: str | None) -> Reading:
    name = counted_as or ("float16" if table.dtype == torch.float16 else "bfloat16")
    counted = getattr(torch, name)
    n, width = table.shape
    tokens, total, square = np.zeros(n), 0.0, 0.0
    highs, lows = np.full(width, -math.inf), np.full(width, math.inf)
    counts: Ints = np.zeros(0, dtype=np.int64)
    kinds = [0, 0, 0]
    start = 0
    for part in table.split(max(_CHUNK // width, 1)):
        bits = patterns_of(part, counted)
        found = torch.bincount(bits.view(-1), minlength=2**16).numpy()
        counts = counts + found if len(counts) else found
        x = part if part.dtype.itemsize > 2 else part.float()
        up = down = x
        high, low = x.amax(-1).numpy(), x.amin(-1).numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            sound = bool(np.isfinite(high - low).all())
        if not sound:
            there = x.isfinite()
            if not bool(there.all()):
                kinds[0] += int(x.isnan().sum())
                kinds[1] += int((x == math.inf).sum())
                kinds[2] += int((x == -math.inf).sum())
                up, down = x.where(there, -math.inf), x.where(there, math.inf)
                x = x.where(there, 0.0)
                high, low = up.amax(-1).numpy(), down.amin(-1).numpy()
        size = np.maximum(high, -low).astype(np.float64)
        size = size if sound else np.where(np.isfinite(size), size, 0.0)
        tokens[start : start + len(part)] = size
        highs = np.maximum(highs, up.amax(0).numpy())
        lows = np.minimum(lows, down.amin(0).numpy())
        largest = float(size.max(initial=0.0))
        if largest and not _TAME[0] < largest < _TAME[1]:
            x = x.double()
        flat = x.reshape(-1)
        total += float(x.sum(-1).double().sum())
        square += float(flat @ flat)
        start += len(part)
    counts = counts if len(counts) else np.zeros(2**16, dtype=np.int64)
    vanished = 0
    if table.dtype.itemsize > 2 and (counts[0] or counts[_HALF]):
        vanished = int(counts[0] + counts[_HALF]) - int((table == 0).sum())
    none = ~np.isfinite(highs)
    channels = np.where(none, 0.0, np.maximum(highs, -lows))
    if none.any():
        highs[none], lows[none] = math.nan, math.nan
    lows += 0.0
    highs += 0.0
    nan, posinf, neginf = kinds
    ends = (tokens, channels, lows, highs)
    return Reading(table, name, *ends, total, square, counts, nan, posinf, neginf, vanished)
