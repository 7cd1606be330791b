"""The results of `errors` against float64 brute force, exact arithmetic, scipy and torch."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from qgate.metrics import METRICS
from qgate.stats._portion import ELEMENTS
from qgate.stats.error_stats import NonFinite, errors
from tests.stats.exact import agree, exact_metrics
from tests.stats.pairs import LARGE, pair

INF, NAN = math.inf, math.nan
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def brute_force(actual: Tensor, reference: Tensor) -> dict[str, float]:
    a, r = actual.double().numpy().ravel(), reference.double().numpy().ravel()
    e = a - r
    mse, mae = np.mean(e**2), np.mean(np.abs(e))
    return {
        "sqnr_db": 10 * np.log10(np.sum(r**2) / np.sum(e**2)),
        "mse": mse,
        "rmse": np.sqrt(mse),
        "mae": mae,
        "max_abs": np.abs(e).max(),
        "mean_error": np.mean(e),
        "relative_mse": mse / np.mean(r**2),
        "relative_mae": mae / np.mean(np.abs(r)),
        "relative_error": 100 * mae / np.mean(np.abs(r)),
        "cosine": torch.cosine_similarity(
            actual.double().flatten(), reference.double().flatten(), dim=0, eps=0
        ).item(),
        "correlation": scipy.stats.pearsonr(a, r).statistic,
        "psnr_db": 20 * np.log10(np.abs(r).max() / np.sqrt(mse)),
    }


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_every_mixture_of_dtypes_against_brute_force(dtypes: tuple[torch.dtype, ...]) -> None:
    actual, reference = (x.to(dtype) for x, dtype in zip(pair(), dtypes, strict=True))
    stats = errors(actual, reference)
    agree(stats.metrics(), brute_force(actual, reference), 1e-12)
    a, r = actual.double(), reference.double()
    assert stats.elements == stats.sums.count == LARGE
    assert stats.metric("max_abs") == (a - r).abs().max().item()
    assert stats.sign_flips == ((a < 0) & (r > 0) | (a > 0) & (r < 0)).sum().item() > 100


@pytest.mark.parametrize("size", [2, 3, 1000, 1024, 1025, 3000])
def test_small_tensors_against_exact_arithmetic(size: int) -> None:
    actual, reference = pair(size)
    agree(errors(actual, reference).metrics(), exact_metrics(actual, reference), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_correlation_where_the_mean_is_far_above_the_spread(dtype: torch.dtype) -> None:
    """The usual sums of squares have no correct digit here."""
    actual, reference = ((x.double() + 1e6).to(dtype) for x in pair(noise=1.0))
    actual[: LARGE // 2] -= 1  # the portions do not share a mean
    expected = exact_metrics(actual, reference)["correlation"]
    assert 0.5 < expected < 0.8
    assert errors(actual, reference).metric("correlation") == pytest.approx(expected, rel=1e-12)
    a, r = actual.double() * 1e3, reference.double() * 1e3
    assert errors(a, r).metric("correlation") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("place", [0, 40_000, LARGE - 1])
def test_one_value_that_is_not_finite(bad: float, side: int, place: int) -> None:
    tensors = [x.clone() for x in pair()]
    tensors[side][place] = bad
    stats = errors(*tensors)
    kinds = NonFinite(int(math.isnan(bad)), int(bad == INF), int(bad == -INF))
    assert stats.actual_non_finite == (kinds if side == 0 else NonFinite())
    assert stats.reference_non_finite == (kinds if side == 1 else NonFinite())
    assert stats.mismatched == 1
    assert stats.elements == LARGE == stats.sums.count + 1
    assert not stats.finite
    assert all(math.isnan(value) for value in stats.metrics().values())
    assert all(math.isnan(value) for value in stats.percentiles().values())
    first = stats.first_non_finite
    assert first is not None
    assert first.index == (first.flat,) == (place,)
    assert repr((first.actual, first.reference)) == repr(tuple(x[place].item() for x in tensors))
    shortened = [torch.cat([x[:place], x[place + 1 :]]) for x in pair()]
    agree(stats.metrics(finite_only=True), errors(*shortened).metrics(), 1e-12)
    assert stats.percentiles(finite_only=True) == errors(*shortened).percentiles()
    assert stats.sign_flips == errors(*shortened).sign_flips


def test_the_first_place_that_is_not_finite_is_kept() -> None:
    actual, reference = (x.clone() for x in pair())
    actual[[9, 50_000]] = reference[[12, 60_000]] = NAN
    first = errors(actual, reference).first_non_finite
    assert first is not None
    assert first.flat == 9


@pytest.mark.parametrize("wide", [0, 1])
def test_one_float64_side_may_be_huge(wide: int) -> None:
    tensors = list(pair(500))
    tensors[wide] = tensors[wide].double() * 1e200
    agree(errors(*tensors).metrics(), exact_metrics(*tensors), 1e-12)


def test_signs_of_numbers_whose_product_has_none() -> None:
    tiny = torch.tensor([1e-200, -1e-200, -1e-200, 0.0, -0.0], dtype=torch.float64)
    assert errors(tiny, tiny.flip(0)).sign_flips == 0
    assert errors(tiny, tiny.roll(1)).sign_flips == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_by_kind_side_and_place(dtype: torch.dtype) -> None:
    values = [1.0, 0.0, NAN, INF, -INF]
    met = list(itertools.product(values, values))
    actual, reference = torch.tensor(met, dtype=dtype).T
    stats = errors(actual, reference)
    assert stats.actual_non_finite == stats.reference_non_finite == NonFinite(5, 5, 5)
    assert stats.mismatched == 25 - 4 - 3
    assert stats.elements == 25
    assert stats.sums.count == 4
    assert stats.metric("mse", finite_only=True) == 0.5
    assert len(stats.worst) == 2


def test_infinities_that_meet_are_no_agreement() -> None:
    for bad in (INF, -INF, NAN):
        stats = errors(torch.tensor([1.0, bad]), torch.tensor([1.0, bad]))
        assert stats.mismatched == 0
        assert stats.actual_non_finite.total == stats.reference_non_finite.total == 1
        assert math.isnan(stats.metric("mse"))
        assert not stats.metric("sqnr_db") >= -INF
        assert stats.metric("mse", finite_only=True) == 0.0
    nothing = errors(torch.tensor([NAN]), torch.tensor([1.0]))
    assert math.isnan(nothing.metric("mse", finite_only=True))
    assert math.isnan(nothing.percentile(50, finite_only=True))


def test_mismatched_portions_full_of_nan() -> None:
    actual, reference = (x.clone() for x in pair())
    actual[1000 : ELEMENTS + 5000] = NAN
    reference[500:1500] = -INF
    finite = torch.isfinite(actual) & torch.isfinite(reference)
    stats = errors(actual, reference)
    assert stats.sums.count == finite.sum().item()
    agree(stats.metrics(finite_only=True), brute_force(actual[finite], reference[finite]), 1e-12)


def slowly_worst(actual: Tensor, reference: Tensor, k: int) -> list[int]:
    size = (actual.double() - reference.double()).abs().numpy().ravel()
    order = np.argsort(-size, kind="stable")[:k]
    return [int(i) for i in order if size[i] > 0]


def inputs_for_worst() -> dict[str, tuple[Tensor, Tensor]]:
    count = 3 * ELEMENTS
    zeros, ramp = torch.zeros(count), torch.arange(count).float()
    few = zeros.clone()
    few[[5, 40_000, 90_000]] = torch.tensor([1.0, -2.0, 1.0])
    coarse = (pair()[0] * 4).round() / 4
    return {
        "noise": pair(),
        "ties": (coarse, torch.zeros(LARGE)),
        "constant": (zeros + 1, zeros),
        "increasing": (ramp, zeros),
        "decreasing": (-ramp.flip(0), zeros),
        "few": (few, zeros),
        "none": (zeros, zeros),
    }


@pytest.mark.parametrize("name", list(inputs_for_worst()))
@pytest.mark.parametrize("k", [0, 1, 10, 1000])
def test_the_worst_elements(name: str, k: int) -> None:
    actual, reference = inputs_for_worst()[name]
    worst = errors(actual, reference, worst=k).worst
    assert [worst_element.flat for worst_element in worst] == slowly_worst(actual, reference, k)
    for element in worst:
        assert element.actual == actual[element.flat]
        assert (
            element.difference == actual[element.flat].double() - reference[element.flat].double()
        )


DIFFERENCES: dict[str, Any] = {
    "normal": lambda g: g.normal(size=LARGE),
    "wide": lambda g: np.exp2(g.uniform(-140, 120, size=LARGE)),
    "float64": lambda g: 10.0 ** g.uniform(-300, 300, size=LARGE),
    "half zero": lambda g: np.maximum(g.normal(size=LARGE), 0),
    "steps": lambda g: g.integers(0, 4, size=LARGE) / 8,
    "constant": lambda _: np.full(LARGE, 0.3),
    "few": lambda g: g.normal(size=3),
    "bin edges": lambda g: 1 + g.integers(0, 512, size=LARGE) / 256,
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_percentiles_within_the_stated_error(name: str) -> None:
    differences = torch.from_numpy(DIFFERENCES[name](np.random.default_rng(4)))
    stats = errors(differences, torch.zeros_like(differences))
    assert stats.percentile_error == 2**-8
    for q in (0, 0.1, 1, 5, 25, 49.9, 50, 75, 90, 95, 99, 99.9, 100):
        expected = np.percentile(differences.abs().numpy(), q, method="inverted_cdf")
        assert abs(stats.percentile(q) - expected) <= 2**-8 * expected, q
        assert stats.percentile(q) <= differences.abs().max()
    assert stats.percentile(100) == stats.metric("max_abs")
    assert stats.percentiles() == {f"p{q}": stats.percentile(q) for q in (50, 90, 95, 99)}


def test_ranks_are_counted_exactly() -> None:
    """16.1 * 1000 / 100 in float64 is more than 161."""
    ramp = 2.0 ** torch.arange(1000, dtype=torch.float64).sub_(500)
    stats = errors(ramp, torch.zeros_like(ramp))
    for q in (0.1, 7.3, 16.1, 65.4, 99.9):
        assert stats.percentile(q) == pytest.approx(ramp[round(q * 10) - 1].item(), rel=2**-8)


def test_plain_data_and_text() -> None:
    actual, reference = (x.view(100, 10).clone() for x in pair(1000))
    stats = errors(actual, reference, channel_axis=1, token_axis=0)
    record = json.loads(json.dumps(stats.to_dict()))
    assert record["metrics"] == stats.metrics()
    assert record["worst"][0]["index"] == list(stats.worst[0].index)
    assert len(record["channels"]["mse"]) == 10
    assert len(record["tokens"]["mse"]) == 100
    text = str(stats)
    assert all(metric.label in text for metric in METRICS.of("errors"))
    assert "worst at" in text
    assert "not finite" not in text
    actual[3, 4] = NAN
    text = str(errors(actual, reference))
    assert "not finite, actual: 1 NaN, 0 +Inf, 0 -Inf" in text
    assert "[3, 4]: nan instead of" in text
