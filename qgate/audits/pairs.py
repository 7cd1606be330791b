"""The two sides of a comparison: a sample, the whole, typical parts, and the differences seen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qgate.audits.reading import RUN, LeftOut, TensorReader, Values, reader_of, same_tensor

Indices = npt.NDArray[np.int64]
Array = npt.NDArray[np.floating[Any]]

GLANCE_RUNS = 32
SAMPLE_RUNS = 128
WHOLE_RUNS = 1 << 11
"""Runs of neighbors at a glance, in a sample, and at most in a whole: 1,024, 4,096 and 65,536
elements."""
_CHUNK = 1 << 18
_STRETCHES = 9
_CANDIDATES = 512
_SMALL = 0.01
"""Magnitude, relative to the RMS, up to which changes of a row, block or element are no fault."""
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
    """One pass over elements: positions and sizes of the largest of each side, and differences."""

    peaks: tuple[int, int]
    sizes: tuple[float, float]
    absolute: float
    mixed: float

    def joined(self, other: _Scan) -> _Scan:
        x, y = (self if self.sizes[side] >= other.sizes[side] else other for side in (0, 1))
        return _Scan(
            (x.peaks[0], y.peaks[1]),
            (x.sizes[0], y.sizes[1]),
            max(self.absolute, other.absolute),
            max(self.mixed, other.mixed),
        )


@dataclass(frozen=True)
class TensorPair:
    """Two floating tensors of one shape that a test compared.

    thorough   to read a sample, and the whole where that passes; otherwise a smaller sample
    """

    x: TensorReader
    y: TensorReader
    thorough: bool = True

    @property
    def size(self) -> int:
        return self.x.size

    @functools.cached_property
    def sample(self) -> Sides:
        """Elements spread evenly over the tensors, all of a small one."""
        runs = SAMPLE_RUNS if self.thorough else GLANCE_RUNS
        return _finite(self.x.runs(runs), self.y.runs(runs))

    @functools.cached_property
    def many(self) -> Sides:
        """All elements, or of a large tensor 65,536 of them."""
        if self.size <= SAMPLE_RUNS * RUN or not self.thorough:
            return self.sample
        return _finite(self.x.runs(WHOLE_RUNS), self.y.runs(WHOLE_RUNS))

    @functools.cached_property
    def whole(self) -> Sides:
        """All elements, or of a large tensor 65,536 of them and the largest."""
        x, y = self.many
        if not self.thorough or self.size <= WHOLE_RUNS * RUN:
            return self.many
        peaks = np.asarray(self._scan.peaks, dtype=np.int64)
        return _finite(np.append(x, self.x.picked(peaks)), np.append(y, self.y.picked(peaks)))

    @property
    def differences(self) -> Distances:
        """The largest differences between the tensors, at least the rounding of their dtype."""
        eps = max(self.x.eps, self.y.eps)
        scan = self._scan
        noise = Distances(eps * self._largest, eps, eps)
        scaled = scan.absolute / (self._largest or 1.0)
        return Distances(scan.absolute, scan.mixed, scaled).combined(noise, max)

    def distances(self, sides: Sides) -> Distances:
        """Return the largest differences of some elements."""
        difference = np.abs(sides.x - sides.y)
        absolute = float(difference.max(initial=0.0))
        difference /= 1 + np.abs(sides.y)
        mixed = float(difference.max(initial=0.0))
        return Distances(absolute, mixed, absolute / (self._largest or 1.0))

    def part(self, name: str) -> TypicalPart | None:
        """Return a typical row, block, or element in a thousand; None where there is no such."""
        if name == "elements":
            return self._elements()
        if name == "block":
            return self._stretch(RUN if self.size >= RUN else self.size)
        width = self.x.shape[-1]
        if not self.thorough or not 1 < width < self.size:
            return None
        return self._stretch(width)

    def _stretch(self, width: int) -> TypicalPart | None:
        """Return the median by energy of some stretches, those of near zeros left out."""
        count = self.size // width
        most = _STRETCHES if self.thorough else 1
        starts = np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
        stretches = []
        for start in starts * width:
            indices = np.arange(start, start + width)
            sides = _finite(self.x.at(start, start + width), self.y.at(start, start + width))
            energies = [float(side @ side) for side in sides]
            if all(e > width * s**2 for e, s in zip(energies, self._small, strict=True)):
                stretches.append((energies[0], int(start), TypicalPart(sides, indices, 1.0)))
        return sorted(stretches)[len(stretches) // 2][2] if stretches else None

    def _elements(self) -> TypicalPart | None:
        """Return elements of median magnitude, near zeros left out."""
        count = min(self.size, _CANDIDATES if self.thorough else RUN)
        indices = np.unique(np.linspace(0, self.size - 1, count).astype(np.int64))
        x, y = self.x.picked(indices), self.y.picked(indices)
        usable = np.isfinite(x) & np.isfinite(y)
        usable &= (np.abs(x) > self._small[0]) & (np.abs(y) > self._small[1])
        if not usable.any():
            return None
        sizes = np.abs(x[usable])
        changed = max(1, self.size // 1000)
        nearest = np.argsort(np.abs(sizes - np.median(sizes)), kind="stable")
        chosen = indices[usable][nearest[: min(changed, _STRETCHES)]]
        sides = Sides(self.x.picked(chosen), self.y.picked(chosen))
        return TypicalPart(sides, chosen, changed / len(chosen))

    @functools.cached_property
    def _small(self) -> tuple[float, float]:
        """Magnitudes of both sides below which a part is too near zero to matter."""
        x, y = (_SMALL * math.sqrt(side @ side / max(side.size, 1)) for side in self.sample)
        return x, y

    @property
    def _largest(self) -> float:
        return self._scan.sizes[1]

    @functools.cached_property
    def _scan(self) -> _Scan:
        if not self.thorough:
            return _scan_chunk(*self.sample, 0)
        spans = ((start, start + _CHUNK) for start in range(0, self.size, _CHUNK))
        scans = (_scan_chunk(self.x.chunk(*span), self.y.chunk(*span), span[0]) for span in spans)
        return functools.reduce(_Scan.joined, scans)


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
        if _is_constant(pair.many):
            raise LeftOut("constant tensors")
        pair.__dict__["sample"] = pair.whole
    return pair


def _is_constant(sides: Sides) -> bool:
    for side in sides:
        if side.size < 2:
            return True
        centered = side - side.mean()
        if centered @ centered <= _CONSTANT**2 * (side @ side):
            return True
    return False


def _finite(x: Values, y: Values) -> Sides:
    usable = np.isfinite(x) & np.isfinite(y)
    return Sides(x, y) if usable.all() else Sides(x[usable], y[usable])


def _scan_chunk(x: Array, y: Array, start: int) -> _Scan:
    """Scan elements; those that are not finite on both sides count as zeros."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(x - y)
    absolute = float(difference.max())
    usable = np.isfinite(x) & np.isfinite(y) if not math.isfinite(absolute) else None
    if usable is not None and not usable.all():
        return _scan_chunk(np.where(usable, x, 0.0), np.where(usable, y, 0.0), start)
    x, y = np.abs(x), np.abs(y)
    peaks = int(x.argmax()), int(y.argmax())
    sizes = float(x[peaks[0]]), float(y[peaks[1]])
    difference /= 1 + y
    return _Scan((start + peaks[0], start + peaks[1]), sizes, absolute, float(difference.max()))
