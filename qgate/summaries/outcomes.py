"""Outcomes of formats, as sums that add up over tensors.

A format that casts values as they are is evaluated once for each number of a 16-bit dtype; its
shares and sums follow from value counts. Formats with scales of their own need whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from qgate.formats import FORMATS, ElementFormat, Format
from qgate.formats.engine.effects import error_squares, losses_of, outcomes
from qgate.formats.engine.job import Job, split
from qgate.formats.losses import Losses, losses_of_values, saturates
from qgate.formats.quantizer import Quantizer
from qgate.records.plain_data import add_fields
from qgate.scales.search import quick_best_exponent
from qgate.stats import Counts
from qgate.stats.bits import BY_NAME, decoded, dot
from qgate.stats.summary import Floats
from qgate.summaries.record import Edges, FormatOutcome
from qgate.summaries.row_samples import RowSample

_PIECE = 2**14
"""Elements of rows at a time: float64 work on them stays in the cache."""


@dataclass(frozen=True)
class WideDtype:
    """A wide dtype: it has too many values for a format, but it has ends."""

    name: str

    kind: ClassVar[Literal["dtype"]] = "dtype"
    always_scaled: ClassVar[bool] = False
    signed: ClassVar[bool] = True

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


_WIDE_DTYPES = {
    name: WideDtype(f"float{name[-2:]}") for name in ("float32", "fp32", "float64", "fp64")
}
Target = Format | WideDtype


def target_of(name: str) -> Target:
    """Return the format or wide dtype of that name or alias."""
    if (limit := _WIDE_DTYPES.get(name.lower())) is not None:
        return limit
    return FORMATS.get(name)


def edges_of(names: Iterable[str]) -> dict[str, Edges]:
    """Return the ranges of formats and dtypes by their names, of blocks in units of the scale."""
    edges = {}
    for t in map(target_of, names):
        edges[t.name] = Edges(
            max=t.max,
            min_normal=t.min_normal,
            min_subnormal=t.min_subnormal,
            scaled=t.always_scaled,
        )
        if t.kind == "element" and (granularity := Quantizer(t).granularity):
            edges[t.name]["granularity"] = granularity
    return edges


@dataclass(frozen=True)
class OutcomeSums:
    """Losses of a tensor, and sums of squares over the finite ones among `of` elements.

    The sums of the rest leave out massive elements; None where they were not requested. Sums of a
    sample of rows are estimates for all rows.
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

    def __add__(self, other: OutcomeSums) -> OutcomeSums:
        if not isinstance(other, OutcomeSums):
            return NotImplemented
        if not (self.losses.elements and other.losses.elements):
            return self if self.losses.elements else other
        return add_fields(OutcomeSums, self, other)

    def times(self, factor: float) -> OutcomeSums:
        """Return the sums of so many times the rows; `of` stays what was measured."""
        if factor == 1:
            return self
        grown = replace(self, losses=self.losses.times(factor))
        for name, value in vars(self).items():
            if value is not None and name not in ("losses", "of"):
                object.__setattr__(grown, name, value * factor)
        return grown

    def outcome(self) -> FormatOutcome:
        """Return shares and sums; sums of squares that float64 cannot hold are of 0 elements."""
        losses = self.losses
        sums = (self.signal, self.noise, self.fitted_signal or 0.0, self.fitted_noise or 0.0)
        lost = not all(map(math.isfinite, sums)) or (losses.flushed > 0 and self.signal == 0)
        outcome = FormatOutcome(
            upper=losses.share("upper"),
            lower=losses.share("lower"),
            underflow=losses.share("underflow"),
            flushed=losses.flushed_share,
            signal=0.0 if lost else self.signal,
            noise=0.0 if lost else self.noise,
            of=0 if lost else self.of,
        )
        if losses.beyond_range_share is not None:
            outcome["beyond_range"] = losses.beyond_range_share
        if not lost:
            outcome["saturated_error_share"] = (
                self.saturated_noise / self.noise if self.noise else 0.0
            )
        if self.fitted_signal is not None and self.fitted_noise is not None and not lost:
            outcome["fitted_signal"] = self.fitted_signal
            outcome["fitted_noise"] = self.fitted_noise
        if self.rest_signal is not None and self.rest_noise is not None and not lost:
            outcome["rest_signal"], outcome["rest_noise"] = self.rest_signal, self.rest_noise
            if self.fitted_rest_noise is not None:
                outcome["fitted_rest_noise"] = self.fitted_rest_noise
        return outcome


@lru_cache(maxsize=64)
def _cast_table(target: ElementFormat | WideDtype, counted_as: str) -> Floats:
    """Return the value of each bit pattern after the cast, zero where it is not finite."""
    values = decoded(BY_NAME[counted_as])
    plain = np.where(np.isfinite(values), values, 0.0)
    return plain if isinstance(target, WideDtype) else nearest(target, plain)


def nearest(fmt: ElementFormat, values: Floats) -> Floats:
    """Round finite values to the format's grid, as its quantizer does; too large ones saturate."""
    return np.asarray(fmt.nearest(torch.from_numpy(np.array(values))).numpy())


def _least_losing(fmt: ElementFormat, values: Floats, weights: Floats) -> int:
    """Return the exponent of the scale at which a tensor loses least, 0 for a tensor of zeros."""
    sizes = np.abs(values) if fmt.signed else np.maximum(values, 0.0)
    if not sizes.any():
        return 0
    order = np.argsort(sizes, kind="stable")
    return quick_best_exponent(fmt, sizes[order], weights[order], near=0)


