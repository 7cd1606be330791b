"""Reasons why two engines are too far apart: each limit that was given and is exceeded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qgate.engines.record import EnginesRecord, LimitedFigure, WeightComparison
from qgate.settings import setting
from qgate.text.wording import brief, percent


@dataclass(frozen=True)
class EngineLimits:
    """Limits of a comparison; None for none. KL is of logits where both have them, else k3."""

    same_weights: bool = setting(False, "fail if weights differ by more than rounding")
    max_kl: float | None = setting(None, "fail above this mean KL per token", "NATS", low=0)
    max_logprob: float | None = setting(
        None, "fail if a log-probability differs by more", "D", low=0
    )
    max_flips: float | None = setting(
        None,
        "fail if a larger share of most likely tokens differs (0 to 1)",
        "SHARE",
        low=0,
    )


def hold_limits(record: EnginesRecord, limits: EngineLimits) -> list[LimitedFigure]:
    """Compare the figures with their limits, and say in words which are exceeded."""
    return list(_limited_figures(record, limits))


def _limited_figures(record: EnginesRecord, limits: EngineLimits) -> Iterator[LimitedFigure]:
    figures = record.figures
    if figures.not_finite:
        reason = f"{figures.not_finite:,} log-probabilities are not finite in one of the engines"
        yield LimitedFigure("values that are not finite", figures.not_finite, 0, reason)
    kl = figures.kl or figures.k3
    name = "KL" if figures.kl is not None else "k3"
    yield _limited(
        f"mean {name} in nats per token",
        kl.mean,
        limits.max_kl,
        f"mean {name} {brief(kl.mean)} nats per token is above the limit {limits.max_kl or 0:g}",
    )
    largest, most = figures.magnitude.largest, limits.max_logprob
    yield _limited(
        "largest difference of a log-probability",
        largest,
        most,
        f"a log-probability differs by {brief(largest)}, above the limit {most or 0:g}",
    )
    flips = "share of positions with another most likely token"
    if figures.flips is not None:
        share, limit = percent(figures.flips.mean), percent(limits.max_flips or 0)
        reason = f"{share} of positions have another most likely token, above the limit {limit}"
        yield _limited(flips, figures.flips.mean, limits.max_flips, reason)
    elif limits.max_flips is not None:
        reason = "flips have a limit, and the most likely tokens are not told by both engines"
        yield LimitedFigure(flips, None, limits.max_flips, reason)
    if limits.same_weights:
        yield _same_weights(record.weights)


def _limited(figure: str, value: float, limit: float | None, reason: str) -> LimitedFigure:
    """Compare a figure with its limit; NaN is within none."""
    within = limit is None or value <= limit
    return LimitedFigure(figure, value, limit, "" if within else reason)


def _same_weights(weights: WeightComparison | None) -> LimitedFigure:
    figure = "weights that differ by more than rounding"
    if weights is None:
        reason = "equal weights are asked for, and no weights were given: name them by --weights"
        return LimitedFigure(figure, None, 0, reason)
    reason = ""
    if weights.differing:
        verb = "weight differs" if weights.differing == 1 else "weights differ"
        reason = f"{weights.differing:,} {verb}, {weights.differences[0].name} first"
    return LimitedFigure(figure, weights.differing, 0, reason)
