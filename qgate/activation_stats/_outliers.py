"""Outliers of a layer: tokens, channels and single elements of large magnitudes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qgate.activation_stats._tensor_pass import TensorReading
from qgate.activation_stats.record import Channel, Outliers, Token
from qgate.errors import QgateError
from qgate.stats.summary import Floats, Ints

Decode = Callable[[Sequence[int]], list[str]]
_FEW = 32  # the largest 1 in so many channels are no part of what they are held against
_TEXTS = 100


@dataclass(frozen=True)
class OutlierRule:
    """The rule of what counts as an outlier.

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
        for rule_field in fields(self):
            value = getattr(self, rule_field.name)
            if not (math.isfinite(value) and value >= 0):
                name = f"outlier.{rule_field.name}"
                raise QgateError(f"{name} {value!r} is not allowed; it is at least 0.")
        if self.top < 1:
            raise QgateError(f"outlier.top_n {self.top!r} is not allowed; it is at least 1.")


@dataclass
class OutlierElement:
    """A token or an element; `ident` is the id of its token, -1 where there is none."""

    sample: int
    position: int
    value: float
    channel: int
    ident: int = -1
    ratio: float = math.nan

    @property
    def severity(self) -> tuple[float, float, int, int, int]:
        ratio = -1.0 if math.isnan(self.ratio) else self.ratio
        return -ratio, -abs(self.value), self.sample, self.position, self.channel

    def token(self, texts: dict[int, str]) -> Token:
        token = Token(sample=self.sample, position=self.position, value=self.value)
        if self.channel >= 0:
            token["channel"] = self.channel
        if math.isfinite(self.ratio):
            token["ratio"] = self.ratio
        if self.ident in texts:
            token["text"] = texts[self.ident]
        return token


@dataclass
class TokenCall:
    """Magnitudes of a call's tokens; `signed` has the values and channels of the largest."""

    tokens: Floats
    idents: Ints | None
    signed: dict[int, tuple[float, int]] = field(default_factory=dict)

    def outlier(
        self, sample: int, row: int, value: float, channel: int, unit: float
    ) -> OutlierElement:
        ident = -1 if self.idents is None else int(self.idents[row])
        ratio = abs(value) / unit if unit else math.nan
        return OutlierElement(sample, row, value, channel, ident, ratio)


