"""A broken quiet channel among loud ones: each channel is measured against its own energy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import qgate
from qgate.gate import Limits, Measured, judge
from qgate.gate.ledger import with_accepted
from qgate.gate.measuring.site_errors import compare, site_errors, worst_channel

QUIET, PART = 40, "relative_mse@worst_channel"


def reference(quiet: float = 0.05) -> Tensor:
    """64 channels, one loud, and one quiet in another block of 32."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(3))
    x[:, 3] *= 100
    x[:, QUIET] *= quiet
    return x


def measured(actual: Tensor, true: Tensor) -> Measured:
    return site_errors("x:output", "x", "local", 0, [(actual, true)], beyond=math.inf)


def failed_metrics(actual: Tensor, true: Tensor, accepted: Measured) -> list[str]:
    names = ("relative_mse", "one_minus_correlation", PART)
    numbers = {name: float(accepted.value(name) or 0.0) for name in names}
    row = with_accepted(measured(actual, true), numbers)
    return [check.metric for check in judge([row], lambda _: Limits(), True).failed]


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3"])
@pytest.mark.parametrize("factor", [2.0, 0.0, -1.0])
def test_a_broken_quiet_channel_is_red_and_a_sound_one_green(fmt: str, factor: float) -> None:
    true = reference()
    clean = qgate.Quantizer(fmt)(true)
    accepted = measured(clean, true)
    assert failed_metrics(clean, true, accepted) == []
    broken = clean.clone()
    broken[:, QUIET] *= factor
    assert failed_metrics(broken, true, accepted) == [PART]


def test_it_is_the_largest_ratio_to_its_own_energy() -> None:
    true = reference().double()
    actual = true.clone()
    actual[:, QUIET] *= 1.5
    actual[:, 3] *= 1.001
    assert worst_channel(compare([(actual, true)], channels=True)) == pytest.approx(0.25, rel=1e-5)


def test_a_silent_channel_is_measured_against_the_floor() -> None:
    true = reference(quiet=0.0)
    actual = true.clone()
    actual[:, QUIET] = 1e-5
    comparison = compare([(actual, true)], channels=True)
    mean = float(true.double().square().sum(0).mean())
    assert worst_channel(comparison) == pytest.approx(512e-10 / (1e-6 * mean), rel=1e-6)


def test_without_any_energy_there_is_no_ratio() -> None:
    zeros = torch.zeros(4, 8)
    assert worst_channel(compare([(zeros, zeros)], channels=True)) is None
    assert worst_channel(compare([(zeros + 1, zeros)], channels=True)) is None


def test_a_channel_that_is_not_finite_is_no_small_ratio() -> None:
    true = reference()
    actual = true.clone()
    actual[0, QUIET] = math.nan
    assert measured(actual, true).value("relative_mse") != 0
