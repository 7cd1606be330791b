"""Fits against scipy's on real samples; histograms and Q-Q points against numpy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.stats
import torch

from qgate.drawing import fitting
from qgate.drawing.fitting import (
    BINS,
    coarsened,
    fits_of,
    group_summary,
    histogram_of,
    qq_of,
)
from qgate.formats import quantize
from qgate.summaries.pooling import pool_of, pool_of_statistics

pytestmark = pytest.mark.filterwarnings("error")

N = 20_000


def drawn(kind: str, n: int = N, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return {
        "normal": lambda: random.normal(0.3, 2.0, n),
        "laplace": lambda: random.laplace(-1.0, 0.01, n),
        "student_t": lambda: random.standard_t(3.0, n) * 0.5 + 4,
        "cauchy": lambda: random.standard_cauchy(n) * 1e-6,
    }[kind]()


def weighted(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, weights = np.unique(x, return_counts=True)
    return values, weights.astype(np.int64)


@pytest.mark.parametrize("kind", ["normal", "laplace", "student_t", "cauchy"])
def test_fits_agree_with_scipy(kind):
    x = drawn(kind)
    fits, best = fits_of(*weighted(x))
    assert best == ("student_t" if kind == "cauchy" else kind)
    spread = np.median(np.abs(x - np.median(x)))
    mean, std = scipy.stats.norm.fit(x)
    location, scale = scipy.stats.laplace.fit(x)
    for name, parameters in (("normal", (mean, std)), ("laplace", (location, scale))):
        assert fits[name]["location"] == pytest.approx(parameters[0], rel=1e-9, abs=1e-3 * spread)
        assert fits[name]["scale"] == pytest.approx(parameters[1], rel=1e-6)
    frozen = {
        "normal": scipy.stats.norm(mean, std),
        "laplace": scipy.stats.laplace(location, scale),
        "student_t": scipy.stats.t(
            *(fits["student_t"][k] for k in ("freedom", "location", "scale"))
        ),
    }
    for name, distribution in frozen.items():
        exact = distribution.logpdf(x).mean()
        if not math.isfinite(exact):
            continue  # scipy's Laplace ends where its density is no float64 number
        assert fits[name]["log_likelihood"] == pytest.approx(exact, abs=1e-4), name


def test_student_agrees_with_scipy():
    x = drawn("student_t")
    fit = fits_of(*weighted(x))[0]["student_t"]
    freedom, location, scale = scipy.stats.t.fit(x, 3.0, loc=4.0, scale=0.5)
    assert fit["freedom"] == pytest.approx(freedom, rel=1e-3)
    assert fit["location"] == pytest.approx(location, abs=1e-4)
    assert fit["scale"] == pytest.approx(scale, rel=1e-3)
    likelihood = scipy.stats.t(freedom, location, scale).logpdf(x).mean()
    assert fit["log_likelihood"] == pytest.approx(likelihood, abs=1e-5)
    cauchy = fits_of(*weighted(drawn("cauchy")))[0]["student_t"]
    assert cauchy["freedom"] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_many_degrees_of_freedom_are_a_normal(seed):
    fits, best = fits_of(*weighted(drawn("normal", 3000, seed)))
    assert best == "normal"
    assert fits["student_t"]["freedom"] > 15


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_fits_in_other_units_and_dtypes(dtype, scale):
    x = torch.from_numpy(np.random.default_rng(0).standard_t(4.0, 30_000) * scale).to(dtype)
    fit = group_summary(pool_of(x))
    assert fit["best"] == "student_t"
    assert fit["fits"]["student_t"]["freedom"] == pytest.approx(4.0, rel=0.15)
    assert fit["fits"]["student_t"]["scale"] == pytest.approx(scale, rel=0.05)
    assert fit["fits"]["normal"]["scale"] == pytest.approx(fit["std"], rel=1e-2)
    json.dumps(fit, allow_nan=False)


def test_coarsening_keeps_shares_and_means():
    values, weights = weighted(drawn("cauchy"))
    points, shares = coarsened(values, weights)
    assert len(points) <= fitting.POINTS
    assert (np.diff(points) > 0).all()
    assert shares.sum() == pytest.approx(1)
    np.testing.assert_array_equal(points[[0, 1, -1]], values[[0, 1, -1]])
    assert points @ shares == pytest.approx(np.average(values, weights=weights))
    same, _ = coarsened(values[:4096], weights[:4096])
    np.testing.assert_array_equal(same, values[:4096])


def test_many_equal_values_do_not_make_a_spike():
    x = np.concatenate([np.zeros(4000), drawn("normal", 6000)])
    fits, _ = fits_of(*weighted(x))
    assert fits["student_t"]["scale"] > 0.01
    mostly = np.concatenate([np.zeros(9900), drawn("normal", 100)])
    fits, best = fits_of(*weighted(mostly))
    assert set(fits) == {"normal", "laplace"}
    assert best == "laplace"


def test_qq_points_agree_with_numpy_and_scipy():
    x = drawn("normal")
    got = qq_of(*weighted(x))
    np.testing.assert_allclose(got["values"], np.quantile(x, got["p"]), rtol=1e-12)
    np.testing.assert_allclose(got["normal"], scipy.stats.norm.ppf(got["p"]), rtol=1e-9, atol=1e-9)
    assert got["p"] == sorted(set(got["p"]))
    assert min(got["p"]) == 1e-4
    assert max(got["p"]) == pytest.approx(1 - 1e-4)
    assert min(qq_of(*weighted(x[:10]))["p"]) == 0.1


def test_histograms_agree_with_numpy():
    x = torch.from_numpy(drawn("student_t")).bfloat16()
    got, values = group_summary(pool_of(x)), x.double().numpy()
    for name, (low, high) in {
        "histogram": (values.min(), values.max()),
        "core": tuple(np.quantile(values, [0.001, 0.999])),
    }.items():
        histogram = got[name]
        bins = len(histogram["counts"])
        width = (histogram["high"] - histogram["low"]) / bins
        assert histogram["low"] <= low < histogram["low"] + width
        assert histogram["high"] - width <= high < histogram["high"]
        assert 40 < bins <= BINS + 1
        inside = values[(values >= low) & (values <= high)]
        sides = [
            np.histogram(
                sign * inside, bins, sorted((sign * histogram["low"], sign * histogram["high"]))
            )[0]
            for sign in (1, -1)
        ]
        # Half of what is on an edge is on either side.
        assert np.abs(histogram["counts"] - (sides[0] + sides[1][::-1]) / 2).max() < 20
    assert sum(got["histogram"]["counts"]) == N
    assert histogram_of(values, values, 1.0, 1.0) is None


def grids(kind: str) -> np.ndarray:
    """Uniform values on the grid of a format."""
    x = 2 * torch.rand(2**17, generator=torch.Generator().manual_seed(0)) - 1
    if kind == "bf16":
        return x.bfloat16().double().numpy()
    if kind == "int8":
        return (torch.round(x * 127) / 127 * 0.83).bfloat16().double().numpy()
    return quantize(200 * x.reshape(-1, 64), kind).bfloat16().double().numpy()


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8_e4m3", "fp8_e5m2", "hif8", "mxfp8_e4m3"])
def test_histograms_of_grids_are_no_combs(kind):
    """Uniform values: no inner bin is emptier or fuller than those beside it. 160 equal bins of
    E4M3's were empty two times in three."""
    histogram = group_summary(pool_of(torch.from_numpy(grids(kind)).bfloat16()))["histogram"]
    counts = np.array(histogram["counts"], dtype=float)[1:-1]
    assert len(counts) > 8
    assert counts.max() < 1.3 * counts.min()


ODD = {
    "empty": [],
    "one": [3.0],
    "zeros": [0.0] * 5,
    "constant": [0.1] * 7,
    "nan": [math.nan] * 3,
    "two": [1.0, 2.0],
    "two far": [3e38, -3e38, math.inf],
    "tiny": [1e-39, 2e-39, 5e-39],
    "skewed": [0.0] * 1000 + [5.0],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ODD)
def test_fits_of_odd_pools(kind, dtype):
    got = group_summary(pool_of(torch.tensor(ODD[kind], dtype=torch.float64).to(dtype)))
    json.dumps(got, allow_nan=False)
    if kind in ("empty", "one", "zeros", "constant", "nan"):
        assert not {"fits", "best", "qq", "histogram", "core"} & set(got)
    else:
        assert got["best"] in got["fits"]


def test_fits_of_huge_values_and_of_statistics():
    huge = torch.tensor([1e308, -1e308, 1.0, 2.0], dtype=torch.float64)
    json.dumps(group_summary(pool_of(huge)), allow_nan=False)
    alone = group_summary(pool_of_statistics({"min": 0.0, "max": 1.0}, {}, 5))
    assert "fits" not in alone
