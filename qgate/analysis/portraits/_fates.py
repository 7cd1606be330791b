"""What formats do to values, as sums that add up over tensors.

A format that casts values as they are is asked once for each number of a 16-bit dtype; after that
its shares and sums follow from value counts. Formats with scales of their own see whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from qgate.analysis.sweeps._levels import ceil_log2_ratio
from qgate.formats import FORMATS, ElementFormat, Format, IntFormat
from qgate.formats.quantizer import Quantizer
from qgate.results.portraits import Edges, Fate
from qgate.stats._bits import BY_NAME, decoded

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limit:
    """A wide dtype: too many values for a format, but it has ends."""

    name: str

    @property
    def numpy(self) -> type[np.float32] | type[np.float64]:
        return np.float32 if self.name == "float32" else np.float64

    @property
    def max(self) -> float:
        return float(np.finfo(self.numpy).max)

    @property
    def min_normal(self) -> float:
        return float(np.finfo(self.numpy).smallest_normal)

    @property
    def min_subnormal(self) -> float:
        return float(np.finfo(self.numpy).smallest_subnormal)


_LIMITS = {name: Limit(f"float{name[-2:]}") for name in ("float32", "fp32", "float64", "fp64")}
Target = Format | Limit


def target_of(name: str) -> Target:
    """The format or wide dtype of that name or alias."""
    if (limit := _LIMITS.get(name.lower())) is not None:
        return limit
    return FORMATS.get(name)


def scaled(target: Target) -> bool:
    """If it brings scales of its own: blocks, and integers, which mean nothing without one."""
    return not isinstance(target, Limit | ElementFormat) or isinstance(target, IntFormat)


def edges_of(names: Iterable[str]) -> dict[str, Edges]:
    """What formats and dtypes can represent, by their own names; blocks in units of the scale."""
    found = {}
    for t in map(target_of, names):
        found[t.name] = Edges(
            max=t.max, min_normal=t.min_normal, min_subnormal=t.min_subnormal, scaled=scaled(t)
        )
        if isinstance(t, IntFormat) and (granularity := Quantizer(t).granularity):
            found[t.name]["granularity"] = granularity
    return found


@dataclass(frozen=True)
class FateSums:
    """Counts among `seen` elements; sums of squares over the finite ones among `of` elements.

    Those of the rest leave out the massive elements too; None where nobody asked. `saturation` is
    the part of `noise` that saturated elements have.
    """

    upper: int = 0
    lower: int = 0
    underflow: int = 0
    flush: int = 0
    seen: int = 0
    of: int = 0
    signal: float = 0.0
    noise: float = 0.0
    fitted_signal: float | None = None
    fitted_noise: float | None = None
    rest_signal: float | None = None
    rest_noise: float | None = None
    fitted_rest_noise: float | None = None
    saturation: float = 0.0

    def __add__(self, other: FateSums) -> FateSums:
        if not isinstance(other, FateSums):
            return NotImplemented
        if not (self.seen and other.seen):
            return self if self.seen else other
        return FateSums(
            self.upper + other.upper,
            self.lower + other.lower,
            self.underflow + other.underflow,
            self.flush + other.flush,
            self.seen + other.seen,
            self.of + other.of,
            self.signal + other.signal,
            self.noise + other.noise,
            _both(self.fitted_signal, other.fitted_signal),
            _both(self.fitted_noise, other.fitted_noise),
            _both(self.rest_signal, other.rest_signal),
            _both(self.rest_noise, other.rest_noise),
            _both(self.fitted_rest_noise, other.fitted_rest_noise),
            self.saturation + other.saturation,
        )

    def fate(self) -> Fate:
        """As shares. Sums of squares that float64 cannot hold are of 0 elements."""
        n = max(self.seen, 1)
        sums = (self.signal, self.noise, self.fitted_signal or 0.0, self.fitted_noise or 0.0)
        lost = not all(map(math.isfinite, sums)) or (self.flush > 0 and self.signal == 0)
        found = Fate(
            upper=self.upper / n,
            lower=self.lower / n,
            underflow=self.underflow / n,
            flush=self.flush / n,
            signal=0.0 if lost else self.signal,
            noise=0.0 if lost else self.noise,
            of=0 if lost else self.of,
            saturation=0.0 if lost else self.saturation,
        )
        if self.fitted_signal is not None and self.fitted_noise is not None and not lost:
            found["fitted_signal"] = self.fitted_signal
            found["fitted_noise"] = self.fitted_noise
        if self.rest_signal is not None and self.rest_noise is not None and not lost:
            found["rest_signal"], found["rest_noise"] = self.rest_signal, self.rest_noise
            if self.fitted_rest_noise is not None:
                found["fitted_rest_noise"] = self.fitted_rest_noise
        return found


def _both(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


@dataclass(frozen=True)
class _Table:
    """What happens to each bit pattern: its value after the cast, and four yes or no."""

    values: Floats
    cast: Floats
    upper: npt.NDArray[np.bool_]
    lower: npt.NDArray[np.bool_]
    underflow: npt.NDArray[np.bool_]
    flush: npt.NDArray[np.bool_]


@lru_cache(maxsize=2)
def value_table(counted_as: str) -> Floats:
    """The value of each bit pattern."""
    return decoded(BY_NAME[counted_as])


@lru_cache(maxsize=64)
def _table(target: ElementFormat | Limit, counted_as: str) -> _Table:
    values = value_table(counted_as)
    sizes, finite = np.abs(values), np.isfinite(values)
    plain = np.where(finite, values, 0.0)
    cast = plain if isinstance(target, Limit) else nearest(target, plain)
    return _Table(
        values,
        cast,
        upper=values > target.max,
        lower=values < -target.max,
        underflow=(sizes > 0) & (sizes < target.min_normal),
        flush=finite & (values != 0) & (cast == 0),
    )


def nearest(fmt: ElementFormat, values: Floats) -> Floats:
    """Finite values on the format's grid, as its quantizer would have them: too large saturates."""
    return np.asarray(fmt.nearest(torch.from_numpy(np.array(values))).numpy())


