"""Where magnitudes of a layer stand out: in tokens, in channels, in single elements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qgate.activation_stats._tensor_pass import TensorReading
from qgate.activation_stats.record import Channel, Outliers, Token
from qgate.errors import QgateError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Decode = Callable[[Sequence[int]], list[str]]
_FEW = 32  # the largest 1 in so many channels are no part of what they are held against
_TEXTS = 100


@dataclass(frozen=True)
class OutlierRule:
    """What counts as an outlier.

    threshold   a token is one if its largest magnitude is more than this many times the lower
                median of those of its sample, and above `floor`
    top         how many tokens, channels and elements are named
    channel_ratio   a channel is one in a sample if its largest magnitude is more than this many
                times the median channel's
    times       it stands out in those tokens where it is more than this many times the root mean
                square of the tensor without its largest 1 in 32 channels
    persistence, token_share   it is systematic if it is one in this share of samples, and stands
                out in this share of tokens (LLM.int8() has 6 times and 6 % of the tokens)
    massive_above, massive_times   an element is massive if its magnitude is more than the first,
                and more than the second times the median magnitude of its tensor
    """

    threshold: float = 64.0
    floor: float = 0.0
    top: int = 10
    channel_ratio: float = 10.0
    times: float = 6.0
    persistence: float = 0.25
    token_share: float = 0.06
    massive_above: float = 100.0
    massive_times: float = 1000.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0):
                raise QgateError(f"outlier.{each.name} {value!r} is not allowed; it is at least 0.")
        if self.top < 1:
            raise QgateError(f"outlier.top_n {self.top!r} is not allowed; it is at least 1.")


@dataclass
class OutlierPlace:
    """A token or an element; `ident` is the id of its token, -1 where there is none."""

    sample: int
    position: int
    value: float
    channel: int
    ident: int = -1
    ratio: float = math.nan

    @property
    def badness(self) -> tuple[float, float, int, int, int]:
        ratio = -1.0 if math.isnan(self.ratio) else self.ratio
        return -ratio, -abs(self.value), self.sample, self.position, self.channel

    def token(self, texts: dict[int, str]) -> Token:
        found = Token(sample=self.sample, position=self.position, value=self.value)
        if self.channel >= 0:
            found["channel"] = self.channel
        if math.isfinite(self.ratio):
            found["ratio"] = self.ratio
        if self.ident in texts:
            found["text"] = texts[self.ident]
        return found


@dataclass
class _Call:
    """Magnitudes of a call's tokens, and values with channels of the largest that were looked
    for."""

    tokens: Floats
    positions: Ints
    idents: Ints | None
    signed: dict[int, tuple[float, int]] = field(default_factory=dict)

    def largest(self, most: int) -> Ints:
        few = min(most, len(self.tokens))
        if not few:
            return np.zeros(0, dtype=np.int64)
        return np.argpartition(self.tokens, len(self.tokens) - few)[len(self.tokens) - few :]


class OutlierStats:
    """Bounded: the worst of each kind, counts by position and by token, three numbers a channel."""

    def __init__(self, rule: OutlierRule) -> None:
        self.rule = rule
        self.counts: dict[int, int] = {}
        self.undefined: set[int] = set()
        self.ratio = math.nan
        self.positions: Counter[int] = Counter()
        self.idents: Counter[int] = Counter()
        self.worst: list[OutlierPlace] = []
        self.massive: list[OutlierPlace] = []
        self.tokens_out: Ints = np.zeros(0, dtype=np.int64)
        self.samples_out: Ints = np.zeros(0, dtype=np.int64)
        self._calls: list[_Call] = []
        self._median = self._largest = 0.0
        self._out = np.zeros(0, dtype=bool)

    def add(
        self, reading: TensorReading, sample: int, positions: Ints, idents: Ints | None
    ) -> None:
        """One call; `finish` follows when the sample is through."""
        call = _Call(reading.tokens, positions, idents)
        self._calls.append(call)
        self._median = reading.token_figures[1]
        self._largest = max(self._largest, reading.amax)
        if not len(reading.tokens) or reading.amax == 0:
            return
        if reading.amax > self.rule.threshold * reading.token_figures[2][0]:
            call.signed = self._signed(reading, call)
        self._add_channels(reading)
        if reading.amax > self.rule.massive_above:
            self._add_massive(reading, sample, positions, idents)

    def _signed(self, reading: TensorReading, call: _Call) -> dict[int, tuple[float, int]]:
        """The channels of the largest tokens, where the rule could find them with this call alone;
        a module that is called again can make outliers of them later."""
        rows = call.largest(self.rule.top)
        part = reading.table.index_select(0, torch.from_numpy(rows))
        part = part if reading.finite else part.where(part.isfinite(), 0.0)
        channels = part.abs().argmax(-1)
        values = part.gather(1, channels[:, None]).view(-1).tolist()
        return dict(zip(rows.tolist(), zip(values, channels.tolist(), strict=True), strict=True))

    def _add_channels(self, reading: TensorReading) -> None:
        width = len(reading.channels)
        if len(self._out) < width:
            self.tokens_out = _wider(self.tokens_out, width)
            self.samples_out = _wider(self.samples_out, width)
            self._out = _wider(self._out, width)
        few = max(width // _FEW, 1)
        least = self.rule.channel_ratio * reading.channel_median
        if width <= few or not reading.amax > least:
            return
        chosen = np.flatnonzero(reading.channels > least)
        order = np.argpartition(reading.channels, width - few - 1)[: width - few]
        rms = math.sqrt(
            float(reading.channel_squares()[order].sum()) / (len(reading.table) * len(order))
        )
        part = reading.table.index_select(1, torch.from_numpy(chosen))
        hits = (part.abs() > self.rule.times * rms) & part.isfinite()
        self.tokens_out[chosen] += hits.sum(0).numpy()
        self._out[chosen] = True

    def _add_massive(
        self, reading: TensorReading, sample: int, positions: Ints, idents: Ints | None
    ) -> None:
        median = reading.size_quantile(0.5)
        beyond = max(self.rule.massive_above, self.rule.massive_times * median)
        rows = np.flatnonzero(reading.tokens > beyond)
        if not len(rows):
            return
        few = min(self.rule.top, len(rows))
        rows = rows[np.argpartition(-reading.tokens[rows], few - 1)[:few]]
        part = reading.table.index_select(0, torch.from_numpy(rows)).double()
        part = part.where(part.isfinite(), 0.0)
        top = part.abs().view(-1).topk(min(self.rule.top, part.numel()))
        for size, flat in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            if size <= beyond:
                break
            row, channel = divmod(flat, part.shape[1])
            ident = -1 if idents is None else int(idents[rows[row]])
            place = OutlierPlace(
                sample, int(positions[rows[row]]), float(part[row, channel]), channel
            )
            place.ident, place.ratio = ident, size / median if median else math.nan
            self.massive.append(place)
        self.massive = sorted(self.massive, key=lambda p: p.badness)[: self.rule.top]

    def finish(self, sample: int) -> None:
        """The sample is through: tokens are held against their median."""
        if not self._calls:
            return
        one = len(self._calls) == 1
        tokens = self._calls[0].tokens if one else np.concatenate([c.tokens for c in self._calls])
        median = self._median if one else lower_median(tokens)
        self.counts.setdefault(sample, 0)
        if median == 0 or not len(tokens):
            self.undefined.add(sample)
        else:
            self.ratio = float(np.fmax(self.ratio, self._largest / median))
            if self._largest > max(self.rule.threshold * median, self.rule.floor):
                self._name(tokens, sample, median)
        if self._out.any():
            self.samples_out += self._out
            self._out = np.zeros_like(self._out)
        self._calls, self._largest = [], 0.0

    def _name(self, tokens: Floats, sample: int, median: float) -> None:
        """The outliers that are there, and the worst of them by their places."""
        beyond = (tokens > self.rule.threshold * median) & (tokens > self.rule.floor)
        self.counts[sample] += int(beyond.sum())
        positions = np.concatenate([call.positions for call in self._calls])
        self.positions.update(positions[beyond].tolist())
        idents = [call.idents for call in self._calls if call.idents is not None]
        if len(idents) == len(self._calls):
            self.idents.update(np.concatenate(idents)[beyond].tolist())
        for call in self._calls:
            for row in call.largest(self.rule.top).tolist():
                value, channel = call.signed.get(row, (float(call.tokens[row]), -1))
                ratio = abs(value) / median
                if ratio > self.rule.threshold and abs(value) > self.rule.floor:
                    ident = -1 if call.idents is None else int(call.idents[row])
                    position = int(call.positions[row])
                    self.worst.append(OutlierPlace(sample, position, value, channel, ident, ratio))
        self.worst = sorted(self.worst, key=lambda p: p.badness)[: self.rule.top]

    def merge(self, other: OutlierStats) -> None:
        for sample, count in other.counts.items():
            self.counts[sample] = self.counts.get(sample, 0) + count
        self.undefined |= other.undefined
        self.ratio = float(np.fmax(self.ratio, other.ratio))
        self.positions.update(other.positions)
        self.idents.update(other.idents)
        top = self.rule.top
        self.worst = sorted([*self.worst, *other.worst], key=lambda p: p.badness)[:top]
        self.massive = sorted([*self.massive, *other.massive], key=lambda p: p.badness)[:top]
        width = max(len(self.tokens_out), len(other.tokens_out))
        self.tokens_out = _wider(self.tokens_out, width) + _wider(other.tokens_out, width)
        self.samples_out = _wider(self.samples_out, width) + _wider(other.samples_out, width)
        self._out = _wider(self._out, width)

    def record(self, amax: Floats, tokens: int, rms: float, decode: Decode | None) -> Outliers:
        counts = [self.counts[sample] for sample in sorted(self.counts)]
        texts = self._texts(decode)
        found = Outliers(
            threshold=self.rule.threshold,
            counts=counts,
            mean_count=sum(counts) / max(len(counts), 1),
            undefined=len(self.undefined),
            positions={str(p): n for p, n in sorted(self.positions.items())},
            tokens=[place.token(texts) for place in self.worst],
            channels=self._channels(amax, tokens),
            massive=[place.token(texts) for place in self.massive],
        )
        if decode is not None:
            said: Counter[str] = Counter()
            for ident, count in self.idents.items():
                said[texts[ident]] += count
            order = sorted(said.items(), key=lambda pair: (-pair[1], pair[0]))
            found["texts"] = dict(order[:_TEXTS])
        largest, median = float(amax.max(initial=0.0)), float(np.median(amax)) if len(amax) else 0.0
        if rms > 0:
            found["max_over_rms"] = largest / rms
        if median > 0:
            found["channel_ratio"] = largest / median
        if math.isfinite(self.ratio):
            found["token_ratio"] = self.ratio
        return found

    def _texts(self, decode: Decode | None) -> dict[int, str]:
        named = {p.ident for p in [*self.worst, *self.massive]} | set(self.idents)
        idents = sorted(named - {-1})
        if decode is None or not idents:
            return {}
        return dict(zip(idents, decode(idents), strict=True))

    def _channels(self, amax: Floats, tokens: int) -> list[Channel]:
        median = float(np.median(amax)) if len(amax) else 0.0
        samples = max(len(self.counts), 1)
        order = np.argsort(-amax, kind="stable")
        there = [c for c in order.tolist() if c < len(self.samples_out) and self.samples_out[c]]
        # Those that stand out throughout are told first: they are what can be removed.
        shares = {
            c: (self.tokens_out[c] / max(tokens, 1), self.samples_out[c] / samples) for c in there
        }
        least = (self.rule.token_share, self.rule.persistence)
        known = {c: shares[c][0] >= least[0] and shares[c][1] >= least[1] for c in there}
        there = sorted(there, key=lambda c: (not known[c], -amax[c]))[: self.rule.top]
        return [
            Channel(
                channel=c,
                amax=float(amax[c]),
                ratio=float(amax[c] / median) if median else 0.0,
                tokens=float(shares[c][0]),
                samples=float(shares[c][1]),
                systematic=bool(known[c]),
            )
            for c in there
        ]


def lower_median(values: Floats) -> float:
    """The middle one, of two the lower; 0 of none."""
    n = len(values)
    return float(np.partition(values, (n - 1) // 2)[(n - 1) // 2]) if n else 0.0


def _wider(array: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    if len(array) >= width:
        return array
    return np.concatenate([array, np.zeros(width - len(array), dtype=array.dtype)])