class OutlierStats:
    """Outliers of any number of samples: the worst of each kind, counts by position and token."""

    def __init__(self, rule: OutlierRule) -> None:
        self.rule = rule
        self.counts: dict[int, int] = {}
        self.undefined: set[int] = set()
        self.ratio = math.nan
        self.positions: Counter[int] = Counter()
        self.idents: Counter[int] = Counter()
        self.worst: list[OutlierElement] = []
        self.massive: list[OutlierElement] = []
        self.tokens_out: Ints = np.zeros(0, dtype=np.int64)
        self.samples_out: Ints = np.zeros(0, dtype=np.int64)
        self._calls: list[TokenCall] = []
        self._out = np.zeros(0, dtype=bool)

    def add(self, reading: TensorReading, sample: int, call: TokenCall) -> None:
        """Take one call; `finish` follows after the last call of the sample."""
        self._calls.append(call)
        if not reading.amax:
            return
        # The channels of the largest tokens, where the rule could find them with this call alone; a
        # module that is called again can make outliers of them later.
        if reading.amax > self.rule.threshold * reading.token_figures[2][0]:
            rows = _largest(call.tokens, self.rule.top)
            part = reading.table.index_select(0, torch.from_numpy(rows))
            part = part if reading.finite else part.where(part.isfinite(), 0.0)
            channels = part.abs().argmax(-1)
            values = part.gather(1, channels[:, None]).view(-1).tolist()
            call.signed = dict(
                zip(rows.tolist(), zip(values, channels.tolist(), strict=True), strict=True)
            )
        self._add_channels(reading)
        if reading.amax > self.rule.massive_above:
            self._add_massive(reading, sample, call)

    def _add_channels(self, reading: TensorReading) -> None:
        width = len(reading.channels)
        few = max(width // _FEW, 1)
        ordered = np.sort(reading.channels)
        middle = ordered[(width - 1) // 2] + ordered[width // 2]  # twice `np.median`, in less time
        least = self.rule.channel_ratio * float(middle / 2)
        if width <= few or not reading.amax > least:
            return
        chosen = np.flatnonzero(reading.channels > least)
        order = np.argpartition(reading.channels, width - few - 1)[: width - few]
        rms = math.sqrt(
            float(reading.channel_squares()[order].sum()) / (len(reading.table) * len(order))
        )
        part = reading.table.index_select(1, torch.from_numpy(chosen))
        hits = (part.abs() > self.rule.times * rms) & part.isfinite()
        self.tokens_out, self.samples_out, self._out = (
            widen(flags, width) for flags in (self.tokens_out, self.samples_out, self._out)
        )
        self.tokens_out[chosen] += hits.sum(0).numpy()
        self._out[chosen] = True

    def _add_massive(self, reading: TensorReading, sample: int, call: TokenCall) -> None:
        median = reading.size_quantile(0.5)
        beyond = max(self.rule.massive_above, self.rule.massive_times * median)
        rows = np.flatnonzero(reading.tokens > beyond)
        if not len(rows):
            return
        rows = rows[_largest(reading.tokens[rows], self.rule.top)]
        part = reading.table.index_select(0, torch.from_numpy(rows)).double()
        part = part.where(part.isfinite(), 0.0)
        top = part.abs().view(-1).topk(min(self.rule.top, part.numel()))
        for size, flat in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            if size > beyond:
                row, channel = divmod(flat, part.shape[1])
                value = float(part[row, channel])
                self.massive.append(call.outlier(sample, int(rows[row]), value, channel, median))
        self.massive = self._top(self.massive)

    def _top(self, outliers: Iterable[OutlierElement]) -> list[OutlierElement]:
        return sorted(outliers, key=lambda outlier: outlier.severity)[: self.rule.top]

    def finish(self, sample: int) -> None:
        """Compare the tokens of a sample with their median, after its last call."""
        if not self._calls:
            return
        tokens = np.concatenate([call.tokens for call in self._calls])
        median, largest = lower_median(tokens), float(tokens.max(initial=0.0))
        self.counts.setdefault(sample, 0)
        if median == 0:
            self.undefined.add(sample)
        else:
            self.ratio = float(np.fmax(self.ratio, largest / median))
            if largest > max(self.rule.threshold * median, self.rule.floor):
                self._add_tokens(tokens, sample, median)
        self.samples_out[: len(self._out)] += self._out
        self._out, self._calls = np.zeros(0, dtype=bool), []

    def _add_tokens(self, tokens: Floats, sample: int, median: float) -> None:
        """Count outlier tokens, and keep the worst of them."""
        rule = self.rule
        beyond = (tokens > rule.threshold * median) & (tokens > rule.floor)
        self.counts[sample] += int(beyond.sum())
        positions = np.concatenate([np.arange(len(call.tokens)) for call in self._calls])
        self.positions.update(positions[beyond].tolist())
        idents = [call.idents for call in self._calls if call.idents is not None]
        if len(idents) == len(self._calls):
            self.idents.update(np.concatenate(idents)[beyond].tolist())
        for call in self._calls:
            for row in _largest(call.tokens, rule.top).tolist():
                value, channel = call.signed.get(row, (float(call.tokens[row]), -1))
                outlier = call.outlier(sample, row, value, channel, median)
                if outlier.ratio > rule.threshold and abs(value) > rule.floor:
                    self.worst.append(outlier)
        self.worst = self._top(self.worst)

    def merge(self, other: OutlierStats) -> None:
        for sample, count in other.counts.items():
            self.counts[sample] = self.counts.get(sample, 0) + count
        self.undefined |= other.undefined
        self.ratio = float(np.fmax(self.ratio, other.ratio))
        self.positions.update(other.positions)
        self.idents.update(other.idents)
        self.worst = self._top([*self.worst, *other.worst])
        self.massive = self._top([*self.massive, *other.massive])
        width = max(len(self.tokens_out), len(other.tokens_out))
        self.tokens_out = widen(self.tokens_out, width) + widen(other.tokens_out, width)
        self.samples_out = widen(self.samples_out, width) + widen(other.samples_out, width)

    def record(self, amax: Floats, tokens: int, rms: float, decode: Decode | None) -> Outliers:
        counts = [self.counts[sample] for sample in sorted(self.counts)]
        named = {outlier.ident for outlier in [*self.worst, *self.massive]} | set(self.idents)
        idents = sorted(named - {-1})
        texts: dict[int, str] = {}
        if decode is not None and idents:
            texts = dict(zip(idents, decode(idents), strict=True))
        outliers = Outliers(
            threshold=self.rule.threshold,
            counts=counts,
            mean_count=sum(counts) / max(len(counts), 1),
            undefined=len(self.undefined),
            positions={str(p): n for p, n in sorted(self.positions.items())},
            tokens=[outlier.token(texts) for outlier in self.worst],
            channels=self._channels(amax, tokens),
            massive=[outlier.token(texts) for outlier in self.massive],
        )
        if decode is not None:
            by_text: Counter[str] = Counter()
            for ident, count in self.idents.items():
                by_text[texts[ident]] += count
            order = sorted(by_text.items(), key=lambda pair: (-pair[1], pair[0]))
            outliers["texts"] = dict(order[:_TEXTS])
        largest, median = float(amax.max(initial=0.0)), float(np.median(amax)) if len(amax) else 0.0
        if rms > 0:
            outliers["max_over_rms"] = largest / rms
        if median > 0:
            outliers["channel_ratio"] = largest / median
        if math.isfinite(self.ratio):
            outliers["token_ratio"] = self.ratio
        return outliers

    def _channels(self, amax: Floats, tokens: int) -> list[Channel]:
        """List systematic channels first: smoothing or a rotation can remove them."""
        median = float(np.median(amax)) if len(amax) else 0.0
        samples = max(len(self.counts), 1)
        channels = []
        for c in np.argsort(-amax, kind="stable").tolist():
            if c < len(self.samples_out) and self.samples_out[c]:
                in_tokens = float(self.tokens_out[c] / max(tokens, 1))
                in_samples = float(self.samples_out[c] / samples)
                rule = self.rule
                size = float(amax[c])
                channels.append(
                    Channel(
                        channel=c,
                        amax=size,
                        ratio=size / median if median else 0.0,
                        tokens=in_tokens,
                        samples=in_samples,
                        systematic=in_tokens >= rule.token_share and in_samples >= rule.persistence,
                    )
                )
        order = sorted(channels, key=lambda channel: (not channel["systematic"], -channel["amax"]))
        return order[: self.rule.top]


def _largest(values: Floats, most: int) -> Ints:
    """Return the indices of the largest."""
    few = min(most, len(values))
    return np.argpartition(values, len(values) - few)[len(values) - few :] if few else np.arange(0)


def lower_median(values: Floats) -> float:
    """Return the lower median; 0 without values."""
    n = len(values)
    return float(np.partition(values, (n - 1) // 2)[(n - 1) // 2]) if n else 0.0


def widen(array: npt.NDArray[Any], width: int, fill: float = 0) -> npt.NDArray[Any]:
    """Return an array of at least this width."""
    more = max(width - len(array), 0)
    return np.concatenate([array, np.full(more, fill, dtype=array.dtype)]) if more else array
