"""What moved in a run, by how much and in which direction."""

from __future__ import annotations

import math

import pytest

from qgate.results.movements import Movements, movement, movement_of
from tests.results.making import record

CASES = [
    # metric, before, now, outcome, change
    ("relative_mse", 1e-4, 1e-4, "equal", ""),
    ("relative_mse", 1e-4, 1.019e-4, "equal", "+1.9 %"),
    ("relative_mse", 1e-4, 1.1e-4, "worse", "+10 %"),
    ("relative_mse", 1e-4, 0.9e-4, "better", "-10 %"),
    ("relative_mse", 1e-4, 2.7e-3, "worse", "27x"),
    ("relative_mse", 0.0, 1e-4, "worse", "from 0"),
    ("relative_mse", 0.0, 1e-12, "equal", ""),  # what float32 leaves
    ("sqnr_db", 30.0, 29.0, "worse", "-21 %"),  # of the energies that it stands for
    ("sqnr_db", 30.0, 31.0, "better", "+26 %"),
    ("log2_amax", 1.0, 2.0, "moved", "2x"),
    ("log2_amax", -1.0, -1.01, "equal", "-0.69 %"),
    ("relative_mse", 1e-4, None, "moved", ""),  # no longer finite
]


@pytest.mark.parametrize(("metric", "old", "new", "outcome", "change"), CASES)
def test_a_change_has_a_direction_and_a_size(
    metric: str, old: float, new: float | None, outcome: str, change: str
) -> None:
    direction, text, size = movement(metric, old, new)
    assert (direction, text) == (outcome, change)
    assert (size > math.log1p(0.02)) is (outcome != "equal")


def test_a_record_says_what_moved_most_and_a_failure_what_decided() -> None:
    equal = movement_of(record("a"))
    assert (equal.outcome, equal.old, equal.new) == ("equal", 1e-4, 1e-4)
    better = movement_of(record("a", 0.9e-4))
    assert (better.outcome, better.metric, better.change) == ("better", "relative_mse", "-10 %")
    failed = movement_of(record("a", 3e-4))
    assert (failed.outcome, failed.change) == ("failed", "3x")
    new = movement_of(record("a", 3e-4, accepted={}))
    assert (new.outcome, new.old, new.new) == ("new", None, 3e-4)


def test_failures_come_first_and_a_repeated_test_counts_once() -> None:
    rows = [
        record("better", 0.5e-4),
        record("failed", 1.2e-4),
        record("failed", 1.3e-4, attempt=1),
        record("expected", 9.0, xfailed="it is known"),
        record("equal"),
    ]
    moves = Movements(rows)
    listed = moves.of("failed", "worse", "better")
    assert [(move.site, move.change) for move in listed] == [
        ("failed", "+30 %"),
        ("better", "-50 %"),
    ]
    assert [move.site for move in moves.of("equal")] == ["equal"]
