"""Fit distributions to a pool by maximum likelihood; Q-Q points and histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np

from qgate.stats.summary import Floats, Ints, quantiles_of
from qgate.summaries.pool import Pool
from qgate.summaries.record import Fit, Histogram

POINTS = 4096
FREEDOM = (0.3, 200.0)
"""Student's t is fitted with degrees of freedom within these; from the last on it is a normal."""
_PARAMETERS = {"normal": 2, "laplace": 2, "student_t": 3}
_HEAD = (0.00001, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1)
_TAIL = tuple(1 - p for p in reversed(_HEAD))
_PROBABILITIES = (*_HEAD, *(i / 40 for i in range(5, 36)), *_TAIL)
_GOLDEN = (math.sqrt(5) - 1) / 2

BINS = 160
"""The largest number of bins."""
_MOST_BITS, _MANY = 11, 64
_FEW_VALUES, _LEVELS = 8, 1024


def coarsened(values: Floats, weights: Ints) -> tuple[Floats, Floats]:
    """Merge many values into at most `POINTS` points with shares, the means of neighbors.

    Each point merges equally many distinct values, but those at either end stay alone: numbers are
    dense near zero, where nothing is lost, and distributions differ in their tails.
    """
    shares = weights / max(int(weights.sum()), 1)
    if len(values) <= POINTS:
        return values, shares
    end = POINTS // 4
    inner = len(values) - 2 * end
    starts = np.concatenate(
        [
            np.arange(end),
            np.arange(end, end + inner, -(-inner // (POINTS - 2 * end))),
            np.arange(end + inner, len(values)),
        ]
    )
    unit = float(np.abs(values).max())
    merged = np.add.reduceat(shares, starts)
    return np.add.reduceat(values / unit * shares, starts) / merged * unit, merged


def fits_of(values: Floats, weights: Ints) -> tuple[dict[str, Fit], str]:
    """Fit all distributions; return them by name and the best one. One value alone has no fit.

    The best is the likeliest by the Bayesian information criterion, which puts a price on each
    parameter: a normal sample is not best fitted by Student's t with many degrees of freedom.
    """
    if len(values) < 2:
        return {}, ""
    shares = weights / weights.sum()
    candidates = {
        "normal": _normal(values, shares),
        "laplace": _laplace(values, shares),
        "student_t": _student(*coarsened(values, weights)),
    }
    fits = {
        name: fit
        for name, fit in candidates.items()
        if fit and fit["scale"] > 0 and all(math.isfinite(v) for v in fit.values())  # type: ignore[arg-type]
    }
    n = int(weights.sum())
    price = math.log(n) / (2 * n)

    def merit(name: str) -> float:
        return fits[name]["log_likelihood"] - price * _PARAMETERS[name]

    return fits, max(fits, key=merit, default="")


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
    """Search the degrees of freedom, each with its likeliest location and scale.

    Where many values are equal, few degrees of freedom and a small scale reach any likelihood: the
    search begins above them.
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
    fits: dict[float, tuple[float, float, float]] = {}

    def likelihood(log_freedom: float) -> float:
        nonlocal start
        freedom = math.exp(log_freedom)
        start = _location_and_scale(z, shares, freedom, start)
        fits[log_freedom] = (*start, _log_likelihood(z, shares, freedom, *start))
        return fits[log_freedom][2]

    best = _largest(likelihood, math.log(least), math.log(FREEDOM[1]))
    location, scale, mean = fits[best]
    return Fit(
        location=median + location * unit,
        scale=scale * unit,
        log_likelihood=mean - math.log(unit),
        freedom=math.exp(best),
    )


def _location_and_scale(
    z: Floats, shares: Floats, freedom: float, start: tuple[float, float]
) -> tuple[float, float]:
    """Maximize the expectation with the parameter-expanded step, which needs few rounds."""
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
    distances = float(np.log1p(((z - location) / scale) ** 2 / freedom) @ shares)
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    constant -= math.log(freedom * math.pi) / 2 + math.log(scale)
    return constant - (freedom + 1) / 2 * distances


def _largest(f: Callable[[float], float], low: float, high: float) -> float:
    """Search the maximum of a function of one hill by golden section; the upper end counts too."""
    end, at_end = high, f(high)
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = f(a), f(b)
    while high - low > 1e-4:
        if at_a > at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = f(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = f(b)
    inside, at_inside = (a, at_a) if at_a > at_b else (b, at_b)
    return inside if at_inside > at_end else end


def qq_of(values: Floats, weights: Ints) -> dict[str, list[float]]:
    """Return quantiles at the probabilities `p`, as far into the tails as there are values, and
    those of the standard normal distribution."""
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
        "normal": [*map(standard.inv_cdf, p)],
    }


def group_summary(pool: Pool) -> Mapping[str, object]:
    """Return the summary of a pool with its histograms, Q-Q points and fits."""
    summary: dict[str, object] = dict(pool.summary())
    values, weights = pool.weighted
    if len(values) < 2:
        return summary
    core = quantiles_of(values, weights, np.array([0.001, 0.999])).tolist()
    summary["histogram"] = histogram_of(values, weights, float(values[0]), float(values[-1]))
    summary["core"] = histogram_of(values, weights, *core)
    summary["qq"] = qq_of(values, weights)
    summary["fits"], summary["best"] = fits_of(values, weights)
    return {name: value for name, value in summary.items() if value not in (None, {}, "")}


# Histograms --------------------------------------------------------------------------------------
#
# Values are on a grid: of bf16, of the format they were quantized to, or of integers with a scale.
# If the width of a bin were no multiple of the grid's step, some bins would hold more values than
# others and the histogram would look like a comb. So all bins hold equally many possible values.


def histogram_of(values: Floats, weights: Ints, low: float, high: float) -> Histogram | None:
    """Count values in equal bins from `low` to `high` and up to one further; None where these are
    the same. Zero is in the middle of a bin."""
    if not low < high:
        return None
    inside = (values >= low) & (values <= high)
    x, n = values[inside], weights[inside]
    step = max(_step(x, n), (high - low) * 2.0**-40)
    # An odd number of steps has zero, and any other value, in the middle.
    width = step * (math.ceil((high - low) / (step * (BINS - 1))) // 2 * 2 + 1)
    first, last = (math.floor(end / width + 0.5) for end in (low, high))
    counts = np.zeros(last - first + 1, dtype=np.int64)
    # A value on an edge counts half in either bin.
    above = np.floor(x / width + 0.5).astype(np.int64) - first
    below = np.ceil(x / width - 0.5).astype(np.int64) - first
    for bins, part in ((above, n - n // 2), (below, n // 2)):
        np.add.at(counts, bins.clip(0, last - first), part)
    return Histogram(low=(first - 0.5) * width, high=(last + 0.5) * width, counts=counts.tolist())


def _step(values: Floats, weights: Ints) -> float:
    """Return the largest step between neighbors of the grid that the values are on."""
    return _even_step(values) or _binary_step(values, weights)


def _even_step(values: Floats) -> float:
    """Return the step of values that are equally far apart, as integers with a scale; 0 if not."""
    if not _FEW_VALUES <= len(values) <= _LEVELS:
        return 0.0
    # Near zero all levels occur, and rounding to bf16 moves them least.
    near = values[np.abs(values) <= np.abs(values).max() / 4]
    step = float((near[-1] - near[0]) / (len(near) - 1)) if len(near) > 2 else 0.0
    for _ in range(3 if step else 0):
        levels = np.round(values / step)
        step = float(values @ levels) / max(float(levels @ levels), 1.0)
    if not step:
        return 0.0
    levels = np.round(values / step)
    even = (np.abs(values / step - levels) < 0.35).mean() > 0.95
    whole = len(np.unique(levels)) == len(values) > 0.75 * (levels[-1] - levels[0])
    return step if even and whole else 0.0


def _binary_step(values: Floats, weights: Ints) -> float:
    """Return the largest step of a floating point grid, as far as many values show it."""
    weights, values = weights[values != 0], values[values != 0]
    if not len(values):
        return 0.0
    fractions, exponents = np.frexp(np.abs(values))
    bits = np.full(len(fractions), _MOST_BITS)
    for count in range(_MOST_BITS, 0, -1):
        scaled = np.ldexp(fractions, count)
        bits[scaled == np.floor(scaled)] = count - 1
    top = int(exponents.max())
    largest = math.ldexp(1.0, top - 1 - int(bits.max()))
    for exponent in np.unique(exponents).tolist():
        mine = exponents == exponent
        if mine.sum() > 2 and weights[mine].sum() >= _MANY:
            largest = max(largest, math.ldexp(1.0, exponent - 1 - int(bits[mine].max())))
    return largest
