"""Reasons why two engines are too far apart: each limit that was given and is exceeded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qgate.engines.record import EnginesRecord
from qgate.text.numbers import brief, percent


@dataclass(frozen=True)
class EngineLimits:
    """Limits of a comparison; None for none.

    kl               largest mean KL, from logits where both have them, else k3
    logprob          largest difference of a token's log-probability
    flips            largest share of positions with another most likely token
    same_weights     weights may differ by rounding alone
    """

    kl: float | None = None
    logprob: float | None = None
    flips: float | None = None
    same_weights: bool = False


def reasons(record: EnginesRecord, limits: EngineLimits) -> list[str]:
    """List the limits that are exceeded, in words."""
    return list(_reasons(record, limits))


def _reasons(record: EnginesRecord, limits: EngineLimits) -> Iterator[str]:
    figures = record.figures
    if figures.not_finite:
        yield f"{figures.not_finite:,} log-probabilities are not finite in one of the engines"
    kl = figures.kl or figures.k3
    name = "KL" if figures.kl is not None else "k3"
    if limits.kl is not None and not kl.mean <= limits.kl:
        yield f"mean {name} {brief(kl.mean)} nats per token is above the limit {limits.kl:g}"
    largest = figures.magnitude.largest
    if limits.logprob is not None and not largest <= limits.logprob:
        yield f"a log-probability differs by {brief(largest)}, above the limit {limits.logprob:g}"
    if limits.flips is not None:
        if figures.flips is None:
            yield "flips have a limit, and the most likely tokens are not told by both engines"
        elif not figures.flips.mean <= limits.flips:
            yield (
                f"{percent(figures.flips.mean)} of positions have another most likely token, above "
                f"the limit {percent(limits.flips)}"
            )
    if limits.same_weights:
        if record.weights is None:
            yield "equal weights are asked for, and no weights were given: name them by --weights"
        elif record.weights.differing:
            first = record.weights.differences[0]
            count = record.weights.differing
            verb = "weight differs" if count == 1 else "weights differ"
            yield f"{count:,} {verb}, {first.name} first"
