"""A fault in one layer of one rank or sample is found, and healthy ones are not."""

from __future__ import annotations

from typing import Any

import pytest

from qgate.drawing.peers import stands_out
from qgate.drawing.rank_differences import ranks_of, sample_cells
from tests.analysis.test_rank_differences import portrait, run

LAYERS, TENSORS = 3, 4


def portraits(
    seed: int, members: int, across: str = "rank", kind: str = "normal", fault: Any = None
) -> list[dict[str, Any]]:
    """Layers of tensors that differ in size, on several ranks or of several samples."""
    rows = []
    for member, tensors in enumerate(run(seed, members, LAYERS * TENSORS, 1024, kind)):
        for place, x in enumerate(tensors):
            layer, site = divmod(place, TENSORS)
            y = x * 10.0**site
            y = y if fault is None else fault(member, layer, site, y)
            told = {"layer": layer, "module": f"layers.{layer}.m{site}"}
            told["order"] = place + 100 * member
            if across == "sample":
                told |= {"sample": member, "micro_batch": member, "call": member}
                rows.append(portrait(y, 0, **told, title=f"{told['module']}, sample {member}"))
            else:
                rows.append(portrait(y, member, **told, title=f"{told['module']}, rank {member}"))
    return rows


def apart(rows: list[dict[str, Any]], across: str = "rank") -> list[dict[str, Any]]:
    cells = sample_cells(rows) if across == "sample" else ranks_of(rows)["cells"]
    assert len(cells) == LAYERS * len({row[across] for row in rows})
    return [cell for cell in cells if cell["stands_out"]]


@pytest.mark.parametrize("across", ["rank", "sample"])
@pytest.mark.parametrize("kind", ["normal", "student_t"])
def test_healthy_members_do_not_stand_out(kind: str, across: str) -> None:
    for seed in range(20):
        assert apart(portraits(seed, 2 + seed % 3, across, kind), across) == []


@pytest.mark.parametrize("across", ["rank", "sample"])
@pytest.mark.parametrize("members", [3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_layer_of_one_member_that_is_larger_is_found(
    seed: int, members: int, across: str
) -> None:
    """Its distance was 13.9 times the others', and no rank was said to stand out."""

    def fault(member: int, layer: int, _site: int, x: Any) -> Any:
        return x * 1.5 if (member, layer) == (2, 1) else x

    (cell,) = apart(portraits(seed, members, across, fault=fault), across)
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

    (cell,) = apart(portraits(0, 3, fault=fault))
    assert (cell["member"], cell["layer"], cell["title"]) == (1, 2, "layers.2.m3, rank 1")


def test_of_two_members_the_layer_is_found() -> None:
    def fault(member: int, layer: int, _site: int, x: Any) -> Any:
        return x * 2 if (member, layer) == (1, 0) else x

    found = apart(portraits(0, 2, fault=fault))
    assert {cell["layer"] for cell in found} == {0}


def test_few_peers_say_nothing() -> None:
    rows = [row for row in portraits(0, 2) if row["module"] == "layers.0.m0"]
    assert ranks_of(rows)["cells"] == []
    assert sample_cells(rows) == []


def test_the_limit_is_lower_for_many_tensors() -> None:
    assert stands_out(3.5, 5.0, 100)
    assert not stands_out(3.5, 5.0, 4)
    assert stands_out(1.5, 16.0, 100)
