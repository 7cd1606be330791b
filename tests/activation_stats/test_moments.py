"""Moments, percentiles and roundings of activations against numpy and scipy on the values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from qgate.activation_stats._tensor_pass import ROUNDING, TensorReading
from qgate.activation_stats.layer_stats import LayerStats
from qgate.summaries.record import ValueSummary
from tests.activation_stats.layer_records import record_of, stats_of


def summary_of(xs: list[Tensor]) -> ValueSummary:
    return record_of(xs)["portrait"]


def draws(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(5, size=(count, 64))


KINDS = {
    "heavy tails": draws(3000),
    "far from zero": draws(3000) + 1e4,
    "one sign": np.abs(draws(3000)) ** 3,
    "one massive element": np.concatenate([draws(2999), np.full((1, 64), 3e4)]),
    "tiny": draws(3000) * 1e-30,
    "huge": draws(3000) * 1e30,
    "beginning apart": np.concatenate([np.zeros((600, 64)), draws(2400) + 1e3]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_moments_of_float32_are_those_of_the_values(kind: str) -> None:
    x = KINDS[kind].astype(np.float32)
    summary = summary_of([torch.from_numpy(part) for part in np.array_split(x, 7)])
    flat = x.astype(np.float64).reshape(-1)
    unit = float(np.abs(flat).max())
    expected = {"mean": flat.mean(), "std": flat.std(), "rms": np.sqrt(np.square(flat).mean())}
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-11, abs=1e-15 * unit)  # type: ignore[literal-required]
    assert summary["skew"] == pytest.approx(scipy.stats.skew(flat / unit), rel=1e-7, abs=1e-9)
    assert summary["kurtosis"] == pytest.approx(
        scipy.stats.kurtosis(flat / unit), rel=1e-7, abs=1e-9
    )


@pytest.mark.parametrize("scale", [1e-300, 5e-324 * 2**30, 1e-100, 1.0, 1e100, 1e307])
def test_moments_of_float64_do_not_end_where_their_squares_do(scale: float) -> None:
    x = np.clip(draws(100), -9, 9) * scale
    summary = summary_of([torch.from_numpy(x)])
    flat = np.ldexp(x.reshape(-1), -math.frexp(scale)[1])
    assert summary["kurtosis"] == pytest.approx(scipy.stats.kurtosis(flat), rel=1e-9)
    assert summary["skew"] == pytest.approx(scipy.stats.skew(flat), rel=1e-9, abs=1e-12)
    std = np.ldexp(flat.std(), math.frexp(scale)[1])
    assert summary["std"] == pytest.approx(std, rel=1e-9)


def test_moments_leave_out_what_is_not_finite() -> None:
    x = draws(500).astype(np.float32) + 3
    bad = x.copy()
    bad[3, 5], bad[100, 7], bad[499, 63] = np.nan, np.inf, -np.inf
    flat = bad[np.isfinite(bad)].astype(np.float64)
    summary = summary_of([torch.from_numpy(bad)])
    assert summary["mean"] == pytest.approx(flat.mean(), rel=1e-12)
    assert summary["kurtosis"] == pytest.approx(scipy.stats.kurtosis(flat), rel=1e-10)


def test_a_constant_has_its_own_mean_and_no_kurtosis() -> None:
    summary = summary_of([torch.full((9, 8), 0.3), torch.full((5, 8), 0.3)])
    assert summary["mean"] == summary["rms"] == pytest.approx(float(np.float32(0.3)), rel=1e-15)
    assert summary["std"] == 0
    assert not {"skew", "kurtosis"} & set(summary)


def test_moments_are_the_same_bits_in_any_order_and_split_also_of_two_widths() -> None:
    xs = [torch.from_numpy(draws(40, seed)).float() for seed in range(6)]
    xs[1], xs[4] = xs[1].bfloat16(), xs[4].bfloat16()
    whole = stats_of(xs).moments()
    for order in ([5, 4, 3, 2, 1, 0], [1, 4, 0, 2, 3, 5]):
        parts = []
        for start in (0, 2):
            stats = LayerStats("m", "input")
            for k in order[start : start + 2 + 2 * (start > 0)]:
                stats.update(xs[k], k)
            parts.append(stats)
        assert (parts[0] + parts[1]).moments() == whole
        assert (parts[1] + parts[0]).moments() == whole
    flat = np.concatenate([x.double().numpy() for x in xs]).reshape(-1)
    assert whole["kurtosis"] == pytest.approx(scipy.stats.kurtosis(flat), rel=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_powers_of_counts_are_those_of_the_values(dtype: torch.dtype) -> None:
    x = torch.from_numpy(draws(300)).to(dtype)
    reading = TensorReading.of(x)
    figures, flat = reading.moments.figures(), x.double().numpy().reshape(-1)
    assert figures["kurtosis"] == pytest.approx(scipy.stats.kurtosis(flat), rel=1e-11)
    assert figures["mean"] == pytest.approx(flat.mean(), rel=1e-11)


def test_quantiles_keep_the_rounding_of_the_record() -> None:
    """Of values between two bfloat16 numbers, so that each is moved as far as any can be."""
    x = (1 + 2.0**-8 * (1 - 1e-3)) * 2.0 ** torch.randint(-3, 4, (400, 32)).float()
    record = record_of([x])
    assert record["rounding"] == ROUNDING["bfloat16"] == 2.0**-8
    worst = 0.0
    for p, value in record["portrait"]["quantiles"].items():
        exact = float(np.quantile(x.double().numpy(), float(p)))
        worst = max(worst, abs(value / exact - 1))
    assert 0.9 * 2.0**-8 < worst <= 2.0**-8
    assert "rounding" not in record_of([x.bfloat16()])


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_quantile_of_magnitudes_is_exact(p: float, dtype: torch.dtype) -> None:
    x = torch.from_numpy(draws(500)).to(dtype)
    x[::7] = 0.0
    x[3, 5] = math.inf
    sizes = x.double().abs()
    sizes = sizes[sizes.isfinite()].numpy()
    exact = float(np.quantile(sizes, p, method="lower"))
    assert TensorReading.of(x).size_quantile(p) == exact
