"""Metrics: what each is, and its defined results where the formula has nothing to divide by."""

from __future__ import annotations

import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch

from qgate.metrics import METRICS, error_metrics
from qgate.stats import ErrorSums, _sums
from qgate.stats.error_stats import errors
from tests.stats.exact import agree, exact_metrics, weighted_sums

INF = math.inf
NAMES = [
    "sqnr_db", "mse", "rmse", "mae", "max_abs", "mean_error", "relative_mse", "relative_mae",
    "relative_error", "cosine", "correlation", "psnr_db",
]  # fmt: skip
EVERY_METRIC = pytest.mark.parametrize("name", NAMES)
EXACT = dict.fromkeys(NAMES, 0.0) | {
    "sqnr_db": INF,
    "psnr_db": INF,
    "cosine": 1.0,
    "correlation": 1.0,
}


def both_ways(actual: list[float], reference: list[float]) -> list[dict[str, float]]:
    """All metrics from the pass over float64 tensors, and from the sums written out."""
    a, r = (torch.tensor(x, dtype=torch.float64) for x in (actual, reference))
    sums = weighted_sums(a.numpy(), r.numpy(), np.ones(len(actual), np.int64))
    return [
        errors(a, r).metrics(),
        {metric.name: metric.function(sums) for metric in METRICS.of("errors")},
    ]


def test_the_registry_leads_with_sqnr() -> None:
    assert [metric.name for metric in METRICS.of("errors")] == NAMES
    assert {error_metric.name for error_metric in METRICS.of("errors") if error_metric.direction == "higher"} == {
        "sqnr_db", "psnr_db", "cosine", "correlation",
    }  # fmt: skip
    assert {unit_metric.name: unit_metric.unit for unit_metric in METRICS.of("errors") if unit_metric.unit} == {
        "sqnr_db": "dB", "psnr_db": "dB", "relative_error": "%",
    }  # fmt: skip
    assert [signed_metric.name for signed_metric in METRICS if signed_metric.signed] == [
        "mean_error"
    ]
    assert all(any_metric.label and any_metric.definition for any_metric in METRICS)


def test_reading_metrics_needs_no_torch() -> None:
    for module in (error_metrics, _sums):
        assert "torch" not in inspect.getsource(module)


@EVERY_METRIC
def test_a_smaller_error_is_better_in_the_stated_direction(name: str) -> None:
    reference = torch.linspace(-1, 2, 50, dtype=torch.float64)
    noise = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64).abs()
    values = [errors(reference + size * noise, reference).metric(name) for size in (0.1, 0.01, 0)]
    if METRICS.get(name).direction == "higher":
        values.reverse()
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize(
    "values",
    [[1.0, -2.0, 3.0], [0.1] * 9, [0.0] * 5, [-0.0, 0.0], [7.0], [1e200, -1e200], [5e-324]],
    ids=str,
)
def test_no_error(values: list[float]) -> None:
    for metrics in both_ways(values, values):
        assert metrics == EXACT


def test_zeros_of_either_sign_are_equal() -> None:
    for metrics in both_ways([0.0, -0.0], [-0.0, 0.0]):
        assert metrics == EXACT


def test_zero_reference_with_error() -> None:
    for metrics in both_ways([1.0, -3.0, 2.0, 0.0], [0.0] * 4):
        relative = dict.fromkeys(["relative_mse", "relative_mae", "relative_error"], INF)
        assert metrics == relative | {
            "sqnr_db": -INF, "psnr_db": -INF, "cosine": 0.0, "correlation": 0.0, "mse": 3.5,
            "rmse": math.sqrt(3.5), "mae": 1.5, "max_abs": 3.0, "mean_error": 0.0,
        }  # fmt: skip


def test_zero_actual() -> None:
    for metrics in both_ways([0.0] * 3, [1.0, -3.0, 2.0]):
        assert metrics["cosine"] == metrics["correlation"] == 0.0
        assert metrics["relative_mse"] == metrics["relative_mae"] == 1.0
        assert metrics["relative_error"] == 100.0
        assert metrics["sqnr_db"] == 0.0