def fitting_exponent(amax: float, largest: float) -> int:
    """The least k at which amax / 2**k is not beyond the largest value of a format."""
    return ceil_log2_ratio(amax, largest) if amax > 0 else 0


def _fitted(fmt: ElementFormat, values: Floats, amax: float) -> Floats:
    k = fitting_exponent(amax, fmt.max)
    if abs(k) > 1000:
        return np.ldexp(nearest(fmt, np.ldexp(values, -k)), k)
    return nearest(fmt, values * 2.0**-k) * 2.0**k


def _squares(values: Floats, cast: Floats, weights: Floats | None) -> tuple[float, float]:
    wrong = cast - values
    if weights is None:
        return float(values @ values), float(wrong @ wrong)
    return float((values * values) @ weights), float((wrong * wrong) @ weights)


def fate_of_counts(
    target: ElementFormat | Limit,
    counted_as: str,
    patterns: npt.NDArray[np.uint16],
    counts: Ints,
    *,
    amax: float,
    vanished: int = 0,
    rows: Floats | None = None,
    massive: float | None = None,
) -> FateSums:
    """Shares from value counts; signal and noise from them too, unless `rows` has the values of a
    tensor that was rounded to be counted. `massive` is the magnitude above which the sums of the
    rest leave values out.

    `vanished` are values that are not zero but were counted as zero, because the counted dtype has
    none so small: neither have the formats.
    """
    table = _table(target, counted_as)
    gone = vanished if isinstance(target, ElementFormat) else 0
    hits = (table.upper, table.lower, table.underflow, table.flush)
    upper, lower, underflow, flush = (int(counts[hit[patterns]].sum()) for hit in hits)
    seen = int(counts.sum())
    weights: Floats | None = None
    if rows is None:
        finite = np.isfinite(table.values[patterns])
        weights = counts[finite].astype(np.float64)
        values, cast = table.values[patterns[finite]], table.cast[patterns[finite]]
    else:
        values = rows if np.isfinite(rows).all() else rows[np.isfinite(rows)]
        cast = values if isinstance(target, Limit) else nearest(target, values)
    fitted: tuple[float | None, float | None] = (None, None)
    rest: list[tuple[float, float]] = []
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        casts = [cast]
        if isinstance(target, ElementFormat):
            casts.append(_fitted(target, values, amax))
            fitted = _squares(values, casts[1], weights)
        sums = _squares(values, cast, weights)
        over = np.abs(values) > target.max
        above = weights if weights is None else weights[over]
        saturation = _squares(values[over], cast[over], above)[1]
        if massive is not None:
            kept = np.abs(values) <= massive
            own = weights if weights is None else weights[kept]
            rest = [_squares(values[kept], each[kept], own) for each in casts]
    head = (upper, lower, underflow + gone, flush + gone, seen)
    of = seen if rows is None else rows.size
    found = FateSums(*head, of, *sums, *fitted, saturation=saturation)
    if not rest:
        return found
    other = rest[1][1] if len(rest) > 1 else None
    return replace(found, rest_signal=rest[0][0], rest_noise=rest[0][1], fitted_rest_noise=other)


def fate_of_limit(limit: Limit, chunks: Iterator[Floats]) -> FateSums:
    """Of a tensor as wide as the dtype or wider, by going through it."""
    found = FateSums()
    for chunk in chunks:
        values = chunk[np.isfinite(chunk)]
        sizes = np.abs(values)
        with np.errstate(over="ignore", under="ignore"):
            cast = values.clip(-limit.max, limit.max).astype(limit.numpy).astype(np.float64)
            found += FateSums(
                int((chunk > limit.max).sum()),
                int((chunk < -limit.max).sum()),
                int(((sizes > 0) & (sizes < limit.min_normal)).sum()),
                int(((sizes > 0) & (cast == 0)).sum()),
                chunk.size,
                chunk.size,
                *_squares(values, cast, None),
                saturation=_squares(values[sizes > limit.max], cast[sizes > limit.max], None)[1],
            )
    return found
