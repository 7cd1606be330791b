"""Ranks, and layers of ranks and samples, that stand out; healthy ones do not."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from qgate.drawing.rank_differences import (
    FEWEST,
    LIMIT,
    jensen_shannon,
    ranks_of,
    sample_cells,
    stands_out,
)
from qgate.summaries.pooling import pool_of, pool_of_statistics
from tests.shares import share

pytestmark = pytest.mark.filterwarnings("error")


def summary(x: torch.Tensor | None, rank: int, order: int = 0, **fields: Any) -> dict[str, Any]:
    pool = pool_of(x) if x is not None else pool_of_statistics({"min": 0.0, "max": 1.0}, {}, 4)
    return {
        "title": f"L0 linear forward input {order}, rank {rank}, iteration 0",
        "order": order,
        "module": f"layers.{order}",
        "layer_type": "linear",
        "layer": 0,
        "operation": "forward",
        "phase": "pre",
        "component": "linear",
        "name": "input",
        "quant_type": "bf16",
        "rank": rank,
        "iteration": 0,
        "sample": None,
        "micro_batch": None,
        "call": 0,
        "shape": [] if x is None else list(x.shape),
        "dtype": "" if x is None else str(x.dtype)[6:],
        **pool.summary(),
        **fields,
    }


def run(
    seed: int, ranks: int, tensors: int = 6, elements: int = 4096, kind: str = "normal"
) -> list[list[torch.Tensor]]:
    random = np.random.default_rng([seed, ranks])
    draw = {
        "normal": lambda: random.normal(size=elements),
        "laplace": lambda: random.laplace(size=elements),
        "student_t": lambda: random.standard_t(4, size=elements),
    }[kind]
    return [[torch.from_numpy(draw()).bfloat16() for _ in range(tensors)] for _ in range(ranks)]


def found(data: list[list[torch.Tensor]]) -> dict[str, Any]:
    ranks = ranks_of([summary(x, r, i) for r, row in enumerate(data) for i, x in enumerate(row)])
    json.dumps(ranks, allow_nan=False)
    return ranks


@pytest.mark.parametrize("seed", range(20))
def test_jensen_shannon_agrees_with_scipy(seed):
    random = np.random.default_rng(seed)
    p, q = random.integers(0, 20, (2, 30)).astype(float)
    q[:seed] = 0
    assert jensen_shannon(p, q) == pytest.approx(jensenshannon(p, q, base=2), abs=1e-9)
    assert jensen_shannon(p, p * 3) == pytest.approx(0, abs=1e-7)
    disjoint = np.eye(2)
    assert jensen_shannon(disjoint[0], disjoint[1]) == 1.0


@share(6)
@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("kind", ["normal", "laplace", "student_t"])
def test_healthy_ranks_do_not_stand_out(kind, ranks):
    for seed in range(12):
        got = found(run(seed, ranks, kind=kind))
        assert got["stands_out"] is None
        assert max(row["score"] for row in got["rows"]) < LIMIT


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_ten_percent_larger_stands_out(seed, ranks):
    data = run(seed, ranks, elements=16384)
    data[1] = [x * 1.1 for x in data[1]]
    got = found(data)
    assert got["stands_out"] == 1
    assert {t["farthest"] for t in got["tensors"]} == {1}
    assert got["tensors"][0]["factor"] == pytest.approx(1.1, rel=0.05)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("kind", ["normal", "laplace", "student_t"])
def test_a_rank_with_outliers_stands_out(kind, ranks):
    data = run(5, ranks, kind=kind)
    for x in data[2]:
        x[::200] = 40.0
    assert found(data)["stands_out"] == 2


def test_ranks_have_counts_sizes_and_factors():
    data = run(0, 3, tensors=2, elements=100)
    data[1][0][3] = math.nan
    data[1][1][4] = -math.inf
    got = found(data)
    assert [row["rank"] for row in got["rows"]] == [0, 1, 2]
    assert [row["nonfinite"] for row in got["rows"]] == [0, 2, 0]
    assert [row["tensors"] for row in got["rows"]] == [2, 2, 2]
    values = torch.cat(data[0]).double()
    assert got["rows"][0]["amax"] == values.abs().max()
    assert got["rows"][0]["rms"] == pytest.approx(values.square().mean().sqrt().item())
    first = got["tensors"][0]
    assert set(first["rms"]) == set(first["amax"]) == {"0", "1", "2"}
    middle = np.median(list(first["rms"].values()))
    far = first["rms"][str(first["farthest"])] / middle
    assert first["factor"] == pytest.approx(max(far, 1 / far))
    assert ", rank" not in first["title"]
    assert "iteration 0" in first["title"]


def test_one_rank_is_not_compared_and_two_have_no_score():
    assert ranks_of([]) is None
    assert ranks_of([summary(torch.ones(3), 0), summary(torch.ones(3), 0, 1)]) is None
    two = found(run(0, 2))
    assert FEWEST == 3
    assert two["stands_out"] is None
    assert all("distance" in row and "score" not in row for row in two["rows"])


def test_weights_are_equal_or_named():
    x = torch.randn(4, 5).bfloat16()
    other = x.clone()
    other[2, 2] += 1.0
    rows = [summary(x, r, 0, name="weight") for r in range(3)]
    rows += [summary(x if r else other, r, 1, name="weight") for r in range(3)]
    rows += [summary(x.view(5, 4) if r else x, r, 2, name="fc1_weight") for r in range(3)]
    rows += [summary(x * (r + 1), r, 3, name="grad_weight") for r in range(3)]
    rows += [summary(x * (r + 1), r, 4, name="attention_weights") for r in range(3)]
    got = ranks_of(rows)
    assert got["equal_weights"] == 1
    assert [title.split(",")[0][-1] for title in got["unequal_weights"]] == ["1", "2"]
    assert {t["title"].split(",")[0][-1]: t["equal"] for t in got["tensors"]} == {
        "0": True,
        "1": False,
        "2": False,
        "3": False,
        "4": False,
    }


def test_equal_weights_do_not_hide_a_rank():
    data = run(1, 4, elements=16384)
    rows = [
        summary(x * (1.1 if r == 2 else 1), r, i)
        for r, row in enumerate(data)
        for i, x in enumerate(row)
    ]
    rows += [summary(torch.ones(64), r, 10 + i, name="weight") for r in range(4) for i in range(20)]
    got = ranks_of(rows)
    assert (got["stands_out"], got["equal_weights"]) == (2, 20)


def test_tensors_of_equal_fields_are_matched_in_order():
    rows = [
        summary(torch.full((8,), 2.0**i), rank, 10 * rank + i, module="")
        for rank in range(3)
        for i in range(3)
    ]
    got = ranks_of(rows[::-1])
    assert len(got["tensors"]) == 3
    assert all(t["equal"] and t["factor"] == 1.0 for t in got["tensors"])


def test_a_tensor_on_one_rank_is_left_out():
    rows = [summary(torch.ones(4), rank, 0) for rank in range(3)]
    rows.append(summary(torch.ones(4), 2, 1))
    got = ranks_of(rows)
    assert len(got["tensors"]) == 1
    assert [row["tensors"] for row in got["rows"]] == [1, 1, 2]


def test_a_rank_of_zeros_stands_out():
    data = run(0, 4)
    data[3] = [x * 0 for x in data[3]]
    got = found(data)
    assert got["stands_out"] == 3
    assert got["tensors"][0]["factor"] == 2.0**64


@pytest.mark.parametrize(
    "x",
    [torch.empty(0), torch.tensor(3.0), torch.zeros(4), torch.full((2,), math.nan), None],
    ids=["empty", "scalar", "zeros", "nan", "statistics"],
)
def test_odd_tensors(x):
    rows = [summary(copy.copy(x), rank) for rank in range(3)]
    got = ranks_of(rows)
    json.dumps(got, allow_nan=False)
    assert got["stands_out"] is None
    mixed = ranks_of([*rows, summary(torch.randn(50), 3)])
    json.dumps(mixed, allow_nan=False)


def test_the_order_in_which_tensors_come_changes_no_bit():
    data = [
        [torch.randn(50, generator=torch.Generator().manual_seed(i)) * 1.7**i for i in range(6)]
    ] * 3
    summaries = [summary(x, r, i) for r, row in enumerate(data) for i, x in enumerate(row)]
    comparison = ranks_of(summaries)
    assert comparison is not None
    assert repr(ranks_of(summaries[::-1])) == repr(comparison)
    assert repr(ranks_of(summaries[1::2] + summaries[::2])) == repr(comparison)


# Layers of ranks and samples ---------------------------------------------------------------------

LAYERS, TENSORS = 3, 4


def layer_summaries(
    seed: int, members: int, across: str = "rank", kind: str = "normal", fault: Any = None
) -> list[dict[str, Any]]:
    """Layers of tensors that differ in size, on several ranks or of several samples."""
    rows = []
    for member, tensors in enumerate(run(seed, members, LAYERS * TENSORS, 1024, kind)):
        for number, x in enumerate(tensors):
            layer, site = divmod(number, TENSORS)
            y = x * 10.0**site
            y = y if fault is None else fault(member, layer, site, y)
            fields = {"layer": layer, "module": f"layers.{layer}.m{site}"}
            fields["order"] = number + 100 * member
            if across == "sample":
                fields |= {"sample": member, "micro_batch": member, "call": member}
                rows.append(summary(y, 0, **fields, title=f"{fields['module']}, sample {member}"))
            else:
                rows.append(
                    summary(y, member, **fields, title=f"{fields['module']}, rank {member}")
                )
    return rows


def cells_apart(rows: list[dict[str, Any]], across: str = "rank") -> list[dict[str, Any]]:
    cells = sample_cells(rows) if across == "sample" else ranks_of(rows)["cells"]
    assert len(cells) == LAYERS * len({row[across] for row in rows})
    return [cell for cell in cells if cell["stands_out"]]


@share(6)
@pytest.mark.parametrize("across", ["rank", "sample"])
@pytest.mark.parametrize("kind", ["normal", "student_t"])
def test_healthy_members_do_not_stand_out(kind: str, across: str) -> None:
    for seed in range(20):
        assert cells_apart(layer_summaries(seed, 2 + seed % 3, across, kind), across) == []


@pytest.mark.parametrize("across", ["rank", "sample"])
@pytest.mark.parametrize("members", [3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_layer_of_one_member_that_is_larger_is_found(
    seed: int, members: int, across: str
) -> None:
    """Its distance was 13.9 times the others', and no rank was said to stand out."""

    def fault(member: int, layer: int, _site: int, x: Any) -> Any:
        return x * 1.5 if (member, layer) == (2, 1) else x

    (cell,) = cells_apart(layer_summaries(seed, members, across, fault=fault), across)
    assert (cell["member"], cell["layer"]) == (2, 1)
    assert cell["ratio"] > 5
    assert 2 ** cell["log2"] == pytest.approx(1.5, rel=0.1)
    assert cell["title"].startswith("layers.1.m")
    assert cell["title"].endswith(f"{across} 2")


