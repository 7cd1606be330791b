"""Differences of log-probabilities along the positions of samples, and all tokens as rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from qgate.engines.compute import TokenValues
from qgate.engines.record import PositionProfile, SampleDifferences, TokenRow
from qgate.engines.scored import BoolArray, FloatArray, Pair

MOST_VALUES = 160
"""Values of one line; of more tokens each stands for several."""


def position_profile(values: Sequence[TokenValues]) -> PositionProfile:
    """Return the mean and the largest difference at each position, over all samples."""
    longest = max(len(value.actual) for value in values) - 1
    step = max(1, math.ceil(longest / MOST_VALUES))
    bins = max(1, math.ceil(longest / step))
    sums, counts, largest = np.zeros(bins), np.zeros(bins), np.zeros(bins)
    for value in values:
        at = np.flatnonzero(value.finite)
        at = at[at > 0]
        sizes, places = np.abs(value.difference[at]), (at - 1) // step
        sums += np.bincount(places, sizes, bins)
        counts += np.bincount(places, minlength=bins)
        np.maximum.at(largest, places, sizes)
    present = counts > 0
    means = np.divide(sums, counts, out=np.zeros(bins), where=present)
    return PositionProfile(step, _present(means, present), _present(largest, present))


def _present(values: FloatArray, present: BoolArray) -> tuple[float | None, ...]:
    return tuple(
        float(value) if has else None for value, has in zip(values, present.tolist(), strict=True)
    )


def worst_samples(
    pairs: Sequence[Pair], values: Sequence[TokenValues], most: int
) -> list[SampleDifferences]:
    """Return the samples that carry most of the difference, token by token."""
    sums = [float(value.k3[value.finite].sum()) for value in values]
    total = sum(sums)
    order = sorted(range(len(pairs)), key=lambda at: -sums[at])[:most]
    return [
        SampleDifferences(pairs[at][0].name, *_along(values[at], sums[at] / total))
        for at in order
        if total > 0 and sums[at] > 0
    ]


def _along(values: TokenValues, share: float) -> tuple[int, float, tuple[float | None, ...]]:
    difference = np.where(values.finite, values.difference, np.nan)[1:]
    step = max(1, math.ceil(len(difference) / MOST_VALUES))
    chosen: list[float | None] = []
    for start in range(0, len(difference), step):
        part = difference[start : start + step]
        part = part[~np.isnan(part)]
        chosen.append(float(part[np.abs(part).argmax()]) if len(part) else None)
    return step, share, tuple(chosen)


def token_rows(pairs: Sequence[Pair], values: Sequence[TokenValues]) -> Iterator[TokenRow]:
    """Yield the values of each token but those that neither engine gives any for."""
    for (sample, _), value in zip(pairs, values, strict=True):
        columns = (value.actual, value.reference, value.difference, value.k3, value.kl)
        for at, token in enumerate(sample.ids.tolist()):
            actual, reference, difference, k3, kl = (_finite(column[at]) for column in columns)
            if np.isnan(value.actual[at]) and np.isnan(value.reference[at]):
                continue
            same = float(value.same_best[at])
            same_best = None if math.isnan(same) else bool(same)
            yield TokenRow(sample.name, at, token, actual, reference, difference, k3, kl, same_best)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
