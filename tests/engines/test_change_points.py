"""Where a series begins to drift: planted changes are found, healthy series are none."""

from __future__ import annotations

import numpy as np
import pytest

from qgate.engines import change_points
from qgate.engines.change_points import FEWEST_STEPS, ChangePoint, find_change
from qgate.engines.scored import FloatArray
from qgate.engines.series import ALARM
from tests.shares import proof, share

STEPS, START = 30, 11
"""Steps of a run, and the index at which a change is planted: that of step 12."""


def healthy(seed: int, steps: int = STEPS, alike: float = 0.0, width: float = 0.1) -> FloatArray:
    """Draw a series without a drift: logarithms with a correlation of neighboring steps."""
    draw = np.random.default_rng(seed)
    noise = draw.standard_normal(steps)
    for at in range(1, steps):
        noise[at] = alike * noise[at - 1] + np.sqrt(1 - alike**2) * noise[at]
    return 1e-4 * np.exp(width * noise)


def planted(seed: int, kind: str, size: float) -> FloatArray:
    at = np.arange(STEPS)
    since = np.maximum(at - START + 1, 0)
    shapes = {"jump": np.where(at >= START, size, 1.0), "ramp": size**since}
    shapes["faster and faster"] = size ** (since**2)
    return healthy(seed) * shapes[kind]


def change_of(values: FloatArray) -> ChangePoint:
    change = find_change(values.tolist())
    assert change is not None
    return change


@share(4)
@pytest.mark.parametrize(
    ("kind", "size"), [("jump", 1.6), ("jump", 0.6), ("ramp", 1.1), ("faster and faster", 1.08)]
)
def test_a_planted_drift_is_found_where_it_begins(kind: str, size: float) -> None:
    changes = [change_of(planted(seed, kind, size)) for seed in range(20)]
    assert max(change.chance for change in changes) <= ALARM
    assert sum(abs(change.start - START) <= 2 for change in changes) >= 18
    assert sum(change.first <= START <= change.last for change in changes) >= 18
    assert {change.ratio > 1 for change in changes} == {size > 1}


def test_the_interval_holds_the_beginning() -> None:
    changes = [change_of(planted(seed, "jump", 1.4)) for seed in range(40)]
    assert sum(change.first <= START <= change.last for change in changes) >= 36


@proof
@pytest.mark.parametrize("alike", [0.0, 0.3])
def test_healthy_series_are_no_alarm(alike: float) -> None:
    chances = [change_of(healthy(seed, alike=alike)).chance for seed in range(100)]
    assert min(chances) > ALARM


@proof
def test_chances_of_healthy_series_are_chances() -> None:
    chances = np.array([change_of(healthy(seed)).chance for seed in range(100)])
    assert (chances < 0.5).mean() < 0.6
    assert (chances < 0.1).mean() < 0.17


@pytest.mark.parametrize("at", [0, 14, 29])
def test_a_single_bad_batch_is_no_drift(at: int) -> None:
    values = healthy(3)
    values[at] *= 30
    assert change_of(values).chance > ALARM


def test_many_steps_are_compared_in_blocks() -> None:
    values = healthy(5, 800)
    values[500:] *= 1.2
    change = change_of(values)
    assert change.chance <= ALARM
    assert abs(change.start - 500) <= 2


def test_zeros_before_a_drift_are_levels() -> None:
    change = change_of(np.array([0.0] * 15 + [1e-3] * 15))
    assert (change.start, change.chance <= ALARM, change.before) == (15, True, 0.0)
    assert change.ratio == np.inf


def test_short_and_constant_series_tell_nothing() -> None:
    assert find_change(healthy(0, FEWEST_STEPS - 1).tolist()) is None
    assert find_change([1e-4] * STEPS) is None


def test_the_share_that_a_drift_explains_is_that_of_least_squares() -> None:
    logs = np.log(planted(4, "ramp", 1.05))
    best, at = 0.0, np.arange(STEPS)
    for start in range(3, STEPS - 2):
        for shape in ((at >= start) * 1.0, np.maximum(at - start + 1.0, 0.0)):
            design = np.stack([np.ones(STEPS), shape], 1)
            residuals = logs - design @ np.linalg.lstsq(design, logs, rcond=None)[0]
            best = max(best, 1 - np.square(residuals).sum() / np.square(logs - logs.mean()).sum())
    directions = change_points._directions(STEPS)
    assert change_points._largest(logs[None], directions)[0] == pytest.approx(best, rel=1e-9)


def test_drawn_series_are_as_alike_as_asked_for() -> None:
    series = change_points._series_without_drift(50, 0.6, 0)
    neighbors = np.corrcoef(series[:, 20], series[:, 21])[0, 1]
    assert neighbors == pytest.approx(0.6, abs=0.02)
    assert series.std(0) == pytest.approx(1.0, abs=0.03)
