"""A value next to a tie of rounding may fall to either side; one away from ties may not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from qgate.expected.intermediates import Noise, rounded
from qgate.expected.near_ties import NearTies, settle
from qgate.testing import CheckFailure, check_kernel
from tests.kernel_checks.real.kernel import FP16, normal

X, GATE, UP, DOWN = normal(
    5, (24, 64), (48, 64), (48, 64), (32, 48), dtype=FP16, scales=(1, 1 / 8, 1 / 8, 1 / 8)
)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def steps_from_ties(values: Tensor) -> Tensor:
    """Return how far values are from a tie of float16, as a share of its step."""
    nearest = rounded(values, FP16)
    other = rounded(nearest + 2 * (values - nearest), FP16)
    return (values - (nearest + other) / 2).abs() / (nearest - other).abs()


HIDDEN = linear(X.double(), GATE.double())
STEPS = steps_from_ties(HIDDEN).nan_to_num(0.5)
ROW, UNIT = divmod(int(STEPS.argmin()), HIDDEN.shape[1])
DOWN[:, UNIT] *= 8  # all results of a row depend on it
OTHER_ROW = int(STEPS[:, UNIT].argmax())


def with_one_moved(row: int) -> Tensor:
    """Return the MLP with rounded gates, one of which is rounded to its other neighbor."""
    gates = rounded(HIDDEN, FP16)
    nearest = gates[row, UNIT].half()
    toward = nearest.new_tensor(torch.inf if HIDDEN[row, UNIT] > nearest else -torch.inf)
    gates[row, UNIT] = torch.nextafter(nearest, toward)
    return linear(silu(gates) * linear(X.double(), UP.double()), DOWN.double()).to(FP16)


def check_one(row: int) -> str:
    report = check_kernel(lambda *_: with_one_moved(row), X, GATE, UP, DOWN, like=mlp, relations=[])
    return report.conventions["arithmetic"]


def test_a_value_next_to_a_tie_may_fall_to_either_side() -> None:
    assert float(STEPS[ROW, UNIT]) < 1e-3
    assert check_one(ROW) == "the results of mm rounded to float16"


def test_a_value_away_from_ties_may_not() -> None:
    assert float(STEPS[OTHER_ROW, UNIT]) > 0.4
    with pytest.raises(CheckFailure):
        check_one(OTHER_ROW)


def test_two_values_of_one_row_are_settled() -> None:
    step = 2.0**-10
    values = torch.full((3, 8), 1.25, dtype=torch.float64)
    values[1, 2:4] = 1 + step / 2 * (1 + 1e-3)
    factors = normal(6, (8, 16))[0].double()

    def evaluate(noise: Noise) -> Tensor:
        return rounded(noise.inexact(values, 2.0**-23), FP16) @ factors

    right = rounded(values, FP16)
    right[1, 2:4] = 1.0
    settled = right @ factors
    assert (evaluate(NearTies(FP16)) != settled).any(1).tolist() == [False, True, False]
    assert torch.equal(settle(evaluate, lambda y: y - settled, FP16), settled)
