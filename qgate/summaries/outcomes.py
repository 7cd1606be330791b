"""What formats do to values, as sums that add up over tensors.

A format that casts values as they are is asked once for each number of a 16-bit dtype; after that
its shares and sums follow from value counts. Formats with scales of their own see whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from qgate.formats import FORMATS, ElementFormat, Format
from qgate.formats.losses import Losses, losses_of_values
from qgate.formats.quantizer import Quantizer
from qgate.scales.search import quick_best_exponent
from qgate.stats.bits import BY_NAME, decoded
from qgate.summaries.record import Edges, Fate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limit:
    """A wide dtype: too many values for a format, but it has ends."""

    name: str

    kind: ClassVar[Literal["dtype"]] = "dtype"
    always_scaled: ClassVar[bool] = False

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

    def saturates_from(self) -> float:
        """Return the smallest magnitude that rounds beyond the largest; infinity where none is."""
        return math.inf if self.name == "float64" else self.max + 2.0**103

    def survives_from(self) -> float:
        """Return the smallest magnitude that does not become zero."""
        smallest = self.min_subnormal
        return smallest if self.name == "float64" else math.nextafter(smallest / 2, math.inf)


_LIMITS = {name: Limit(f"float{name[-2:]}") for name in ("float32", "fp32", "float64", "fp64")}
Target = Format | Limit


def target_of(name: str) -> Target:
    """The format or wide dtype of that name or alias."""
    if (limit := _LIMITS.get(name.lower())) is not None:
        return limit
    return FORMATS.get(name)


def edges_of(names: Iterable[str]) -> dict[str, Edges]:
    """What formats and dtypes can represent, by their own names; blocks in units of the scale."""
    found = {}
    for t in map(target_of, names):
        found[t.name] = Edges(
            max=t.max,
            min_normal=t.min_normal,
            min_subnormal=t.min_subnormal,
            scaled=t.always_scaled,
        )
        if t.kind == "element" and (granularity := Quantizer(t).granularity):
            found[t.name]["granularity"] = granularity
    return found


@dataclass(frozen=True)
class FateSums:
    """Losses of a tensor; sums of squares over the finite ones among `of` elements.

    Those of the rest leave out the massive elements too; None where nobody asked.
    """

    losses: Losses = field(default_factory=Losses)
    of: int = 0
    signal: float = 0.0
    noise: float = 0.0
    saturated_noise: float = 0.0
    fitted_signal: float | None = None
    fitted_noise: float | None = None
    rest_signal: float | None = None
    rest_noise: float | None = None
    fitted_rest_noise: float | None = None

    def __add__(self, other: FateSums) -> FateSums:
        if not isinstance(other, FateSums):
            return NotImplemented
        if not (self.losses.elements and other.losses.elements):
            return self if self.losses.elements else other
        return FateSums(
            self.losses + other.losses,
            self.of + other.of,
            self.signal + other.signal,
            self.noise + other.noise,
            self.saturated_noise + other.saturated_noise,
            _both(self.fitted_signal, other.fitted_signal),
            _both(self.fitted_noise, other.fitted_noise),
            _both(self.rest_signal, other.rest_signal),
            _both(self.rest_noise, other.rest_noise),
            _both(self.fitted_rest_noise, other.fitted_rest_noise),
        )

    def fate(self) -> Fate:
        """As shares. Sums of squares that float64 cannot hold are of 0 elements."""
        losses = self.losses
        sums = (self.signal, self.noise, self.fitted_signal or 0.0, self.fitted_noise or 0.0)
        lost = not all(map(math.isfinite, sums)) or (losses.flushed > 0 and self.signal == 0)
        found = Fate(
            upper=losses.share("upper"),
            lower=losses.share("lower"),
            underflow=losses.share("underflow"),
            flushed=losses.flushed_share,
            signal=0.0 if lost else self.signal,
            noise=0.0 if lost else self.noise,
            of=0 if lost else self.of,
        )
        if losses.beyond_range_share is not None:
            found["beyond_range"] = losses.beyond_range_share
        if not lost:
            found["saturated_error_share"] = (
                self.saturated_noise / self.noise if self.noise else 0.0
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


@lru_cache(maxsize=2)
def value_table(counted_as: str) -> Floats:
    """The value of each bit pattern."""
    return decoded(BY_NAME[counted_as])


@lru_cache(maxsize=64)
def _cast_table(target: ElementFormat | Limit, counted_as: str) -> Floats:
    """The value of each bit pattern after the cast; of one that is not finite, zero."""
    values = value_table(counted_as)
    plain = np.where(np.isfinite(values), values, 0.0)
    return plain if isinstance(target, Limit) else nearest(target, plain)


def nearest(fmt: ElementFormat, values: Floats) -> Floats:
    """Finite values on the format's grid, as its quantizer would have them: too large saturates."""
    return np.asarray(fmt.nearest(torch.from_numpy(np.array(values))).numpy())