@pytest.mark.parametrize("change", ["three times", "zeros", "outliers"])
def test_one_tensor_of_a_layer_is_found(change: str) -> None:
    def fault(member: int, layer: int, site: int, x: Any) -> Any:
        if (member, layer, site) != (1, 2, 3):
            return x
        x = x.clone()
        x[:: 1 if change == "zeros" else 100] *= {"zeros": 0, "outliers": 500}.get(change, 1)
        return x * 3 if change == "three times" else x

    (cell,) = cells_apart(layer_summaries(0, 3, fault=fault))
    assert (cell["member"], cell["layer"], cell["title"]) == (1, 2, "layers.2.m3, rank 1")


def test_of_two_members_the_layer_is_found() -> None:
    def fault(member: int, layer: int, _site: int, x: Any) -> Any:
        return x * 2 if (member, layer) == (1, 0) else x

    cells = cells_apart(layer_summaries(0, 2, fault=fault))
    assert {cell["layer"] for cell in cells} == {0}


def test_few_peers_say_nothing() -> None:
    rows = [row for row in layer_summaries(0, 2) if row["module"] == "layers.0.m0"]
    assert ranks_of(rows)["cells"] == []
    assert sample_cells(rows) == []


def test_the_limit_is_lower_for_many_tensors() -> None:
    assert stands_out(3.5, 5.0, 100)
    assert not stands_out(3.5, 5.0, 4)
    assert stands_out(1.5, 16.0, 100)
