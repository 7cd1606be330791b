"""Statistics of what flows through one module in one role: streaming, mergeable, bounded.

Nothing grows with the number of samples but one number per sample. Counts are integers and sums
exact, so any order and any parts of the samples give the same statistics, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.activation_stats._counts import PatternCounts, RowShare
from qgate.activation_stats._format_losses import format_losses, table_name
from qgate.activation_stats._maps import heat_map
from qgate.activation_stats._outliers import Decode, OutlierRule, OutlierStats
from qgate.activation_stats._powers import PowerSums
from qgate.activation_stats._ranges import PERCENTILES, ChannelCounts
from qgate.activation_stats._tensor_pass import ENDS, ROUNDING, TensorReading, infinity, size_value
from qgate.activation_stats._vectors import CallVectors, Vector, largest_of
from qgate.activation_stats.record import (
    ChannelRanges,
    HeatMap,
    LayerActivations,
    Magnitude,
    Massive,
    Outliers,
)
from qgate.errors import QgateError
from qgate.stats import massive_beyond, serial
from qgate.summaries.channels import channels_of
from qgate.summaries.figures import moments_of
from qgate.summaries.pool import Pool, of_counts
from qgate.summaries.record import Histogram, Portrait

__all__ = ["Ask", "LayerStats", "OutlierRule", "TensorReading"]

Reduced = Literal["token", "channel", "all"]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ask:
    """What is wanted of a module in a role; what is not asked for costs nothing.

    reduced      magnitudes: of tokens, of channels, of all values
    outliers     the rule, if outliers are wanted
    percentiles  of each channel, by `absolute` without their signs; none if empty
    heat_map     the sample that is drawn
    formats      what they do to the values; scales are those of a seeded share of rows
    share        elements of that share, and `rows` that are kept for the smoothing advice
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
        """Rows that are kept."""
        own = max(self.share // max(width, 1), 8) if self.formats else 0
        return max(own, self.rows)


class LayerStats:
    """What flowed through one module in one role.

    `update` takes one call of one sample, `merge` the statistics of other samples. Of tensors wider
    than 16 bits quantiles, the histogram and the median over all values are of bfloat16 numbers;
    all else is of the values.
    """

    def __init__(self, module: str, role: str, ask: Ask | None = None) -> None:
        self.module, self.role, self.ask = module, role, ask or Ask()
        self.calls = self.tokens = self.elements = 0
        self.samples: set[int] = set()
        self.counted_as: str | None = None
        self.wide = False
        self.kinds = [0, 0, 0]
        self.vanished = 0
        self._powers = PowerSums()
        self.least = math.nan
        self.counts = PatternCounts()
        self.lows, self.highs = np.full(0, math.inf), np.full(0, -math.inf)
        self.vectors: dict[str, Vector] = defaultdict(Vector)
        self.outliers = OutlierStats(self.ask.outliers) if self.ask.outliers else None
        self.ranges = ChannelCounts() if self.ask.percentiles else None
        self.map: HeatMap | None = None
        self.share: RowShare | None = None
        self._sample: int | None = None
        self._calls = 0
        self._readings: list[CallVectors] = []
        self.trace = 0
        """The same for layers that were given the same tensors."""
        self._all: tuple[list[float], list[float]] = ([], [])
        self._sizes: Ints | None = None

    def update(
        self,
        tensor: Tensor | TensorReading,
        sample: int = 0,
        positions: Sequence[int] | Ints | None = None,
        tokens: Sequence[int] | Ints | None = None,
    ) -> None:
        """One call. `positions` and ids of `tokens` are one per row of tokens by channels; without
        positions they are counted from 0 in each call."""
        reading = tensor
        if not isinstance(reading, TensorReading):
            reading = TensorReading.of(reading, self.counted_as)
        if self.counted_as is not None and reading.counted_as != self.counted_as:
            reading = TensorReading.of(reading.table, self.counted_as)
        self.counted_as = reading.counted_as
        if self._sample != sample:
            self.finish()
        n = len(reading.table)
        places = np.arange(n) if positions is None else np.asarray(positions, dtype=np.int64)
        idents = None if tokens is None else np.asarray(tokens, dtype=np.int64)
        if len(places) != n or (idents is not None and len(idents) != n):
            raise QgateError(f"{self.module}: {n} tokens flow, but positions or ids are not {n}.")
        self._sample = sample
        self.samples.add(sample)
        with serial():
            self._add(reading, sample, places, idents)
        self._calls += 1

    def _add(self, reading: TensorReading, sample: int, places: Ints, idents: Ints | None) -> None:
        self._add_values(reading)
        width = reading.table.shape[1]
        # Of several widths the widest, whichever comes first.
        if self.ask.room(width) and (self.share is None or width > self.share.width):
            self.share = RowShare(self.ask.room(width), self.ask.seed)
        if self.share is not None:
            self.share.add(reading.table, sample, self._calls)
        if self.outliers is not None:
            self.outliers.add(reading, sample, places, idents)
        if self.ranges is not None:
            self.ranges.add(reading)
        if self.ask.heat_map == sample and self.map is None:
            self.map = heat_map(reading, sample)

    def _add_values(self, reading: TensorReading) -> None:
        n, width = reading.table.shape
        self.calls += 1
        self.tokens += n
        self.elements += n * width
        if reading.wide and not self.wide:
            self._widen()
        if self.wide:
            self._powers.merge(reading.powers)
        for k, kind in enumerate((reading.nan, reading.posinf, reading.neginf)):
            self.kinds[k] += kind
        self.vanished += reading.vanished
        self.counts.add(*reading.pages)
        # Of a wide tensor that is a pass over all values, made where the counts ask for it.
        if reading.vanished or not reading.least_size > self.least * (1 + 2.0**-7):
            self.least = float(np.fmin(self.least, reading.least))
        self.highs = largest_of(self.highs, reading.highs, -math.inf)
        self.lows = largest_of(self.lows, reading.lows, math.inf, np.fmin)
        self._readings.append(CallVectors.of(reading))
        self.trace = hash((self.trace, reading.serial))
        if "all" in self.ask.reduced:
            top, low = reading.ends_of_all(ENDS)
            self._all[0].extend(top)
            self._all[1].extend(low)
            sizes = reading.sizes()
            self._sizes = sizes if self._sizes is None else self._sizes + sizes

    def _widen(self) -> None:
        """From here on moments are of the values themselves: what was counted is exact so far."""
        self._powers, self.wide = PowerSums.of_counts(*self._counted().weighted), True

    def finish(self) -> None:
        """The sample is through; what is of whole samples is taken now."""
        if self._sample is None:
            return
        if self.outliers is not None:
            self.outliers.finish(self._sample)
        reduced = self.ask.reduced
        parts = self._readings
        whole = parts[0] if len(parts) == 1 else CallVectors.together(parts)
        if "token" in reduced:
            self.vectors["token"].add(*whole.token_figures)
        if "channel" in reduced:
            self.vectors["channel"].add(*whole.channel_figures)
        if self._sizes is not None and self.counted_as is not None and self._all[0]:
            ends = np.cumsum(self._sizes[: infinity(self.counted_as)])
            at = int(np.searchsorted(ends, (int(ends[-1]) - 1) // 2, side="right"))
            top = sorted(self._all[0], reverse=True)[:ENDS]
            low = sorted(self._all[1])[:ENDS]
            self.vectors["all"].add(top, size_value(at, self.counted_as), low)
        self._sample, self._calls, self._readings = None, 0, []
        self._all, self._sizes = ([], []), None

    def merge(self, other: LayerStats) -> None:
        """Statistics of other samples of the same module in the same role."""
        self.finish()
        other.finish()
        if (self.module, self.role, self.ask) != (other.module, other.role, other.ask):
            raise QgateError(
                f"statistics of {self.module} ({self.role}) and of {other.module} ({other.role}) "
                "do not add up: they are of other layers, or other things were asked of them."
            )
        if other.counted_as is None:
            return
        if self.counted_as not in (None, other.counted_as):
            raise QgateError(
                f"{self.module} was counted as {self.counted_as} and as {other.counted_as}: the "
                "two do not add up."
            )
        self.counted_as = other.counted_as
        self.trace = hash((self.trace, other.trace))
        self.calls += other.calls
        self.tokens += other.tokens
        self.elements += other.elements
        self.samples |= other.samples
        if other.wide and not self.wide:
            self._widen()
        if self.wide:
            self._powers.merge(
                other._powers if other.wide else PowerSums.of_counts(*other._counted().weighted)
            )
        self.kinds = [a + b for a, b in zip(self.kinds, other.kinds, strict=True)]
        self.vanished += other.vanished
        self.counts.merge(other.counts)
        self.least = float(np.fmin(self.least, other.least))
        self.highs = largest_of(self.highs, other.highs, -math.inf)
        self.lows = largest_of(self.lows, other.lows, math.inf, np.fmin)
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
        """Both stay as they are."""
        total = copy.deepcopy(self)
        total.merge(other)
        return total

    def moments(self) -> dict[str, float]:
        """Mean, std, rms, skew and kurtosis of the values themselves."""
        return self._powers.moments() if self.wide else moments_of(*self._counted().weighted)

    @property
    def amax(self) -> Floats:
        """The largest magnitude of each channel."""
        sizes: Floats = np.fmax(self.highs, -self.lows)
        return np.where(np.isfinite(sizes), sizes, 0.0)

    @property
    def nonfinite(self) -> int:
        return sum(self.kinds)

    def rows(self, most: int) -> Tensor | None:
        """A seeded share of the rows that flowed, those that are finite."""
        rows = None if self.share is None else self.share.rows()
        if rows is None:
            return None
        return rows[: max(most, 1)][rows[: max(most, 1)].isfinite().all(1)]

    def pool(self) -> Pool:
        self.finish()
        pool = self._counted()
        there = np.isfinite(self.lows)
        nan, posinf, neginf = self.kinds
        made = replace(
            pool,
            tensors=max(self.calls, 1),
            elements=self.elements,
            nan=nan,
            posinf=posinf,
            neginf=neginf,
            low=float(self.lows[there].min()) if there.any() else math.nan,
            high=float(self.highs[there].max()) if there.any() else math.nan,
            least=self.least,
            vanished=self.vanished,
        )
        rows = None if self.share is None else self.share.rows()
        if rows is not None:
            width = rows.shape[1]
            rows = rows[: min(self.ask.room(width), max(self.ask.share // width, 8))]
        beyond = self.beyond()
        fates = {
            table_name(name): format_losses(name, made, rows, beyond, wide=self.wide)
            for name in self.ask.formats
        }
        return replace(made, fates=fates)

    def _counted(self) -> Pool:
        return of_counts(self.counted_as or "bfloat16", self.counts.dense())

    def beyond(self) -> float:
        """The magnitude above which counted values are massive; inf if none, or no format asks."""
        return massive_beyond(self._counted().value_counts()) if self.ask.formats else math.inf

    def massive(self) -> Massive | None:
        if (beyond := self.beyond()) == math.inf:
            return None
        values, weights = self._counted().weighted
        return Massive(beyond=beyond, elements=int(weights[np.abs(values) > beyond].sum()))

    def portrait(self) -> Portrait:
        found = self.pool().portrait()
        if self.wide:
            constant = found.get("min") == found.get("max")
            moments = {"std": 0.0, "skew": math.nan, "kurtosis": math.nan} if constant else {}
            for name, value in (self.moments() | moments).items():
                found.pop(name, None)  # type: ignore[misc]
                if math.isfinite(value):
                    found[name] = value  # type: ignore[literal-required]
        if len(self.amax) > 1:
            found["channels"] = channels_of(torch.from_numpy(self.amax)[None])
        return found

    def histogram(self) -> Histogram | None:
        """Of finite values as they were counted."""
        self.finish()
        values, weights = self._counted().weighted
        if not len(values) or not self.ask.bins:
            return None
        low, high = float(values[0]), float(values[-1])
        high = high if high > low else low + max(abs(low), 1.0) * 2.0**-20
        counts = np.histogram(values, self.ask.bins, (low, high), weights=weights)[0]
        return Histogram(low=low, high=high, counts=counts.astype(np.int64).tolist())

    def magnitudes(self) -> dict[str, Magnitude]:
        self.finish()
        made = ((name, self.vectors[name].magnitude()) for name in self.ask.reduced)
        return {name: value for name, value in made if value is not None}

    def outlier_record(self, decode: Decode | None = None) -> Outliers | None:
        self.finish()
        if self.outliers is None or not self.calls:
            return None
        return self.outliers.record(self.amax, self.tokens, self.moments().get("rms", 0.0), decode)

    def channel_ranges(self) -> ChannelRanges | None:
        if self.ranges is None or not len(self.highs):
            return None
        percentiles = self.ask.percentiles or PERCENTILES
        return self.ranges.ranges(self.lows, self.highs, percentiles, absolute=self.ask.absolute)

    def record(
        self,
        layer: int | None,
        kind: str,
        of: int,
        decode: Decode | None = None,
        raw: bool = False,
        portrait: Portrait | None = None,
    ) -> LayerActivations:
        """All of it as plain data; `of` samples there were in all. `portrait` is one of statistics
        with the same `trace`."""
        found = LayerActivations(
            module=self.module,
            role=self.role,
            layer=layer,
            kind=kind,
            width=len(self.amax),
            samples=len(self.samples),
            calls=self.calls,
            tokens=self.tokens,
            coverage=len(self.samples) / max(of, 1),
            portrait=self.portrait() if portrait is None else portrait,
            magnitude=self.magnitudes(),
        )
        parts: dict[str, Any] = {
            "massive": self.massive(),
            "rounding": ROUNDING[self.counted_as] if self.wide and self.counted_as else None,
            "histogram": self.histogram(),
            "outliers": self.outlier_record(decode),
            "ranges": self.channel_ranges(),
            "heat_map": self.map,
            "raw": {"channel_amax": self.amax.tolist()} if raw else None,
        }
        found.update({name: part for name, part in parts.items() if part is not None})  # type: ignore[typeddict-item]
        return found
