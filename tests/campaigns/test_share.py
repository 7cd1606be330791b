"""A small share of the campaigns, and that they can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.bytes import changed_bytes
from tests.campaigns.scenarios import ROOT
from tests.campaigns.wholeness import (
    Tree,
    differing,
    dumped,
    lines_of_results,
    scrubbed,
    strays,
    torn,
    updated_as_one,
)
from tests.shares import every_case, proof

OLD: Tree = {"a.txt": b"old", "b/c.txt": b"old too", "gone.txt": b"x"}
NEW: Tree = {"a.txt": b"new", "b/c.txt": b"new too", "come.txt": b"y"}


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Any]:
    count = "300" if every_case(pytestconfig) else "30"
    home = tmp_path_factory.mktemp("share")
    table = home / "table.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaigns", "share", "--count", count, "--seed", "1",
         "--home", str(home / "cases"), "--json", str(table)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert table.exists(), done.stderr
    return {tally["name"]: tally for tally in json.loads(table.read_text())}


@proof
def test_nothing_is_torn_and_nothing_stays(share: dict[str, Any]) -> None:
    assert [text for tally in share.values() for text in tally["failures"]] == []


@proof
def test_it_hits(share: dict[str, Any]) -> None:
    """Kills come before the change, in the middle of it and after it; disks are seen to be full."""
    kills = [tally for name, tally in share.items() if name.startswith("kills: ")]
    assert len(kills) == 3
    totals = Counter[str]()
    for kill_tally in kills:
        totals.update(kill_tally["seen"])
    assert totals["killed"] >= 9
    assert min(totals["old"], totals["between"], totals["left over"]) > 0
    for campaign in ("disk", "closed"):
        tally_counts = [
            campaign_tally["seen"]
            for name, campaign_tally in share.items()
            if name.startswith(f"{campaign}: ")
        ]
        assert len(tally_counts) == 2
        assert sum(counts.get("told", 0) for counts in tally_counts) >= 2


# The judges ------------------------------------------------------------------------------------


def test_old_new_and_a_step_between_them_are_whole() -> None:
    for now in (OLD, NEW, {"a.txt": b"new", "b/c.txt": b"old too", ".a.txt.part": b"ne"}):
        assert torn(now, OLD, NEW, {}) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({**OLD, "a.txt": b"ne"}, "a.txt is neither old nor new"),
        ({**OLD, "a.txt": b""}, "a.txt is neither old nor new"),
        ({"a.txt": b"old", "gone.txt": b"x"}, "b/c.txt is gone"),
        ({**NEW, "more.txt": b"?"}, "more.txt belongs to nothing"),
    ],
)
def test_what_is_torn_is_told(now: Tree, words: str) -> None:
    (problem,) = torn(now, OLD, NEW, {})
    assert words in problem


def test_what_stays_is_told() -> None:
    assert strays({**NEW, "b/.c.txt.part": b""}, NEW) == ["b/.c.txt.part"]
    assert differing({**NEW, "a.txt": b"old"}, NEW) == ["a.txt is another"]


def below(files: Tree) -> Tree:
    return {f"b/{name}": data for name, data in files.items()}


def test_a_mixture_is_whole_only_with_an_update_that_is() -> None:
    judge = updated_as_one("b")
    old, new = {"x": b"one 1", "y/z": b"two 1"}, {"x": b"one 2", "y/z": b"two 2"}
    half = {"x": b"one 2", "y/z": b"two 1"}
    update = b"x y/z " + b"".join(new.values())
    for now in (old, new, {**half, ".update": update}, {**old, ".update": update}):
        assert judge(below(now), below(old), below(new)) == ""
    for now in (half, {**half, ".update": update[:-3]}, {**half, ".update": update[5:]}):
        assert "mixture" in judge(below(now), below(old), below(new))


def test_files_that_grow_grow_by_lines() -> None:
    head, one, two = b'{"h": 1}\n', b'{"site": "a"}\n', b'{"site": "b"}\n'
    whole = head + one + two
    for now in (head, head + one, head + one + two[:5], whole):
        assert lines_of_results(now, whole) == ""
    assert "no header" in lines_of_results(head[:4], whole)
    assert "none of the run" in lines_of_results(head + b'{"site": "c"}\n', whole)


def test_an_index_names_what_is_there() -> None:
    line = b'{"order":0,"tensor":{"file":"s.safetensors","key":"0"}}\n'
    assert dumped({"r/index.jsonl": line, "r/s.safetensors": b""}, {}, {}) == ""
    assert "not there" in dumped({"r/index.jsonl": line}, {}, {})


def test_times_do_not_count_and_all_else_does() -> None:
    record = b'{"started": "2026-01-02T03:04:05+00:00", "seconds": 0.25, "value": 1.5}'
    later = record.replace(b"2026-01", b"2027-11").replace(b"0.25", b"1e-3")
    assert scrubbed(record) == scrubbed(later)
    assert scrubbed(record) != scrubbed(record.replace(b"1.5", b"1.6"))


# Single bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"), [("baseline", 80), ("dump", 80), ("checkpoint index", 8)]
)
def test_a_changed_byte_is_found_or_harmless(name: str, count: int, tmp_path: Path) -> None:
    tally = changed_bytes(name, tmp_path / "files", count, seed=1)
    assert tally.failures == []
    assert tally.cases == count


def test_a_change_that_nothing_finds_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgate.baselines.checking.edits_of", lambda *_: [])
    monkeypatch.setattr(
        "random.Random.choices",
        lambda _draw, files, _sizes: [p for p in files if p.name == "manifest.json"],
    )
    tally = changed_bytes("baseline", tmp_path / "files", 60, seed=1)
    assert any("manifest.json" in text and "not found" in text for text in tally.failures)