def _scaled_by(fmt: ElementFormat, values: Floats, k: int) -> Floats:
    if abs(k) > 1000:
        return np.ldexp(nearest(fmt, np.ldexp(values, -k)), k)
    return nearest(fmt, values * 2.0**-k) * 2.0**k


def _squares(
    target: ElementFormat | WideDtype, values: Floats, cast: Floats, weights: Floats | None
) -> tuple[float, float, float]:
    """Sum the squares of values, of their errors, and of the errors of saturated ones."""
    wrong = cast - values
    beyond = saturates(target, values)
    heavy = wrong if weights is None else wrong * weights
    signal = values if weights is None else values * weights
    return dot(values, signal), dot(wrong, heavy), dot(wrong[beyond], heavy[beyond])


def outcome_of_counts(
    target: ElementFormat | WideDtype,
    counts: Counts,
    own: tuple[int, int, int],
    rows: RowSample | None = None,
    massive: float | None = None,
) -> OutcomeSums:
    """Measure losses and sums of squares from value counts.

    `own` are the tensor's positive and negative infinities, and the values that were counted as
    zero but are not. The sums are of `rows`, if given: the values of a tensor that was rounded to
    be counted. `massive` is the magnitude above which the sums of the rest leave values out.
    """
    (patterns, often), counted = counts.occurring, counts.values
    losses = losses_of_values(target, counted, often)
    losses = losses.before_rounding(*own, lost=target.kind == "element")
    finite = np.isfinite(counted)
    weights: Floats | None = often[finite].astype(np.float64)
    if rows is None:
        values = counted[finite]
        cast = _cast_table(target, counts.dtype)[patterns[finite]] if len(values) else values
    else:
        values, weights = rows.values()
        is_finite = np.isfinite(values)
        if not is_finite.all():
            values, weights = values[is_finite], None if weights is None else weights[is_finite]
        cast = values if isinstance(target, WideDtype) else nearest(target, values)
    fitted: tuple[float | None, float | None] = (None, None)
    rest_sums: list[float | None] = [None] * 3
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        casts = [cast]
        if target.kind == "element":
            # The scale is that of the whole tensor, also where the error is of some rows.
            k = _least_losing(target, counted[finite], often[finite].astype(np.float64))
            casts.append(_scaled_by(target, values, k))
            fitted = _squares(target, values, casts[1], weights)[:2]
        sums = _squares(target, values, cast, weights)
        if massive is not None:
            below = np.abs(values) <= massive
            below_weights = weights if weights is None else weights[below]
            pairs = [_squares(target, values[below], cast[below], below_weights) for cast in casts]
            rest_sums = [*pairs[0][:2], pairs[1][1] if len(pairs) > 1 else None]
    of = losses.elements if rows is None else rows.elements
    return OutcomeSums(losses, of, *sums, *fitted, *rest_sums)


def outcome_of_dtype(limit: WideDtype, chunks: Iterator[Floats]) -> OutcomeSums:
    """Measure a cast to a wide dtype by a pass over a tensor at least as wide."""
    sums = OutcomeSums()
    for chunk in chunks:
        values = chunk[np.isfinite(chunk)]
        with np.errstate(over="ignore", under="ignore"):
            cast = values.clip(-limit.max, limit.max).astype(limit.numpy).astype(np.float64)
            squares = _squares(limit, values, cast, None)
        sums += OutcomeSums(losses_of_values(limit, chunk), chunk.size, *squares)
    return sums


def outcome_of_rows(
    fmt: Format, sample: RowSample, ends: Sequence[float], massive: float | None = None
) -> OutcomeSums:
    """Measure a format on rows that stand for those of a tensor; its finite ends are `ends`."""
    total = OutcomeSums()
    for rows, of in sample.kinds:
        sums = _outcome_of_rows(fmt, rows, ends, massive)
        total += sums.times(of / len(rows)) if len(rows) else sums
    return total


def _outcome_of_rows(
    fmt: Format, rows: Tensor, ends: Sequence[float], massive: float | None
) -> OutcomeSums:
    """Measure a format on rows of a tensor whose finite ends are `ends`, NaN where it has none.

    A scale of the whole tensor ignores its non-finite values. `massive` is the magnitude above
    which the sums of the rest leave values out.
    """
    q = Quantizer(fmt)
    whole = Job(torch.tensor(ends, dtype=rows.dtype).nan_to_num(nan=0.0), q, counting=True)
    sums = OutcomeSums()
    for piece in rows.split(max(_PIECE // max(rows.shape[-1], 1), 1)):
        job = Job(piece, q, counting=True)
        job.scale = whole.scale if job.scale is not None else None
        job.zero_point = whole.zero_point
        if job.state is not None and whole.state is not None and not whole.state.dim():
            job.state = whole.state
        for _, _, wide, parts in split(job):
            hits = outcomes(wide, parts, q)
            squares = error_squares(wide, parts, hits).tolist()
            rest_sums: list[float] = []
            if massive is not None:
                below = error_squares(wide, parts, hits, massive) if massive < math.inf else None
                rest_sums = squares[:2] if below is None else below[:2].tolist()
            pair = dict(zip(("rest_signal", "rest_noise"), rest_sums, strict=False))
            sums += OutcomeSums(losses_of(hits), wide.numel(), *squares, **pair)
    return sums
