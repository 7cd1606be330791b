"""Files of earlier writers are read, those of later ones refused with what to do.

`files/old` was written by the code as it was: gates, captures and candidates at 923e133, a dump with
SHA-256 at 50dd646, activations at 37826b1.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qgate.activation_stats.files import read_record
from qgate.activation_stats.record import ACTIVATIONS
from qgate.activation_stats.tables import tables_of
from qgate.audits import record as audit_record
from qgate.baselines import accepted, candidates, manifest
from qgate.checkpoints.record import KIND
from qgate.cli import main
from qgate.comparing import layer_files as storing
from qgate.dumps import Dump, layout, problems
from qgate.engine import journal
from qgate.engine.journal import Journal
from qgate.engines.record import KIND as ENGINES
from qgate.errors import QgateError
from qgate.modes import calibration
from qgate.page import data
from qgate.results import read, schema
from qgate.summaries.reading import flushed
from qgate.summaries.record import ANALYSIS

OLD = Path(__file__).parent / "files" / "old"
DOCS = Path(__file__).resolve().parents[2] / "docs"
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, where commands are run."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def said(capsys: Capsys, *argv: str, status: int = 0) -> str:
    assert main(list(argv)) == status
    out, err = capsys.readouterr()
    return out + err


def test_results_are_read_and_reported(old: Path, capsys: Capsys) -> None:
    header, records = read(old / "results.jsonl")
    assert (header["schema"], header["complete"], "exit" in header) == (1, True, False)
    first = next(iter(records))
    assert first["values"]["relative_mse"] == 1.3469126630039585e-05
    said(capsys, "report", "failed.jsonl", "-o", "page.html", "-o", "all.json")
    gates = json.loads((old / "all.json").read_text())["runs"][0]["gates"]
    assert [gate["passed"] for gate in gates] == [False]
    told = said(capsys, "report", "a=failed.jsonl", "b=results.jsonl", "-o", "two.html")
    assert "fixed" in told


def test_candidates_of_version_1_are_refused_and_accepted_errors_migrated(
    old: Path, capsys: Capsys
) -> None:
    for verb in (["verify"], ["list"]):
        status = 1 if verb == ["verify"] else 2
        words = "of version 1, and this qgate reads version 3: run `qgate baselines migrate"
        assert words in said(capsys, "baselines", *verb, status=status)
    before = read_lines(old)
    migrated = said(capsys, "baselines", "migrate")
    assert "accepted/int8.txt: version 1 -> 3, without " in migrated
    assert "record them with --update-baselines" in migrated
    after = read_lines(old)
    assert after == {
        key: value
        for key, value in before.items()
        if key[3] != "quantizer" and not key[3].endswith("@worst_channel")
    }
    assert 0 < len(after) < len(before)
    assert "are as they were recorded" in said(capsys, "baselines", "verify")
    assert "nothing to migrate" in said(capsys, "baselines", "migrate")
    mode = old / "baselines" / "small" / "accepted" / "int8.txt"
    before = mode.read_text()
    told = said(capsys, "baselines", "accept", ".", status=1)
    assert "it is of version 1, whose errors of the worst channel and quantizers are others" in told
    assert mode.read_text() == before


def read_lines(old: Path) -> dict[tuple[str, ...], str]:
    """Return the value of each key in the accepted file, as text."""
    lines = (old / "baselines" / "small" / "accepted" / "int8.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {tuple(row[:4]): row[4] for row in rows}


def test_dumps_are_read_and_verified_by_their_hash(old: Path, capsys: Capsys) -> None:
    dump = Dump.open("dump")
    (first, second) = dump.records()
    assert len(first.tensor.digest) == 64
    expected = torch.arange(64, dtype=torch.bfloat16).reshape(4, 16)
    assert torch.equal(dump.tensor(first), expected)
    assert torch.equal(dump.tensor(second), expected + 1)
    assert dump.counts(first)["counts"].tolist() == [1] * 5
    assert list(problems(dump)) == []
    shard = old / "dump" / "rank00000" / "tensors-000000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 1
    shard.write_bytes(data)
    assert "2 counts" not in said(capsys, "dumps", "verify", "dump", status=1)


def test_a_dump_goes_on_where_it_is_of_the_version_before(old: Path, capsys: Capsys) -> None:
    said(capsys, "dumps", "merge", "dump", "--output", "merged")
    about = json.loads((old / "merged" / "dump.json").read_text())
    assert about["version"] == layout.VERSION == 2
    assert "2 tensors" in said(capsys, "dumps", "verify", "merged")


def test_activations_and_captures_are_read(old: Path, capsys: Capsys) -> None:
    record = read_record(old / "activations.json")
    assert record["kind"] == "qgate activations 1"
    rows = tables_of(record)["formats"]
    assert rows[0]["flushed"] == record["layers"][0]["portrait"]["formats"]["int8"]["flush"] > 0
    assert flushed(record["layers"][0]["portrait"]["formats"]["int8"]) == rows[0]["flushed"]
    assert "int8" in said(capsys, "compare", "int8", "--output-dir", "capture")


# Newer ones --------------------------------------------------------------------------------------


def raised(path: Path, pattern: str, by: str) -> None:
    """A later version in place of the one that is there."""
    text = path.read_text()
    changed = re.sub(pattern, by, text, count=1)
    assert changed != text
    path.write_text(changed)


VERSION = r'"version": ?\d+', '"version": 9'


@pytest.mark.parametrize(
    ("file", "change", "argv", "words"),
    [
        ("results.jsonl", (r'"schema":1,"kind":"header","qgate":"0.1.0"', '"schema":9,"kind":"header","qgate":"0.9.0"'),
         ["report", "results.jsonl"], "has schema 9; qgate 0.1.0 reads schema 1. Read it with qgate 0.9.0."),
        ("baselines/small/manifest.json", VERSION, ["baselines", "verify"], "version 9, and this qgate reads version 2: update"),
        ("baselines/small/accepted/int8.txt", ("version 1", "version 9"), ["baselines", "verify"], "version 9, and this qgate"),
        ("candidates/small-int8.json", VERSION, ["baselines", "accept", "."], "version 9, and this qgate reads version 2: update"),
        ("dump/dump.json", VERSION, ["dumps", "ls", "dump"], "version 9, and this qgate reads versions up to 2: read it with qgate 0.1.0"),
        ("capture/mode_int8_stats.json", VERSION, ["compare", "int8", "--output-dir", "capture"], "version 9, and this qgate reads"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else None,
)  # fmt: skip
def test_newer_files_are_refused(
    old: Path, capsys: Capsys, file: str, change: tuple[str, str], argv: list[str], words: str
) -> None:
    raised(old / file, *change)
    with_version = (old / file).read_bytes()
    assert main(argv) in (1, 2)
    out, err = capsys.readouterr()
    assert words in " ".join((out + err).split())
    assert (old / file).read_bytes() == with_version


@pytest.mark.parametrize("kind", ["qgate activations 9", "qgate dump analysis 9"])
def test_newer_records_of_activations_are_refused(old: Path, kind: str) -> None:
    raised(old / "activations.json", "qgate activations 1", kind)
    with pytest.raises(
        QgateError, match="another version of qgate" if "act" in kind else "no record"
    ):
        read_record(old / "activations.json")


def test_a_newer_journal_is_not_overwritten(tmp_path: Path) -> None:
    with Journal(tmp_path, "request") as made:
        made.record("a", 1)
    raised(made.path, f"journal {journal.VERSION}", "journal 9")
    before = made.path.read_bytes()
    with pytest.raises(
        QgateError, match="'qgate journal 9' and this qgate writes 'qgate journal 1'"
    ):
        Journal(tmp_path, "request")
    assert made.path.read_bytes() == before


# What is told of them ------------------------------------------------------------------------------

VERSIONS: dict[str, Callable[[], int]] = {
    "results.jsonl": lambda: schema.SCHEMA,
    "report.json": lambda: data.SCHEMA,
    "baselines/NAME/manifest.json": lambda: manifest.VERSION,
    "baselines/NAME/accepted/MODE.txt": lambda: accepted.VERSION,
    "baselines/NAME/accepted/MODE@KIND.txt": lambda: accepted.VERSION_WITH_KIND,
    "candidates/*.json": lambda: candidates.VERSION,
    "dump.json": lambda: layout.VERSION,
    "analysis.json": lambda: int(ANALYSIS.split()[-1]),
    "activations.json": lambda: int(ACTIVATIONS.split()[-1]),
    "checkpoint.json": lambda: int(KIND.split()[-1]),
    "engines.json": lambda: int(ENGINES.split()[-1]),
    "mode_MODE_stats.json": lambda: storing.VERSION,
    "calibrations": lambda: calibration.VERSION,
    "audit.json": lambda: audit_record.VERSION,
    ".unfinished-….jsonl": lambda: journal.VERSION,
}


def test_the_page_of_support_has_every_python_and_the_oldest_torch() -> None:
    about = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "support.md").read_text(encoding="utf-8")
    classifiers = [
        text.rpartition(" ")[2] for text in about["classifiers"] if "Python :: 3." in text
    ]
    assert len(classifiers) >= 3
    for version in classifiers:
        assert re.search(rf"^\| .*\b{re.escape(version)}\b.*run", page, re.MULTILINE), version
    (torch,) = [text for text in about["dependencies"] if text.startswith("torch>=")]
    assert f"| {torch.removeprefix('torch>=')}.0 " in page


def test_the_page_has_every_kind_with_its_version() -> None:
    rows = re.findall(
        r"^\| `?([^`|:]+?)`?[ :][^|]*\| (\d+) \| .*\|.*\|$",
        (DOCS / "files.md").read_text(),
        re.MULTILINE,
    )
    assert {name: int(version) for name, version in rows} == {
        name: version() for name, version in VERSIONS.items()
    }
