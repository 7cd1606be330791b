"""Scatters and figures of pairs against numpy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate.drawing.quant_types import add_scatters, pair_figures, scatter_of
from qgate.errors import QgateError

pytestmark = pytest.mark.filterwarnings("error")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


def pair(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(40, 50, generator=generator)
    noise = torch.randn(40, 50, generator=generator)
    return (reference + 0.1 * noise).to(dtype), reference.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pair_figures_agree_with_numpy(dtype):
    actual, reference = pair(dtype)
    got = pair_figures(actual, reference)
    a, r = (side.double().numpy().ravel() for side in (actual, reference))
    assert got["correlation"] == pytest.approx(np.corrcoef(a, r)[0, 1], rel=1e-9)
    assert got["relative_mse"] == pytest.approx(((a - r) ** 2).sum() / (r**2).sum(), rel=1e-9)
    assert got["elements"] == 2000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatters_agree_with_numpy(dtype):
    actual, reference = pair(dtype)
    got = scatter_of(actual, reference, 64, 2.5)
    a, r = (side.double().numpy().ravel() for side in (actual, reference))
    assert (got["low"], got["high"]) == (-2.5, 2.5)
    histogram, *_ = np.histogram2d(r, a, bins=64, range=[[-2.5, 2.5]] * 2)
    counts = np.array(got["counts"])
    assert counts.shape == (64, 64)
    # numpy moves a value that rounding put beside its bin's edge.
    assert np.abs(counts - histogram).sum() <= 4
    assert counts.sum() + got["outside"] == 2000
    assert 0 < got["outside"] < 60


def test_rows_of_a_scatter_are_the_reference():
    got = scatter_of(torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 1.0]), 2, 1.0)
    assert got["counts"] == [[0, 0], [1, 1]]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-3, 3, width=32), st.floats(-3, 3, width=32)), max_size=40),
    st.integers(0, 40),
)
def test_scatters_of_parts_add_up(pairs, cut):
    x = torch.tensor(pairs).reshape(-1, 2)
    whole = scatter_of(x[:, 0], x[:, 1], 8, 2.0)
    parts = [scatter_of(p[:, 0], p[:, 1], 8, 2.0) for p in (x[:cut], x[cut:])]
    assert add_scatters(*parts) == whole


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
def test_figures_and_scatters_of_odd_pairs(kind, dtype):
    x = torch.tensor(ODD[kind]).to(dtype)
    for side in (x, x[0]) if len(x) == 1 else (x,):
        scatter, figures = scatter_of(side, side, 8, 1.5), pair_figures(side, side)
        json.dumps([scatter, figures], allow_nan=False)
        outside = sum(not abs(value) <= 1.5 for value in ODD[kind])
        assert (np.sum(scatter["counts"]), scatter["outside"]) == (side.numel() - outside, outside)
        if kind in ("empty", "nan"):
            assert set(figures) == {"elements"}


def test_a_zero_reference_has_no_relative_error():
    got = pair_figures(torch.ones(4), torch.zeros(4))
    assert "relative_mse" not in got
    assert got["correlation"] == 0.0


def test_pairs_of_two_shapes_or_of_integers_are_refused():
    with pytest.raises(QgateError, match="one shape"):
        scatter_of(torch.ones(3), torch.ones(4), 8, 1.0)
    with pytest.raises(QgateError, match="one shape"):
        pair_figures(torch.ones(3, 1), torch.ones(3))
    with pytest.raises(QgateError, match="int64"):
        pair_figures(torch.arange(3), torch.arange(3))
