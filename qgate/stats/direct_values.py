"""Statistics of 32- and 64-bit tensors, by passes over them a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from qgate.stats import bits as _bits
from qgate.stats.moments import PowerPass, PowerSums
from qgate.stats.summary import Floats, Ints, SummaryOfKinds, require_percentile
from qgate.stats.threads import in_order
from qgate.tensor_inputs import usual_arithmetic

R = TypeVar("R")


class _Survey(NamedTuple):
    """Counts of non-finite values and zeros, and the extremes of the others."""

    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf
    least: float = math.inf

    def merged(self, other: _Survey) -> _Survey:
        return _Survey(
            self.nan + other.nan,
            self.posinf + other.posinf,
            self.neginf + other.neginf,
            self.zeros + other.zeros,
            min(self.low, other.low),
            max(self.high, other.high),
            min(self.least, other.least),
        )


def _surveyed(slab: Tensor) -> _Survey:
    values = slab.reshape(-1).cpu().numpy()
    nan = int(np.isnan(values).sum())
    posinf, neginf = (int((values == end).sum()) for end in (math.inf, -math.inf))
    finite = values[np.isfinite(values)] if nan or posinf or neginf else values
    sizes = np.abs(finite[finite != 0])
    return _Survey(
        nan,
        posinf,
        neginf,
        len(finite) - len(sizes),
        float(finite.min(initial=math.inf)),
        float(finite.max(initial=-math.inf)),
        float(sizes.min(initial=math.inf)),
    )


def _finite_values(slab: Tensor) -> Floats:
    values = slab.reshape(-1).cpu().numpy()
    return np.asarray(values[np.isfinite(values)], dtype=np.float64)


class Values(SummaryOfKinds):
    """The tensors themselves, with the statistics of `Counts`; nothing is copied whole.

    Order statistics are exact: the first pass counts the leading 16 bits of the values in their
    order, and later ones read only the bin that holds the result.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.dtype = _bits.short_name(self.tensors[0].dtype)
        self.rounded_from = None

    def __add__(self, other: Values) -> Values:
        if not isinstance(other, Values):
            return NotImplemented
        return Values([*self.tensors, *other.tensors])

    def slabs(self) -> Iterator[Tensor]:
        """Yield views of the tensors, a chunk at a time."""
        for tensor in self.tensors:
            yield from _bits.slabs(tensor, _bits.CHUNK)

    def chunks(self) -> Iterator[Floats]:
        """Yield the finite values as float64, a chunk at a time."""
        return map(_finite_values, self.slabs())

    def map_chunks(self, function: Callable[[Floats], R]) -> Iterator[R]:
        """Yield what a function makes of each chunk, in order; it runs on several threads."""
        return in_order(lambda slab: function(_finite_values(slab)), self.slabs())

    @cached_property
    def _kinds(self) -> tuple[int, int, int]:
        return self._survey.nan, self._survey.posinf, self._survey.neginf

    @cached_property
    @usual_arithmetic()
    def _survey(self) -> _Survey:
        """The non-finite values and the extremes, by one pass."""
        total = _Survey()
        for part in in_order(_surveyed, self.slabs()):
            total = total.merged(part)
        return total

    @property
    def n(self) -> int:  # type: ignore[override]
        return sum(tensor.numel() for tensor in self.tensors)

    @usual_arithmetic()
    def weighted(self) -> tuple[Floats, Ints]:
        """Return distinct values, sorted: twice the tensor's memory, which other methods avoid."""
        everything = list(self.chunks())
        values, weights = np.unique(
            np.concatenate(everything) if everything else np.empty(0), return_counts=True
        )
        return values, weights.astype(np.int64)

    @property
    def _extremes(self) -> tuple[float, float, float, int]:
        zeros, low, high, least = self._survey[3:]
        if low > high:
            return math.nan, math.nan, math.nan, 0
        return low, high, least if least < math.inf else math.nan, zeros

    @property
    def min(self) -> float:
        return self._extremes[0]

    @property
    def max(self) -> float:
        return self._extremes[1]

    @property
    def amin(self) -> float:
        return self._extremes[2]

    @property
    def zeros(self) -> int:
        return self._extremes[3]

    @cached_property
    def moments(self) -> PowerSums:
        amax, total = self.amax if self.finite else 0.0, PowerSums()

        def sums_of(chunk: Floats) -> PowerSums:
            part = PowerPass(amax)
            part.take(torch.from_numpy(chunk))
            return part.moments()

        for part in self.map_chunks(sums_of):
            total.merge(part)
        return total

    def percentile(self, q: float, *, of: str = "value") -> float:
        require_percentile(q, of)
        if not self.finite:
            return math.nan
        position = (self.finite - 1) * (q / 100)
        low = self.ordered(math.floor(position), of)
        part = position - math.floor(position)
        if part == 0:
            return low
        return low + (self.ordered(math.ceil(position), of) - low) * part

    def _keys(self, of: str) -> Iterator[np.ndarray]:
        """Yield the values as unsigned integers of the same order."""
        for chunk in self.chunks():
            bits = (np.abs(chunk) if of == "magnitude" else chunk + 0.0).view(np.int64)
            flipped = bits ^ ((bits >> 63) & np.int64(2**63 - 1))
            yield flipped.view(np.uint64) ^ np.uint64(2**63)

    def ordered(self, rank: int, of: str) -> float:
        """Return the value at a rank from 0, by four passes of 16 bits each."""
        prefix, skipped = np.uint64(0), 0
        for shift in (48, 32, 16, 0):
            counts = np.zeros(2**16, dtype=np.int64)
            for keys in self._keys(of):
                if shift < 48:
                    keys = keys[keys >> np.uint64(shift + 16) == prefix]
                low = (keys >> np.uint64(shift)) & np.uint64(0xFFFF)
                counts += np.bincount(low.astype(np.int64), minlength=2**16)
            ends = skipped + np.cumsum(counts)
            digit = int(np.searchsorted(ends, rank, side="right"))
            skipped = int(ends[digit] - counts[digit])
            prefix = (prefix << np.uint64(16)) | np.uint64(digit)
        bits = np.array([prefix ^ np.uint64(2**63)], dtype=np.uint64).view(np.int64)
        return float((bits ^ ((bits >> 63) & np.int64(2**63 - 1))).view(np.float64)[0])

    def histogram(
        self, bins: int = 100, range: tuple[float, float] | None = None
    ) -> tuple[Ints, Floats]:
        if range is None and self.finite:
            range = (self.min, self.max)
        counts, edges = np.histogram(np.empty(0), bins=bins, range=range)
        total = counts.astype(np.int64)
        for chunk in self.chunks():
            total += np.histogram(chunk, bins=edges)[0]
        return total, edges.astype(np.float64)

    def log2_histogram(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for chunk in self.chunks():
            exponents, counted = np.unique(np.frexp(chunk[chunk != 0])[1] - 1, return_counts=True)
            for exponent, count in zip(exponents.tolist(), counted.tolist(), strict=True):
                counts[exponent] = counts.get(exponent, 0) + count
        return dict(sorted(counts.items()))
