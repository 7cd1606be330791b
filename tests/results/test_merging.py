"""Workers' files put together, and tests that ran again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qgate.errors import QgateError
from qgate.results import merge, read
from tests.results.making import record, write


def test_workers_files_are_put_together_the_same_however_they_ran(tmp_path: Path) -> None:
    records = [record(f"s{n}", order=n, node=f"n{n // 2}") for n in range(6)]
    alone = tmp_path / "alone.jsonl"
    merge([write(tmp_path / "m.jsonl", *records, started="t")], alone)
    for number, split in enumerate(
        [[[0, 1, 2], [3, 4, 5]], [[5, 3, 1], [4, 2, 0]], [[], [5, 4, 3, 2, 1, 0]]]
    ):
        paths = [
            write(tmp_path / f"{number}-{i}.jsonl", *(records[n] for n in part), started="t")
            for i, part in enumerate(split)
        ]
        together = tmp_path / f"{number}.jsonl"
        assert merge(paths, together).records == 6
        assert together.read_bytes() == alone.read_bytes()
    assert list(read(alone)[1]) == records


def test_modes_and_plans_of_workers_are_joined(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", modes=["a"], plans={"a": {}}, started="2")
    two = write(
        tmp_path / "2.jsonl", modes=["b", "a"], plans={"b": {"x": "int8"}, "a": {}}, started="1"
    )
    merge([one, two], tmp_path / "r.jsonl")
    head, _ = read(tmp_path / "r.jsonl")
    assert (head["modes"], head["plans"], head["started"]) == (
        ["a", "b"],
        {"a": {}, "b": {"x": "int8"}},
        "1",
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"commit": "def"}, "its commit is 'def', not 'abc'"),
        ({"seed": 1}, "its seed is 1"),
        ({"device": "cuda"}, "its device"),
        ({"models": {"tiny": {"weights": "ff"}}}, "its models differ for 'tiny'"),
        ({"plans": {"2-1": {}}}, "its plans differ for '2-1'"),
    ],
)
def test_files_of_other_runs_do_not_mix(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    paths = [write(tmp_path / "1.jsonl"), write(tmp_path / "2.jsonl", **given)]
    with pytest.raises(QgateError, match=rf"2\.jsonl is of another run: {words}"):
        merge(paths, tmp_path / "r.jsonl")
    assert not (tmp_path / "r.jsonl").exists()


def test_nothing_to_put_together(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match="no worker left a file"):
        merge([], tmp_path / "r.jsonl")


@pytest.mark.parametrize("swapped", [False, True])
def test_of_a_comparison_made_twice_the_failure_is_kept(tmp_path: Path, swapped: bool) -> None:
    paths = [
        write(tmp_path / "1.jsonl", record("a")),
        write(tmp_path / "2.jsonl", record("a", 1.0)),
    ]
    merge(paths[::-1] if swapped else paths, tmp_path / "r.jsonl")
    assert list(read(tmp_path / "r.jsonl")[1]) == [record("a", 1.0)]


def test_a_torn_worker_file_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "1.jsonl", record("a"), record("b"))
    path.write_bytes(path.read_bytes()[:-9])
    merged = merge([path], tmp_path / "r.jsonl")
    assert merged.records == 1
    assert len(merged.torn) == 1
    assert "1.jsonl:3" in merged.torn[0]
