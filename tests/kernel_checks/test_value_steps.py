"""κ of IEEE P3109, against its formula by sets and the example of its Annex D."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import qgate
from qgate.expected.value_steps import kappa, value_steps
from qgate.formats import ElementFormat, get
from qgate.formats.definition import round_by_list
from qgate.testing import CheckFailure, check_kernel

FORMATS = ["binary8p4se", "binary4p2sf", "binary6p1ue", "fp8_e4m3", "fp4_e2m1", "hif8", "int4"]


def element(name: str) -> ElementFormat:
    fmt = get(name)
    assert isinstance(fmt, ElementFormat)
    return fmt


@pytest.mark.parametrize("name", FORMATS)
def test_steps_are_those_of_the_formula(name: str) -> None:
    """The size of ((defined, actual] with [actual, defined)), cut with the finite values."""
    fmt = element(name)
    finite = {float(v) + 0.0 for v in fmt.values() if math.isfinite(v)}
    sides = sorted(finite)[:: max(1, len(finite) // 24)]
    for defined in sides:
        for actual in sides:
            above = {v for v in finite if defined < v <= actual}
            below = {v for v in finite if actual <= v < defined}
            steps = value_steps(np.array([actual]), np.array([defined]), fmt)
            assert int(steps[0]) == len(above | below)


def test_annex_d_flushes_four_subnormals_to_zero() -> None:
    """Exp of Binary8p4se: results below the smallest normal go to zero or to it, ties to zero."""
    fmt = element("binary8p4se")
    x = np.concatenate([np.linspace(-9, 5.5, 20001), [math.nan, math.inf, -math.inf]])
    exact = np.exp(x)
    defined = round_by_list(exact, fmt, saturate=False)
    least = fmt.min_normal
    flushed = np.where(defined <= least / 2, 0.0, least)
    actual = np.where((defined > 0) & (defined < least), flushed, defined)
    assert kappa(actual, defined, fmt) == 4
    a, b, c = (math.log(n * 2.0**-11) for n in (1, 9, 15))
    for low, high, steps in ((-9, a, 0), (a, b, 4), (b, c, 3), (c, 5.5, 0)):
        part = (x > low) & (x < high)
        assert value_steps(actual[part], defined[part], fmt).max() == steps


@pytest.mark.parametrize(
    ("actual", "defined", "value"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, 2.0], [1.0, math.nan], math.nan),
        ([math.inf, math.nan], [math.inf, 1.0], math.nan),
        ([math.inf], [-math.inf], math.inf),
        ([224.0], [math.inf], math.inf),
        ([-0.0, 1.0], [0.0, 1.125], 1.0),
        ([], [], 0.0),
    ],
)
def test_nan_and_infinity_have_to_match(
    actual: list[float], defined: list[float], value: float
) -> None:
    result = kappa(np.array(actual), np.array(defined), element("binary8p4se"))
    assert result == pytest.approx(value, nan_ok=True)


def exp(x: Tensor) -> Tensor:
    return x.exp()


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
OPTIONS = {"like": exp, "output": "binary8p4se", "relations": ["one", "odd"]}


def test_a_right_kernel_has_kappa_of_at_most_one() -> None:
    def exact(x: Tensor) -> Tensor:
        return qgate.quantize(x.exp(), "binary8p4se")

    report = check_kernel(exact, X, **OPTIONS)
    assert report.kappa == 0
    assert "kappa 0: 0 value steps from the defined result at most" in str(report)

    tie = torch.tensor(math.log(1.0625))  # float noise decides whether 1 or 1.125 is nearer

    def noisy(x: Tensor) -> Tensor:
        y = exact(x)
        return torch.where(x == tie, 2.125 - y, y)

    x = X.clone()
    x[0, 0] = tie
    assert check_kernel(noisy, x, **OPTIONS | {"relations": ["permuted"]}).kappa == 1


def test_more_steps_than_float_noise_decides_are_red() -> None:
    def flushing(x: Tensor) -> Tensor:
        y = qgate.quantize((x - 5).exp(), "binary8p4se")
        return torch.where(y < 2.0**-7, torch.where(y <= 2.0**-8, 0.0, 2.0**-7), y)

    with pytest.raises(CheckFailure, match="is wrong"):
        check_kernel(flushing, X, **OPTIONS | {"like": lambda x: (x - 5).exp()})


def test_scaled_results_have_no_kappa() -> None:
    report = check_kernel(
        lambda x: qgate.quantize(x, "mxfp8"), X, like=lambda x: x, output="mxfp8", relations=["one"]
    )
    assert report.kappa is None