@pytest.mark.parametrize("constant", [0.1, -1e300, 1e-300, 3.0])
def test_a_side_without_variance_has_no_correlation(constant: float) -> None:
    """0.1 is no dyadic number: the mean of many differs from it unless somebody takes care."""
    varied = [constant * (1 + i / 2000) for i in range(1000)]
    for metrics in [*both_ways(varied, [constant] * 1000), *both_ways([constant] * 1000, varied)]:
        assert metrics["correlation"] == 0.0
        assert 0.9 < metrics["cosine"] < 1.0
        assert math.isfinite(metrics["sqnr_db"])


def test_the_mean_of_a_constant_is_the_constant() -> None:
    """The sum of three 0.1, rounded once, divided by three is not 0.1."""
    assert math.fsum([0.1] * 3) / 3 != 0.1
    sums = weighted_sums([1.0, 2.0], [0.1, 0.1], [1, 2])
    assert (sums.mean_reference, sums.m2_reference, sums.co) == (0.1, 0.0, 0.0)
    reference = torch.full((3000,), 0.1, dtype=torch.float64)
    actual = torch.rand(3000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference[7] = math.inf
    assert errors(actual, reference).metric("correlation", finite_only=True) == 0.0


def test_a_constant_stays_one_through_portions_and_merges() -> None:
    reference = torch.full((100_000,), 0.1, dtype=torch.float64)
    actual = reference + torch.linspace(0, 1, 100_000, dtype=torch.float64)
    portion = errors(actual, reference)
    total = portion + errors(actual[:7], reference[:7]) + portion
    assert portion.sums.m2_reference == total.sums.m2_reference == 0.0
    assert total.sums.mean_reference == 0.1
    assert total.metric("correlation") == 0.0
    assert (portion + errors(actual, actual)).metric("correlation") != 0.0


def test_the_smallest_variance_there_is_counts() -> None:
    reference = torch.full((1000,), 0.1, dtype=torch.float64)
    reference[::2] = np.nextafter(0.1, 1)
    stats = errors(reference + reference, reference)
    assert stats.metric("correlation") == pytest.approx(1.0, abs=1e-12)


@EVERY_METRIC
def test_no_pairs_give_nan(name: str) -> None:
    assert math.isnan(METRICS.get(name).function(ErrorSums()))
    assert math.isnan(errors(torch.empty(0), torch.empty(0)).metric(name))


@pytest.mark.parametrize(
    ("size", "step"),
    [
        (1e30, 1e27),
        (1e200, 1e190),
        (1e200, 1e-200),
        (1e308, 1e308),
        (1.7e308, 3e305),
        (2.0**-120, 2.0**-125),
        (1e-200, 1e-202),
        (1e-310, 1e-312),
        (1e-320, 5e-324),
        (1.0, 1e-220),
        (1e-220, 1.0),
        (2.0**400, 2.0**-400),
        (2.0**401, 2.0**-401),
    ],
    ids=str,
)
def test_magnitudes_whose_squares_leave_float64(size: float, step: float) -> None:
    """Neither an error too small to square nor a value too large to square changes the verdict."""
    generator = torch.Generator().manual_seed(5)
    reference = (torch.rand(40, generator=generator, dtype=torch.float64) * 2 - 1) * size
    actual = reference.clone()
    actual[::3] += (torch.rand(14, generator=generator, dtype=torch.float64) - 0.5) * step
    reference[5], actual[5] = 0.0, step
    weights = np.ones(40, np.int64)
    sums = weighted_sums(actual.numpy(), reference.numpy(), weights)
    expected = exact_metrics(actual, reference)
    not_zero = {"mse", "rmse", "mae", "relative_mse", "relative_mae", "relative_error"}
    expected |= {name: max(expected[name], 5e-324) for name in not_zero}
    for error_sums in (errors(actual, reference).sums, sums, ErrorSums() + sums):
        values = {metric.name: metric.function(error_sums) for metric in METRICS.of("errors")}
        agree(values, expected, 1e-12)
        assert all(values[name] > 0 for name in not_zero)


def test_opposite_ends_of_float64_do_not_lose_their_difference() -> None:
    actual = torch.tensor([1.7e308, -1.7e308, 1.0], dtype=torch.float64)
    stats = errors(actual, -actual)
    assert stats.finite
    assert stats.metric("sqnr_db") == pytest.approx(-20 * math.log10(2))
    assert stats.metric("cosine") == -1.0
    assert stats.metric("relative_mae") == pytest.approx(2.0)
    assert stats.metric("mse") == stats.metric("max_abs") == INF
    assert stats.sign_flips == 3
    same = weighted_sums(actual.numpy(), -actual.numpy(), np.ones(3, np.int64))
    assert METRICS.get("sqnr_db").function(same) == stats.metric("sqnr_db")


@pytest.mark.parametrize(
    "sizes", [(1.0, 1e-200, 1e200, 1e-300, 1e190), (1e200, 3e200, 2e202, 1e201, 7e201)], ids=str
)
def test_scales_meet_in_a_merge(sizes: tuple[float, ...]) -> None:
    """In the second case all parts matter, and all have scales of their own."""
    generator = torch.Generator().manual_seed(2)
    parts = []
    for size in sizes:
        reference = (4 + torch.randn(20, generator=generator, dtype=torch.float64)) * size
        noise = torch.randn(20, generator=generator, dtype=torch.float64)
        parts.append((reference + noise * size / 50, reference))
    whole = [torch.cat(side) for side in zip(*parts, strict=True)]
    expected = exact_metrics(*whole)
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 3, 0, 4, 2]):
        total = errors(*parts[order[0]])
        for i in order[1:]:
            total = total + errors(*parts[i])
        merged = total.metrics()
        assert merged["mse"] == INF
        agree(merged | {"mse": 0.0}, expected | {"mse": 0.0}, 1e-12)


