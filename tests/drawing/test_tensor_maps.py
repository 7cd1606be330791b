"""Maps against the slow definition: every cell holds the largest value that lies in it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.stats
import torch

from qgate.drawing.tensor_maps import CELLS, tensor_map
from qgate.errors import QgateError

pytestmark = pytest.mark.filterwarnings("error")

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def pooled(table: np.ndarray) -> list[list[float]]:
    rows, columns = (min(n, CELLS) for n in table.shape)
    edges = [
        [i * n // k for i in range(k)] + [n]
        for n, k in zip(table.shape, (rows, columns), strict=True)
    ]
    return [
        [
            float(table[edges[0][i] : edges[0][i + 1], edges[1][j] : edges[1][j + 1]].max())
            for j in range(columns)
        ]
        for i in range(rows)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 50, 64), (300, 200), (97, 1), (1, 1000)], ids=str)
def test_token_maps_hold_the_largest_magnitudes(shape, dtype):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = tensor_map(x, "tokens", title="t", order=3, rank=1)
    table = np.abs(x.double().numpy().reshape(-1, shape[-1]))
    assert got["cells"] == pooled(table)
    assert (got["rows"], got["columns"]) == table.shape
    assert (got["title"], got["order"], got["rank"], got["kind"]) == ("t", 3, 1, "tokens")
    assert "entropy_bits" not in got


@pytest.mark.parametrize("place", [(0, 0), (999, 776), (500, 333), (11, 775), (998, 0)])
def test_a_planted_value_survives_in_a_map(place):
    x = torch.zeros(1000, 777, dtype=torch.bfloat16)
    x[place] = -7.0
    cells = np.array(tensor_map(x)["cells"])
    assert cells.shape == (CELLS, CELLS)
    assert cells.max() == 7.0
    assert np.count_nonzero(cells) == 1
    i, j = np.argwhere(cells)[0]
    assert (i, j) == ((place[0] * 96 + 95) // 1000, (place[1] * 96 + 95) // 777)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 6), (2, 4, 120, 110), (9, 9)], ids=str)
def test_attention_maps_hold_the_largest_means_over_heads(shape, dtype):
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3
    x = scores.softmax(-1).to(dtype)
    got, values = tensor_map(x, "attention"), x.double().numpy()
    mean = values.reshape(-1, *shape[-2:]).mean(axis=0)
    np.testing.assert_allclose(got["cells"], pooled(mean), rtol=1e-6)
    rows = values.reshape(-1, shape[-1])
    entropy = scipy.stats.entropy(rows, base=2, axis=1).mean()
    assert got["entropy_bits"] == pytest.approx(entropy, rel=1e-5)
    assert got["first_key"] == pytest.approx((rows[:, 0] / rows.sum(axis=1)).mean(), rel=1e-5)
    assert (got["rows"], got["columns"]) == shape[-2:]


def test_attention_sinks_and_masks():
    sink = torch.zeros(2, 4, 4)
    sink[..., 0] = 1.0
    got = tensor_map(sink, "attention")
    assert (got["entropy_bits"], got["first_key"]) == (0.0, 1.0)
    even = tensor_map(torch.full((2, 4, 4), 0.25), "attention")
    assert (even["entropy_bits"], even["first_key"]) == (pytest.approx(2.0), 0.25)
    sink[0, 1] = math.nan
    sink[1, 2] = 0.0
    odd = tensor_map(sink, "attention")
    assert (odd["entropy_bits"], odd["first_key"]) == (0.0, 1.0)
    assert odd["cells"][1][0] == 1.0


ODD = {
    "empty": torch.empty(0, 4),
    "no columns": torch.empty(3, 0),
    "scalar": torch.tensor(-2.0),
    "line": torch.arange(200.0),
    "nan": torch.full((3, 3), math.nan),
    "inf": torch.tensor([[math.inf, 1.0], [-math.inf, -3.0]]),
    "zeros": torch.zeros(2, 2, 2, 2),
    "negative": -torch.ones(2, 3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["tokens", "attention"])
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors(name, kind, dtype):
    got = tensor_map(ODD[name].to(dtype), kind)
    json.dumps(got, allow_nan=False)
    assert ("empty" in name or "no " in name) == (got["cells"] == [])
    if name == "inf" and kind == "tokens" and "e4m3" not in str(dtype):
        assert got["cells"] == [[0.0, 1.0], [0.0, 3.0]]
    if name in ("nan", "zeros", "negative", "empty"):
        assert "entropy_bits" not in got


def test_unknown_kinds_of_maps_and_integers_are_refused():
    with pytest.raises(QgateError, match="heat"):
        tensor_map(torch.ones(2, 2), "heat")
    with pytest.raises(QgateError, match="int64"):
        tensor_map(torch.ones(2, 2, dtype=torch.int64))
