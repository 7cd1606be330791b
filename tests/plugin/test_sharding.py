"""One run in parts: every test once, groups together, one report of all."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgate.cli import main
from qgate.errors import QgateError
from qgate.plugin.collection import dealt_to
from qgate.results import merge, read
from tests.plugin.conftest import Run
from tests.results.making import record, write
from tests.shares import proof

WHAT = ("--mode", "int8,fp16")


@given(st.lists(st.sampled_from("abcdefgh")), st.integers(1, 6))
def test_groups_stay_whole_and_shards_are_about_equal(groups: list[str], of: int) -> None:
    dealt = dealt_to(groups, of)
    assert all(0 <= shard < of for shard in dealt)
    homes = {}
    for group, shard in zip(groups, dealt, strict=True):
        assert homes.setdefault(group, shard) == shard
    filled = Counter(dealt)
    largest = max(Counter(groups).values(), default=0)
    assert max(filled.values(), default=0) <= len(groups) / of + largest
    # Which of equal groups goes where does not depend on the order they came in.
    backwards = dealt_to(groups[::-1], of)
    assert dict(zip(groups[::-1], backwards, strict=True)) == homes


def nodes(project: Path) -> list[str]:
    return sorted({entry["node"] for entry in read(project / "qgate-out" / "results.jsonl")[1]})


@proof
def test_shards_run_every_test_once_and_merge_to_the_whole_run(
    project: Path, suites: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = suites(*WHAT)
    assert result.ret == 0
    compared = [line for line in result.stdout.lines if line.startswith("compared in ")]
    assert len(compared) == 2, "one for each mode"
    whole = {
        (entry["node"], entry["site"], entry["scope"]): entry["values"]
        for entry in read(project / "qgate-out" / "results.jsonl")[1]
    }
    parts = []
    for number in (1, 2):
        result = suites(*WHAT, "--shard", f"{number}/2")
        assert result.ret == 0
        result.stdout.fnmatch_lines([f"*shard {number}/2: 6 of 12 tests*"])
        result.stdout.no_fnmatch_line("compared in *")
        head, _ = read(project / "qgate-out" / "results.jsonl")
        assert head["shard"] == {"number": number, "of": 2, "complete": True}
        assert not head["complete"], "a part says nothing of what is unused"
        shutil.copytree(project / "qgate-out", tmp_path / f"part{number}")
        parts.append(nodes(project))
    assert sorted(parts[0] + parts[1]) == sorted({node for node, _, _ in whole})
    modes = [{node.partition("-")[2] for node in part} for part in parts]
    assert not modes[0] & modes[1]
    capsys.readouterr()
    folders = [str(tmp_path / f"part{number}") for number in (2, 1)]
    out = tmp_path / "all"
    assert main(["report", *folders, "--merge", str(out), "--exit-code"]) == 0
    merged = capsys.readouterr().out
    assert "of 12 gates, none failed" in merged
    assert [line for line in merged.splitlines() if line.startswith("compared in ")] == compared
    head, records = read(out / "results.jsonl")
    assert (head["complete"], head["shard"]) == (True, None)
    assert whole == {
        (merged_entry["node"], merged_entry["site"], merged_entry["scope"]): merged_entry["values"]
        for merged_entry in records
    }
    assert "12" in (out / "report.html").read_text(encoding="utf-8")
    assert (out / "results.csv").is_file()


def shard(folder: Path, number: int, of: int = 3, **more: object) -> Path:
    part = {"number": number, "of": of, "complete": True, **more}
    return write(
        folder / f"{number}-{of}.jsonl", record(f"s{number}", node=f"n{number}"), shard=part
    )


def test_shards_that_are_missing_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [shard(tmp_path, 1), shard(tmp_path, 3)]
    assert merge(paths, tmp_path / "m.jsonl").missing == (2,)
    head, _ = read(tmp_path / "m.jsonl")
    assert not head["complete"]
    assert head["notes"] == ["shard 2 is missing"]
    command = ["report", *map(str, paths), "--merge", str(tmp_path / "out")]
    assert main(command) == 2
    assert "shard 2 is missing" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    assert main([*command, "--partial"]) == 0


def test_a_shard_that_did_not_end_makes_the_whole_incomplete(tmp_path: Path) -> None:
    paths = [shard(tmp_path, 1, 2), shard(tmp_path, 2, 2, complete=False)]
    assert merge(paths, tmp_path / "m.jsonl").missing == ()
    assert not read(tmp_path / "m.jsonl")[0]["complete"]


def test_parts_of_different_runs_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl", record("s0"))
    for other, words in (
        (shard(tmp_path, 2, 2), "others are of 3"),
        (whole, "is of a whole run, and others are shards"),
    ):
        with pytest.raises(QgateError, match=words):
            merge([shard(tmp_path, 1), other], tmp_path / "m.jsonl")
    (tmp_path / "twice").mkdir()
    with pytest.raises(QgateError, match="both shard 1 of 3"):
        merge([shard(tmp_path, 1), shard(tmp_path / "twice", 1)], tmp_path / "m.jsonl")


def test_the_merged_file_does_not_replace_a_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    path = shard(tmp_path, 1, 1).rename(tmp_path / "out" / "results.jsonl")
    before = path.read_bytes()
    assert main(["report", str(path), "--merge", str(tmp_path / "out")]) == 2
    assert "is one of the files given" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert json.loads(before.splitlines()[0])["shard"]["of"] == 1
