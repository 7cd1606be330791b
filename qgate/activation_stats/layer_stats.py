"""Statistics of the tensors of one module in one role: streaming, mergeable, bounded.

Memory grows by one number per sample. Counts are integers and sums exact, so any order and any
parts of the samples give the same statistics, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qgate.activation_stats._outliers import Decode, OutlierRule, OutlierStats, TokenCall, widen
from qgate.activation_stats._quantizers import table_name
from qgate.activation_stats._ranges import ChannelCounts
from qgate.activation_stats._rows import RowShare
from qgate.activation_stats._tensor_pass import (
    ENDS,
    ROUNDING,
    Figures,
    TensorReading,
    Vector,
    figures_of,
    infinity,
    size_value,
)
from qgate.activation_stats.record import (
    HeatMap,
    LayerActivations,
    Magnitude,
    Massive,
    Outliers,
)
from qgate.errors import QgateError
from qgate.stats import Counts, massive_beyond, serial
from qgate.stats.moments import PowerSums
from qgate.stats.summary import Floats, Ints
from qgate.summaries.outcomes import target_of
from qgate.summaries.pool import Pool, of_counts
from qgate.summaries.pooling import channels_of, outcome_of
from qgate.summaries.record import Histogram, ValueSummary
from qgate.summaries.row_samples import all_rows

__all__ = ["LayerRequest", "LayerStats", "OutlierRule", "TensorReading"]

Reduced = Literal["token", "channel", "all"]


@dataclass(frozen=True)
class LayerRequest:
    """The statistics of a module in a role; those that are not requested cost nothing.

    reduced      magnitudes: of tokens, of channels, of all values
    outliers     the rule of outliers, if any
    percentiles  of each channel, with `absolute` without their signs; none if empty
    heat_map     the sample to draw
    formats      whose outcomes are measured; scales are those of a seeded share of rows
    share        elements of that share; `rows` is the number kept for the smoothing advice
    bins         of the histogram
    """

    reduced: tuple[Reduced, ...] = ("token", "channel")
    outliers: OutlierRule | None = None
    percentiles: tuple[float, ...] = ()
    absolute: bool = False
    heat_map: int | None = None
    formats: tuple[str, ...] = ()
    share: int = 2**16
    rows: int = 0
    bins: int = 0
    seed: int = 0

    def room(self, width: int) -> int:
        """Return how many rows are kept."""
        own = max(self.share // max(width, 1), 8) if self.formats else 0
        return max(own, self.rows)


class LayerStats:
    """Statistics of the tensors of one module in one role.

    `update` takes one call of one sample, `merge` the statistics of other samples. For tensors
    wider than 16 bits, quantiles, the histogram and the median over all values are of bfloat16
    numbers; all else is of the values.
    """

    def __init__(self, module: str, role: str, request: LayerRequest | None = None) -> None:
        self.module, self.role, self.request = module, role, request or LayerRequest()
        self.calls = self.tokens = self.elements = self.vanished = 0
        self.samples: set[int] = set()
        self.counted_as: str | None = None
        self.wide = False
        self.kinds = [0, 0, 0]
        self._powers = PowerSums()
        self.least = math.nan
        self.counts = Counts("bfloat16")
        self.lows, self.highs = np.full(0, math.inf), np.full(0, -math.inf)
        self.vectors: dict[str, Vector] = defaultdict(Vector)
        self.outliers = OutlierStats(self.request.outliers) if self.request.outliers else None
        self.ranges = ChannelCounts() if self.request.percentiles else None
        self.map: HeatMap | None = None
        self.share: RowShare | None = None
        self.trace = 0
        """Equal for layers that got the same tensors."""
        # Of the calls of the current sample: magnitudes and their figures, ends and counts of all
        # values.
        self._sample: int | None = None
        self._sample_calls: list[tuple[Floats, Floats, Figures, Figures]] = []
        self._ends: tuple[list[float], list[float]] = ([], [])
        self._sizes: Ints | int = 0

    def update(
        self,
        tensor: Tensor | TensorReading,
        sample: int = 0,
        tokens: Sequence[int] | Ints | None = None,
    ) -> None:
        """Take one call; `tokens` are ids, one per row."""
        reading = tensor
        if not isinstance(reading, TensorReading):
            reading = TensorReading.of(reading, self.counted_as)
        if self.counted_as is not None and reading.counted_as != self.counted_as:
            reading = TensorReading.of(reading.table, self.counted_as)
        if self._sample != sample:
            self.finish()
        n, width = reading.table.shape
        idents = None if tokens is None else np.asarray(tokens, dtype=np.int64)
        if idents is not None and len(idents) != n:
            raise QgateError(f"{self.module}: {n} tokens flow, but ids are not {n}.")
        self._count_as(reading.counted_as)
        self._sample = sample
        self.samples.add(sample)
        with serial():
            self._add_values(reading)
            # Of several widths the widest, whichever comes first.
            if self.request.room(width) and (self.share is None or width > self.share.width):
                self.share = RowShare(self.request.room(width), self.request.seed)
            if self.share is not None:
                self.share.add(reading.table, reading.tokens, sample, len(self._sample_calls))
            if self.outliers is not None:
                self.outliers.add(reading, sample, TokenCall(reading.tokens, idents))
            if self.ranges is not None:
                self.ranges.add(reading)
            if self.request.heat_map == sample and self.map is None:
                self.map = reading.heat_map(sample)
        figures = reading.token_figures, reading.channel_figures
        self._sample_calls.append((reading.tokens, reading.channels, *figures))

    def _count_as(self, dtype: str) -> None:
        if self.counted_as is None:
            self.counted_as, self.counts = dtype, Counts(dtype)

    def _add_values(self, reading: TensorReading) -> None:
        n, width = reading.table.shape
        self.calls += 1
        self.tokens += n
        self.elements += n * width
        self._add_powers(reading.wide, lambda: reading.moments)
        self.kinds = [a + b for a, b in zip(self.kinds, reading.kinds, strict=True)]
        self.vanished += reading.vanished
        self.counts.add(reading.counted)
        # For a wide tensor this is a pass over all values, made only where the counts need it.
        if reading.vanished or not reading.least_size > self.least * (1 + 2.0**-7):
            self.least = float(np.fmin(self.least, reading.least))
        self._add_ends(reading.lows, reading.highs)
        self.trace = hash((self.trace, reading.serial))
        if "all" in self.request.reduced:
            for mine, theirs in zip(self._ends, reading.ends_of_all(), strict=True):
                mine.extend(theirs)
            self._sizes = self._sizes + reading.sizes()

    def _add_ends(self, lows: Floats, highs: Floats) -> None:
        width = max(len(self.lows), len(lows))
        self.lows = np.fmin(widen(self.lows, width, math.inf), widen(lows, width, math.inf))
        self.highs = np.fmax(widen(self.highs, width, -math.inf), widen(highs, width, -math.inf))

    def finish(self) -> None:
        """Add the figures of the whole sample, after its last call."""
        if self._sample is None:
            return
        if self.outliers is not None:
            self.outliers.finish(self._sample)
        tokens, channels, *figures = self._sample_calls[0]
        if len(self._sample_calls) > 1:
            for _, more, *_ in self._sample_calls[1:]:
                width = max(len(channels), len(more))
                channels = np.fmax(widen(channels, width), widen(more, width))
            tokens = np.concatenate([call[0] for call in self._sample_calls])
            figures = [figures_of(tokens), figures_of(channels)]
        for name, own in zip(("token", "channel"), figures, strict=True):
            if name in self.request.reduced:
                self.vectors[name].add(*own)
        if self._ends[0] and self.counted_as is not None:
            ends = np.cumsum(np.asarray(self._sizes)[: infinity(self.counted_as)])
            at = int(np.searchsorted(ends, (int(ends[-1]) - 1) // 2, side="right"))
            top, low = sorted(self._ends[0], reverse=True), sorted(self._ends[1])
            self.vectors["all"].add(top[:ENDS], size_value(at, self.counted_as), low[:ENDS])
        self._sample, self._sample_calls, self._ends, self._sizes = None, [], ([], []), 0

    def merge(self, other: LayerStats) -> None:
        """Add statistics of other samples of the same module in the same role."""
        self.finish()
        other.finish()
        if (self.module, self.role, self.request) != (other.module, other.role, other.request):
            raise QgateError(
                f"statistics of {self.module} ({self.role}) and of {other.module} ({other.role}) "
                "do not add up: they are of other layers, or of other requests."
            )
        if other.counted_as is None:
            return
        if self.counted_as not in (None, other.counted_as):
            raise QgateError(
                f"{self.module} was counted as {self.counted_as} and as {other.counted_as}: the "
                "two do not add up."
            )
        self._count_as(other.counted_as)
        self.trace = hash((self.trace, other.trace))
        for name in ("calls", "tokens", "elements", "vanished"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.samples |= other.samples
        self._add_powers(other.wide, other._own_powers)
        self.kinds = [a + b for a, b in zip(self.kinds, other.kinds, strict=True)]
        self.counts.add(other.counts)
        self.least = float(np.fmin(self.least, other.least))
        self._add_ends(other.lows, other.highs)
        for name, vector in other.vectors.items():
            self.vectors[name].merge(vector)
        if self.outliers is not None and other.outliers is not None:
            self.outliers.merge(other.outliers)
        if self.ranges is not None and other.ranges is not None:
            self.ranges.merge(other.ranges)
        mine, theirs = self.share, other.share
        if mine is None or (theirs is not None and theirs.width > mine.width):
            self.share = copy.deepcopy(theirs)
        elif theirs is not None:
            mine.merge(theirs)
        self.map = self.map or other.map

    def __add__(self, other: LayerStats) -> LayerStats:
        total = copy.deepcopy(self)
        total.merge(other)
        return total

    # Moments are of what was counted, which is exact, until a wide tensor comes ------------------

    def _add_powers(self, wide: bool, powers: Callable[[], PowerSums]) -> None:
        """Add powers of a tensor; call it before its counts are added."""
        if wide and not self.wide:
            self._powers, self.wide = PowerSums() + self.counts.moments, True
        if self.wide:
            self._powers.merge(powers())

    def _own_powers(self) -> PowerSums:
        return self._powers if self.wide else self.counts.moments

    def moments(self) -> dict[str, float]:
        """Return mean, std, rms, skew and kurtosis of the values themselves."""
        return self._own_powers().figures()

    @property
    def amax(self) -> Floats:
        """The largest magnitude of each channel."""
        sizes: Floats = np.fmax(self.highs, -self.lows)
        return np.where(np.isfinite(sizes), sizes, 0.0)

    def rows(self, most: int) -> Tensor | None:
        """Return the finite rows of a seeded share."""
        rows = None if self.share is None else self.share.rows()
        if rows is None:
            return None
        rows = rows[: max(most, 1)]
        return rows[rows.isfinite().all(1)]

    def _pool(self) -> Pool:
        has_finite = np.isfinite(self.lows)
        nan, posinf, neginf = self.kinds
        pool = replace(
            of_counts(self.counts),
            tensors=max(self.calls, 1),
            elements=self.elements,
            nan=nan,
            posinf=posinf,
            neginf=neginf,
            low=float(self.lows[has_finite].min()) if has_finite.any() else math.nan,
            high=float(self.highs[has_finite].max()) if has_finite.any() else math.nan,
            least=self.least,
            vanished=self.vanished,
        )
        # Formats with scales of their own, and errors of wide values, are measured on these rows.
        width = 1 if self.share is None else max(self.share.width, 1)
        most = min(self.request.room(width), max(self.request.share // width, 8))
        rows = all_rows(torch.empty(0, 1)) if self.share is None else self.share.sample(most)
        massive = self._massive_beyond()
        outcomes = {
            table_name(name): outcome_of(target_of(name), pool, rows, massive, wide=self.wide)
            for name in self.request.formats
        }
        return replace(pool, outcomes=outcomes)

    def _massive_beyond(self) -> float:
        """Return the magnitude above which counted values are massive; inf without formats."""
        return massive_beyond(self.counts) if self.request.formats else math.inf

    # The record ----------------------------------------------------------------------------------

    def _massive(self) -> Massive | None:
        if (beyond := self._massive_beyond()) == math.inf:
            return None
        values, weights = self.counts.weighted()
        return Massive(beyond=beyond, elements=int(weights[np.abs(values) > beyond].sum()))

    def summary(self) -> ValueSummary:
        summary = self._pool().summary()
        if self.wide:
            constant = summary.get("min") == summary.get("max")
            moments = {"std": 0.0, "skew": math.nan, "kurtosis": math.nan} if constant else {}
            for name, value in (self.moments() | moments).items():
                summary.pop(name, None)  # type: ignore[misc]
                if math.isfinite(value):
                    summary[name] = value  # type: ignore[literal-required]
        if len(self.amax) > 1:
            summary["channels"] = channels_of(torch.from_numpy(self.amax)[None])
        return summary

    def _outliers(self, decode: Decode | None) -> Outliers | None:
        if self.outliers is None or not self.calls:
            return None
        return self.outliers.record(self.amax, self.tokens, self.moments().get("rms", 0.0), decode)

    def _histogram(self) -> Histogram | None:
        """Count finite values in bins, after rounding."""
        values, weights = self.counts.weighted()
        if not len(values) or not self.request.bins:
            return None
        low, high = float(values[0]), float(values[-1])
        high = high if high > low else low + max(abs(low), 1.0) * 2.0**-20
        counts = np.histogram(values, self.request.bins, (low, high), weights=weights)[0]
        return Histogram(low=low, high=high, counts=counts.astype(np.int64).tolist())

    def record(
        self,
        layer: int | None,
        kind: str,
        of: int,
        decode: Decode | None = None,
        raw: bool = False,
        summary: ValueSummary | None = None,
    ) -> LayerActivations:
        """Return the statistics as plain data. The run has `of` samples; `summary` may be that of
        statistics with the same `trace`."""
        self.finish()
        vectors = {name: self.vectors[name].magnitude() for name in self.request.reduced}
        magnitude: dict[str, Magnitude] = {k: v for k, v in vectors.items() if v is not None}
        layer_record = LayerActivations(
            module=self.module,
            role=self.role,
            layer=layer,
            kind=kind,
            width=len(self.amax),
            samples=len(self.samples),
            calls=self.calls,
            tokens=self.tokens,
            coverage=len(self.samples) / max(of, 1),
            portrait=self.summary() if summary is None else summary,
            magnitude=magnitude,
        )
        percentiles, absolute = self.request.percentiles, self.request.absolute
        parts = {
            "massive": self._massive(),
            "rounding": ROUNDING[self.counted_as] if self.wide and self.counted_as else None,
            "histogram": self._histogram(),
            "outliers": self._outliers(decode),
            "ranges": self.ranges.ranges(self.lows, self.highs, percentiles, absolute=absolute)
            if self.ranges is not None and len(self.highs)
            else None,
            "heat_map": self.map,
            "raw": {"channel_amax": self.amax.tolist()} if raw else None,
        }
        layer_record.update({name: part for name, part in parts.items() if part is not None})  # type: ignore[typeddict-item]
        return layer_record
