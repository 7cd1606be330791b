"""Statistics of 32- and 64-bit tensors, by passes over them a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from qgate.stats import bits as _bits
from qgate.stats.moments import PowerPass, PowerSums
from qgate.stats.summary import Floats, Ints, SummaryOfKinds, require_percentile


class Values(SummaryOfKinds):
    """The tensors themselves, with the statistics of `Counts`; nothing is copied whole.

    Order statistics are exact: the first pass counts the leading 16 bits of the values in their
    order, and later ones read only the bin that holds the result.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.dtype = _bits.short_name(self._tensors[0].dtype)
        self.rounded_from = None

    def __add__(self, other: Values) -> Values:
        if not isinstance(other, Values):
            return NotImplemented
        return Values([*self._tensors, *other._tensors])

    def chunks(self) -> Iterator[Floats]:
        """Yield the finite values as float64, a chunk at a time."""
        for tensor in self._tensors:
            for slab in _bits.slabs(tensor, _bits.CHUNK):
                flat = slab.reshape(-1).to("cpu", torch.float64).numpy()
                yield flat[np.isfinite(flat)]

    @cached_property
    def _kinds(self) -> tuple[int, int, int]:
        nan = posinf = neginf = 0
        for tensor in self._tensors:
            for slab in _bits.slabs(tensor, _bits.CHUNK):
                nan += int(slab.isnan().sum())
                posinf += int((slab == math.inf).sum())
                neginf += int((slab == -math.inf).sum())
        return nan, posinf, neginf

    @property
    def n(self) -> int:  # type: ignore[override]
        return sum(tensor.numel() for tensor in self._tensors)

    def weighted(self) -> tuple[Floats, Ints]:
        """Return distinct values, sorted: twice the tensor's memory, which other methods avoid."""
        everything = list(self.chunks())
        values, weights = np.unique(
            np.concatenate(everything) if everything else np.empty(0), return_counts=True
        )
        return values, weights.astype(np.int64)

    @cached_property
    def _extremes(self) -> tuple[float, float, float, int]:
        low, high, least, zeros = math.inf, -math.inf, math.inf, 0
        for chunk in self.chunks():
            if len(chunk):
                low, high = min(low, float(chunk.min())), max(high, float(chunk.max()))
                sizes = np.abs(chunk[chunk != 0])
                zeros += len(chunk) - len(sizes)
                least = min(least, float(sizes.min(initial=math.inf)))
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
        total = PowerPass(self.amax if self.finite else 0.0)
        for chunk in self.chunks():
            total.take(torch.from_numpy(chunk))
        return total.moments()

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
