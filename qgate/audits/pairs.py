"""The two sides of a comparison: a sample, the whole, typical parts, and the differences seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qgate.audits.reading import RUN, LeftOut, TensorReader, Values, reader_of, same_tensor

Indices = npt.NDArray[np.int64]

SAMPLE_RUNS = 128
WHOLE_RUNS = 1 << 11
"""Runs of neighbors in a sample, and at most in a whole: 4,096 and 65,536 elements."""
_CHUNK = 1 << 18
_STRETCHES = 9
_CANDIDATES = 512
_CONSTANT = 1e-3
"""Spread, relative to the RMS, up to which a tensor counts as constant."""


class Sides(NamedTuple):
    """Elements of both tensors at the same positions, all finite."""

    x: Values
    y: Values


class TypicalPart(NamedTuple):
    """Elements that a fault changes, their flat positions, and how many each stands for."""

    sides: Sides
    indices: Indices
    weight: float


class Distances(NamedTuple):
    """Largest differences of elements: plain, over 1 + abs(y), and over the largest abs(y)."""

    absolute: float
    mixed: float
    scaled: float

    def combined(self, other: Distances, choose: Callable[[float, float], float]) -> Distances:
        return Distances(*map(choose, self, other))


class _Scan(NamedTuple):
    """One pass over all elements: positions of the largest of each side, and differences."""

    peaks: Indices
    largest: float
    differences: Distances


@dataclass(frozen=True)
class TensorPair:
    """Two floating tensors of one shape that a test compared; if not thorough, a sample of them."""

    x: TensorReader
    y: TensorReader
    thorough: bool = True

    @property
    def size(self) -> int:
        return self.x.size

    @cached_property
    def sample(self) -> Sides:
        """Elements spread evenly over the tensors, all of a small one."""
        return _finite(self.x.runs(SAMPLE_RUNS), self.y.runs(SAMPLE_RUNS))

    @cached_property
    def whole(self) -> Sides:
        """All elements, or of a large tensor 65,536 of them and the largest."""
        if self.size <= SAMPLE_RUNS * RUN or not self.thorough:
            return self.sample
        x, y = self.x.runs(WHOLE_RUNS), self.y.runs(WHOLE_RUNS)
        if self.size > x.size:
            x = np.append(x, self.x.picked(self._scan.peaks))
            y = np.append(y, self.y.picked(self._scan.peaks))
        return _finite(x, y)

    @property
    def differences(self) -> Distances:
        """The largest differences between the tensors, at least the rounding of their dtype."""
        eps = max(self.x.eps, self.y.eps)
        noise = Distances(eps * self._scan.largest, eps, eps)
        return self._scan.differences.combined(noise, max)

    def distances(self, sides: Sides) -> Distances:
        """Return the largest differences of some elements."""
        return _distances(*sides, self._scan.largest)

    def part(self, name: str) -> TypicalPart | None:
        """Return a typical row, block, or element in a thousand; None where there is no such."""
        if name == "elements":
            return self._elements()
        if name == "block":
            return self._stretch(RUN if self.size >= RUN else self.size)
        width = self.x.shape[-1]
        return self._stretch(width) if 1 < width < self.size else None

    def _stretch(self, width: int) -> TypicalPart | None:
        """Return the median by energy of some stretches, those of zeros left out."""
        count = self.size // width
        starts = np.unique(np.linspace(0, count - 1, min(count, _STRETCHES)).astype(np.int64))
        stretches = []
        for start in starts * width:
            indices = np.arange(start, start + width)
            sides = _finite(self.x.at(start, start + width), self.y.at(start, start + width))
            energy = float(np.square(sides.x).sum())
            if energy:
                stretches.append((energy, int(start), TypicalPart(sides, indices, 1.0)))
        return sorted(stretches)[len(stretches) // 2][2] if stretches else None

    def _elements(self) -> TypicalPart | None:
        """Return elements of median magnitude, zeros left out."""
        count = min(self.size, _CANDIDATES)
        indices = np.unique(np.linspace(0, self.size - 1, count).astype(np.int64))
        x, y = self.x.picked(indices), self.y.picked(indices)
        usable = np.isfinite(x) & np.isfinite(y) & (x != 0)
        if not usable.any():
            return None
        sizes = np.abs(x[usable])
        changed = max(1, self.size // 1000)
        nearest = np.argsort(np.abs(sizes - np.median(sizes)), kind="stable")
        chosen = indices[usable][nearest[: min(changed, _STRETCHES)]]
        sides = Sides(self.x.picked(chosen), self.y.picked(chosen))
        return TypicalPart(sides, chosen, changed / len(chosen))

    @cached_property
    def _scan(self) -> _Scan:
        chunks = []
        for start in range(0, self.size, _CHUNK) if self.thorough else (0,):
            stop = min(start + _CHUNK, self.size)
            x, y = self.sample
            if self.thorough:
                x, y = _nonfinite_as_zero(self.x.at(start, stop), self.y.at(start, stop))
            peaks = [start + int(np.abs(side).argmax()) for side in (x, y)]
            tops = [float(np.abs(side).max()) for side in (x, y)]
            chunks.append((peaks, tops, _distances(x, y, 1.0)))
        largest = max(tops[1] for _, tops, _ in chunks)
        peaks = [max(chunks, key=lambda chunk: chunk[1][side])[0][side] for side in (0, 1)]
        absolute = max(distances.absolute for *_, distances in chunks)
        mixed = max(distances.mixed for *_, distances in chunks)
        differences = Distances(absolute, mixed, absolute / (largest or 1.0))
        return _Scan(np.asarray(peaks, dtype=np.int64), largest, differences)


def pair_of(first: Any, second: Any, *, thorough: bool = True) -> TensorPair:
    """Return the pair of two compared values, or raise LeftOut with the reason."""
    x, y = reader_of(first), reader_of(second)
    if x.shape != y.shape:
        raise LeftOut("shapes that differ")
    if x.size == 0:
        raise LeftOut("empty tensors")
    if same_tensor(first, second):
        raise LeftOut("a tensor with itself")
    pair = TensorPair(x, y, thorough)
    if _is_constant(pair.sample):
        if _is_constant(pair.whole):
            raise LeftOut("constant tensors")
        pair.__dict__["sample"] = pair.whole
    return pair


def _is_constant(sides: Sides) -> bool:
    for side in sides:
        if side.size < 2 or side.std() <= _CONSTANT * np.sqrt(np.square(side).mean()):
            return True
    return False


def _finite(x: Values, y: Values) -> Sides:
    usable = np.isfinite(x) & np.isfinite(y)
    return Sides(x, y) if usable.all() else Sides(x[usable], y[usable])


def _nonfinite_as_zero(x: Values, y: Values) -> Sides:
    usable = np.isfinite(x) & np.isfinite(y)
    return (
        Sides(x, y) if usable.all() else Sides(np.where(usable, x, 0.0), np.where(usable, y, 0.0))
    )


def _distances(x: Values, y: Values, largest: float) -> Distances:
    difference = np.abs(x - y)
    absolute = float(difference.max(initial=0.0))
    mixed = float((difference / (1 + np.abs(y))).max(initial=0.0))
    return Distances(absolute, mixed, absolute / (largest or 1.0))
