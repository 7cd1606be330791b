"""Units of tokens that are compared with what was accepted for them, and the noise between runs.

Runs of one pair of engines are compared on the same tokens, so that the change of each unit tells
how much is noise of kernels that are not deterministic: a robust width, which one wrong unit among
many does not widen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qgate.engines.compute import TokenValues, groups_of, places
from qgate.engines.scored import FloatArray, IntArray, Pair

MOST_UNITS = 32
FEWEST_UNITS = 4
_TO_DEVIATION = 1.4826
"""Standard deviation of normal values over their median distance from the median."""
_MEAN, _SINGLE = 2.0, 4.0
"""Standard deviations that noise may move a mean, and the largest of several values."""


@dataclass(frozen=True)
class UnitFigures:
    """Figures of units of tokens: the mean divergence, and the largest difference.

    is_kl  whether the divergence is the KL of logits, and not the estimate k3
    """

    means: tuple[float, ...]
    largest: tuple[float, ...]
    is_kl: bool


def unit_figures(pairs: Sequence[Pair], values: Sequence[TokenValues]) -> UnitFigures:
    """Return the figures of each unit, in an order that depends on the tokens alone."""
    order = sorted(range(len(pairs)), key=lambda at: _digest(pairs[at][0].ids))
    finite = [values[at].finite for at in order]
    is_kl = any(bool(np.isfinite(value.kl).any()) for value in values)
    terms = [values[at].kl if is_kl else values[at].k3 for at in order]
    sizes = [np.abs(values[at].difference) for at in order]
    term, size, mask = (np.concatenate(parts) for parts in (terms, sizes, finite))
    mask &= np.isfinite(term)
    sample, position = places([len(part) for part in finite])
    _, unit = np.unique(groups_of(sample, position), return_inverse=True)
    unit = unit[mask] % MOST_UNITS
    names = np.unique(unit)
    means = [float(term[mask][unit == name].mean()) for name in names]
    largest = [float(size[mask][unit == name].max()) for name in names]
    return UnitFigures(tuple(means), tuple(largest), is_kl)


def mean_noise(accepted: Mapping[int, float], now: Sequence[float]) -> float:
    """Return how much noise between runs moves the mean of all units."""
    width, count = _width(accepted, now)
    return _MEAN * width / math.sqrt(count)


def single_noise(accepted: Mapping[int, float], now: Sequence[float]) -> float:
    """Return how much noise between runs moves the largest value of all units."""
    return _SINGLE * _width(accepted, now)[0]


def _width(accepted: Mapping[int, float], now: Sequence[float]) -> tuple[float, int]:
    changes: FloatArray = np.array(
        [value - accepted[at] for at, value in enumerate(now) if at in accepted]
    )
    if len(changes) < FEWEST_UNITS:
        return 0.0, 1
    distances = np.abs(changes - np.median(changes))
    return _TO_DEVIATION * float(np.median(distances)), len(changes)


def tokens_text(pairs: Sequence[Pair]) -> str:
    """Write how many samples and tokens there are, and a hash of all, whatever their order."""
    digests = sorted(_digest(sample.ids) for sample, _ in pairs)
    tokens = sum(len(sample) for sample, _ in pairs)
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    return f"{len(pairs)} samples of {tokens} tokens {digest}"


def _digest(ids: IntArray) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