def _least_losing(fmt: ElementFormat, values: Floats, weights: Floats) -> int:
    """The exponent of the power of two at which a tensor loses least, 0 of a tensor of zeros."""
    sizes = np.abs(values)
    if not sizes.any():
        return 0
    order = np.argsort(sizes, kind="stable")
    return quick_best_exponent(fmt, sizes[order], weights[order], near=0)


def _scaled_by(fmt: ElementFormat, values: Floats, k: int) -> Floats:
    if abs(k) > 1000:
        return np.ldexp(nearest(fmt, np.ldexp(values, -k)), k)
    return nearest(fmt, values * 2.0**-k) * 2.0**k


def _squares(
    target: ElementFormat | Limit, values: Floats, cast: Floats, weights: Floats | None
) -> tuple[float, float, float]:
    """Sum the squares of values, of their errors, and of the errors of saturated ones."""
    wrong = cast - values
    beyond = np.abs(values) >= target.saturates_from()
    heavy = wrong if weights is None else wrong * weights
    signal = values if weights is None else values * weights
    return (
        float(values @ signal),
        float(wrong @ heavy),
        float(wrong[beyond] @ heavy[beyond]),
    )


class CountedTensors(Protocol):
    """What counting tells of tensors; `Pool` says what the fields are."""

    @property
    def counted_as(self) -> str: ...
    @property
    def patterns(self) -> npt.NDArray[np.uint16]: ...
    @property
    def counts(self) -> Ints: ...
    @property
    def posinf(self) -> int: ...
    @property
    def neginf(self) -> int: ...
    @property
    def vanished(self) -> int: ...


def fate_of_counts(
    target: ElementFormat | Limit,
    pool: CountedTensors,
    rows: Floats | None = None,
    massive: float | None = None,
) -> FateSums:
    """Return losses from value counts, and sums of squares from them too.

    The sums are of `rows` where those are given: the values of a tensor that was rounded to be
    counted. `massive` is the magnitude above which the sums of the rest leave values out.
    """
    counted, counts = value_table(pool.counted_as)[pool.patterns], pool.counts
    losses = losses_of_values(target, counted, counts)
    losses = losses.before_rounding(
        pool.posinf, pool.neginf, pool.vanished, lost=target.kind == "element"
    )
    finite = np.isfinite(counted)
    often = counts[finite].astype(np.float64)
    weights: Floats | None = often
    if rows is None:
        table = _cast_table(target, pool.counted_as)
        values, cast = counted[finite], table[pool.patterns[finite]]
    else:
        weights = None
        values = rows if np.isfinite(rows).all() else rows[np.isfinite(rows)]
        cast = values if isinstance(target, Limit) else nearest(target, values)
    fitted: tuple[float | None, float | None] = (None, None)
    rest: list[float | None] = [None] * 3
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        casts = [cast]
        if target.kind == "element":
            # The scale is that of the whole tensor, also where the error is of some rows.
            k = _least_losing(target, counted[finite], often)
            casts.append(_scaled_by(target, values, k))
            fitted = _squares(target, values, casts[1], weights)[:2]
        sums = _squares(target, values, cast, weights)
        if massive is not None:
            kept = np.abs(values) <= massive
            own = weights if weights is None else weights[kept]
            pairs = [_squares(target, values[kept], each[kept], own) for each in casts]
            rest = [*pairs[0][:2], pairs[1][1] if len(pairs) > 1 else None]
    of = losses.elements if rows is None else rows.size
    return FateSums(losses, of, *sums, *fitted, *rest)


def fate_of_limit(limit: Limit, chunks: Iterator[Floats]) -> FateSums:
    """Of a tensor as wide as the dtype or wider, by going through it."""
    sums = FateSums()
    for chunk in chunks:
        values = chunk[np.isfinite(chunk)]
        with np.errstate(over="ignore", under="ignore"):
            cast = values.clip(-limit.max, limit.max).astype(limit.numpy).astype(np.float64)
            squares = _squares(limit, values, cast, None)
        sums += FateSums(losses_of_values(limit, chunk), chunk.size, *squares)
    return sums