def test_a_part_without_error_leaves_the_scale_of_the_error_alone() -> None:
    tiny = torch.tensor([1e-200, 3e-200], dtype=torch.float64)
    one = torch.ones(2)
    tiny, nothing = errors(tiny * 2, tiny), errors(one, one)
    assert (tiny + nothing).metric("mae") == (nothing + tiny).metric("mae") > 0
    decibels = 10 * (math.log10(2) + 399)  # 2 over 1e-400 + 9e-400
    assert (tiny + nothing).metric("sqnr_db") == pytest.approx(decibels, rel=1e-15)


def test_lost_squares_are_nan_and_not_zero() -> None:
    """Sums that somebody filled without scales, from values too small to square."""
    sums = ErrorSums(count=1, sum_square_reference=1.0, max_abs_error=1e-200, sum_abs_error=1e-200,
                     sum_abs_reference=1.0, max_abs_reference=1.0)  # fmt: skip
    for name in ("sqnr_db", "mse", "rmse", "relative_mse", "psnr_db"):
        assert math.isnan(METRICS.get(name).function(sums))
    assert METRICS.get("mae").function(sums) == 1e-200
    reference = dataclasses.replace(sums, sum_square_reference=0.0, sum_square_error=1.0)
    assert math.isnan(METRICS.get("relative_mse").function(reference))


def test_weights_count_repetitions() -> None:
    generator = np.random.default_rng(3)
    actual, reference = generator.normal(size=(2, 50)) + 4
    weights = generator.integers(0, 9, size=50)
    weighted = weighted_sums(actual, reference, weights)
    repeated = [np.repeat(x, weights) for x in (actual, reference)]
    expected = errors(*(torch.from_numpy(x) for x in repeated))
    assert weighted.count == expected.elements == weights.sum()
    agree({m.name: m.function(weighted) for m in METRICS.of("errors")}, expected.metrics(), 1e-12)
    for mine, theirs in zip(
        dataclasses.astuple(weighted), dataclasses.astuple(expected.sums), strict=True
    ):
        assert mine == pytest.approx(theirs, rel=1e-12, abs=1e-12)
