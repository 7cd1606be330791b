"""Which distribution a pool looks like: maximum-likelihood fits, Q-Q points, histograms."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from qgate.drawing.histograms import histogram_of
from qgate.summaries.figures import quantiles_of
from qgate.summaries.pool import Pool
from qgate.summaries.record import Fit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

POINTS = 4096
FREEDOM = (0.3, 200.0)
"""Student's t is fitted with degrees of freedom within these; from the last on it is a normal."""
_PARAMETERS = {"normal": 2, "laplace": 2, "student_t": 3}
_HEAD = (0.00001, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1)
_TAIL = tuple(1 - p for p in reversed(_HEAD))
_PROBABILITIES = (*_HEAD, *(i / 40 for i in range(5, 36)), *_TAIL)
_GOLDEN = (math.sqrt(5) - 1) / 2


def coarsened(values: Floats, weights: Ints, most: int = POINTS) -> tuple[Floats, Floats]:
    """At most so many points with shares: means of neighbors, where there are more values.

    As many distinct values go into each, and those at either end stay alone: numbers are dense near
    zero, where nothing is lost, and tails are what tells distributions apart.
    """
    shares = weights / max(int(weights.sum()), 1)
    if len(values) <= most:
        return values, shares
    end = most // 4
    inner = len(values) - 2 * end
    starts = np.concatenate(
        [
            np.arange(end),
            np.arange(end, end + inner, -(-inner // (most - 2 * end))),
            np.arange(end + inner, len(values)),
        ]
    )
    unit = float(np.abs(values).max())
    merged = np.add.reduceat(shares, starts)
    return np.add.reduceat(values / unit * shares, starts) / merged * unit, merged


def fits_of(values: Floats, weights: Ints) -> tuple[dict[str, Fit], str]:
    """By name, and the name of the best; nothing for values of which there are not two.

    The best is the likeliest, with the price that the Bayesian information criterion puts on a
    parameter more: of a normal sample, Student's t with many degrees of freedom is none.
    """
    if len(values) < 2:
        return {}, ""
    shares = weights / weights.sum()
    found = {"normal": _normal(values, shares), "laplace": _laplace(values, shares)}
    student = _student(*coarsened(values, weights))
    if student is not None:
        found["student_t"] = student
    found = {name: fit for name, fit in found.items() if _sound(fit)}
    n = int(weights.sum())
    price = math.log(n) / (2 * n)
    best = max(
        found,
        key=lambda name: found[name]["log_likelihood"] - price * _PARAMETERS[name],
        default="",
    )
    return found, best


def _sound(fit: Fit) -> bool:
    return fit["scale"] > 0 and all(math.isfinite(v) for v in fit.values() if isinstance(v, float))


def _normal(x: Floats, shares: Floats) -> Fit:
    unit = float(np.abs(x).max())
    mean = float(x / unit @ shares)
    std = math.sqrt(float((x / unit - mean) ** 2 @ shares)) * unit
    likelihood = -math.log(std) - (math.log(2 * math.pi) + 1) / 2 if std else -math.inf
    return Fit(location=mean * unit, scale=std, log_likelihood=likelihood)


def _laplace(x: Floats, shares: Floats) -> Fit:
    median = _median(x, shares)
    scale = float(np.abs(x - median) @ shares)
    likelihood = -math.log(2) - math.log(scale) - 1 if scale else -math.inf
    return Fit(location=median, scale=scale, log_likelihood=likelihood)


def _median(x: Floats, shares: Floats) -> float:
    return float(x[np.searchsorted(np.cumsum(shares), 0.5 * shares.sum())])


def _student(x: Floats, shares: Floats) -> Fit | None:
    """By the degrees of freedom, each with the location and the scale that are likeliest then.

    Where many values are the same one, a small enough scale makes any likelihood with few degrees
    of freedom: there are only those for which that is not so.
    """
    atom = float(shares.max())
    least = max(FREEDOM[0], 1.05 * atom / (1 - atom)) if atom < 1 else math.inf
    if least >= FREEDOM[1] / 10:
        return None
    median = _median(x, shares)
    unit = float(np.abs(x - median) @ shares)
    if not (math.isfinite(unit) and unit > 0):
        return None
    z = (x - median) / unit
    start = (0.0, 1.0)
    known: dict[float, tuple[float, float, float]] = {}

    def likelihood(log_freedom: float) -> float:
        nonlocal start
        freedom = math.exp(log_freedom)
        start = _location_and_scale(z, shares, freedom, start)
        known[log_freedom] = (*start, _log_likelihood(z, shares, freedom, *start))
        return known[log_freedom][2]

    best = _largest(likelihood, math.log(least), math.log(FREEDOM[1]))
    location, scale, mean = known[best]
    return Fit(
        location=median + location * unit,
        scale=scale * unit,
        log_likelihood=mean - math.log(unit),
        freedom=math.exp(best),
    )


def _location_and_scale(
    z: Floats, shares: Floats, freedom: float, start: tuple[float, float]
) -> tuple[float, float]:
    """Expectation maximization with the parameter-expanded step, which needs few rounds."""
    location, square = start[0], start[1] ** 2
    for _ in range(200):
        weights = shares / (freedom + (z - location) ** 2 / square)
        total = float(weights.sum())
        moved = float(weights @ z) / total
        spread = max(float(weights @ (z - moved) ** 2) / total, 1e-300)
        done = (
            abs(spread - square) <= 1e-9 * square and abs(moved - location) ** 2 <= 1e-16 * square
        )
        location, square = moved, spread
        if done:
            break
    return location, math.sqrt(square)


def _log_likelihood(
    z: Floats, shares: Floats, freedom: float, location: float, scale: float
) -> float:
    rest = float(np.log1p(((z - location) / scale) ** 2 / freedom) @ shares)
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    return constant - math.log(freedom * math.pi) / 2 - math.log(scale) - (freedom + 1) / 2 * rest


def _largest(f: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one hill is largest, by golden section; the upper end counts too."""
    end, at_end = high, f(high)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = f(left), f(right)
    while high - low > 1e-4:
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = f(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = f(right)
    inside, at_inside = (left, at_left) if at_left > at_right else (right, at_right)
    return inside if at_inside > at_end else end


def qq_of(values: Floats, weights: Ints) -> dict[str, list[float]]:
    """Quantiles at the probabilities `p`, as far into the tails as there are values, and those of
    the standard normal distribution."""
    n = int(weights.sum())
    if len(values) < 2:
        return {}
    p = np.array([p for p in _PROBABILITIES if min(p, 1 - p) * n >= 1 - 1e-9])
    if not len(p):
        return {}
    standard = NormalDist()
    return {
        "p": p.tolist(),
        "values": quantiles_of(values, weights, p).tolist(),
        "normal": [standard.inv_cdf(each) for each in p],
    }


def group_portrait(pool: Pool) -> dict[str, Any]:
    """The portrait of a pool with its histograms, Q-Q points and fits, where there are such."""
    found: dict[str, Any] = dict(pool.portrait())
    values, weights = pool.weighted
    if len(values) < 2:
        return found
    core = quantiles_of(values, weights, np.array([0.001, 0.999])).tolist()
    found["histogram"] = histogram_of(values, weights, float(values[0]), float(values[-1]))
    found["core"] = histogram_of(values, weights, *core)
    found["qq"] = qq_of(values, weights)
    found["fits"], found["best"] = fits_of(values, weights)
    return {name: value for name, value in found.items() if value not in (None, {}, "")}
