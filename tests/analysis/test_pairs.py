"""Scatters and figures of pairs against numpy."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate.drawing.tensor_pairs import central_range, merged_scatter, pair_figures, scatter_of
from qgate.errors import QgateError
from qgate.summaries.pooling import pool_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def pair(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(40, 50, generator=generator)
    noise = torch.randn(40, 50, generator=generator)
    return (reference + 0.1 * noise).to(dtype), reference.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_figures(dtype):
    actual, reference = pair(dtype)
    got = pair_figures(actual, reference)
    a, r = (side.double().numpy().ravel() for side in (actual, reference))
    assert got["correlation"] == pytest.approx(np.corrcoef(a, r)[0, 1], rel=1e-9)
    assert got["relative_mse"] == pytest.approx(((a - r) ** 2).sum() / (r**2).sum(), rel=1e-9)
    assert got["elements"] == 2000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter(dtype):
    actual, reference = pair(dtype)
    got = scatter_of(actual, reference)
    a, r = (side.double().numpy().ravel() for side in (actual, reference))
    low, high = central_range(pool_of(actual), pool_of(reference))
    assert (got["low"], got["high"]) == (low, high)
    if dtype != torch.float64 and dtype != torch.float32:
        assert low == min(np.quantile(a, 0.001), np.quantile(r, 0.001))
        assert high == max(np.quantile(a, 0.999), np.quantile(r, 0.999))
    wanted, *_ = np.histogram2d(r, a, bins=64, range=[[low, high]] * 2)
    counts = np.array(got["counts"])
    assert counts.shape == (64, 64)
    # numpy moves a value that rounding put beside its bin's edge.
    assert np.abs(counts - wanted).sum() <= 4
    assert counts.sum() + got["outside"] == 2000
    assert 0 < got["outside"] < 40


def test_the_reference_has_the_rows():
    got = scatter_of(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), 2, (0.0, 1.0))
    assert got["counts"] == [[0, 0], [1, 1]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3, width=32), st.floats(-3, 3, width=32)), max_size=40),
    st.integers(0, 40),
)
def test_parts_merge(pairs, cut):
    x = torch.tensor(pairs).reshape(-1, 2)
    whole = scatter_of(x[:, 0], x[:, 1], 8, (-2.0, 2.0))
    parts = [scatter_of(p[:, 0], p[:, 1], 8, (-2.0, 2.0)) for p in (x[:cut], x[cut:])]
    assert merged_scatter(*parts) == whole


def test_other_axes_do_not_merge():
    a, b = (scatter_of(*pair(), 8, (-high, high)) for high in (1.0, 2.0))
    with pytest.raises(QgateError, match="same ends"):
        merged_scatter(a, b)


ODD = {
    "empty": [],
    "one": [2.0],
    "zeros": [0.0, -0.0],
    "constant": [0.5] * 9,
    "nan": [math.nan] * 3,
    "mixed": [math.nan, math.inf, 1.0, 2.0],
    "mostly zero": [0.0] * 5000 + [1.0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ODD)
def test_odd_pairs(kind, dtype):
    x = torch.tensor(ODD[kind]).to(dtype)
    for side in (x, x[0]) if len(x) == 1 else (x,):
        scatter, figures = scatter_of(side, side), pair_figures(side, side)
        json.dumps([scatter, figures], allow_nan=False)
        assert (scatter is None) == (kind not in ("mixed", "mostly zero"))
        if kind in ("empty", "nan"):
            assert set(figures) == {"elements"}
        if kind == "mostly zero":
            assert (scatter["low"], scatter["high"], scatter["outside"]) == (0.0, 1.0, 0)


def test_a_zero_reference_has_no_relative_error():
    got = pair_figures(torch.ones(4), torch.zeros(4))
    assert "relative_mse" not in got
    assert got["correlation"] == 0.0


def test_bad_pairs():
    with pytest.raises(QgateError, match="one shape"):
        scatter_of(torch.ones(3), torch.ones(4))
    with pytest.raises(QgateError, match="one shape"):
        pair_figures(torch.ones(3, 1), torch.ones(3))
    with pytest.raises(QgateError, match="int64"):
        pair_figures(torch.arange(3), torch.arange(3))
    with pytest.raises(QgateError, match="not allowed"):
        scatter_of(torch.ones(3), torch.ones(3), ends=(1.0, 1.0))
    with pytest.raises(QgateError, match="grid 0"):
        scatter_of(torch.ones(3), torch.ones(3), 0)
