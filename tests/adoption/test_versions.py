"""Files of other versions are refused with what to do; results without newer keys are read.

`files/old` was written by the code as it was at 923e133.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qgate.activation_stats.files import read_record
from qgate.activation_stats.record import ACTIVATIONS
from qgate.audits import record as audit_record
from qgate.baselines import Candidate, accepted, candidates, manifest, write_candidate
from qgate.checkpoints.record import KIND
from qgate.cli import main
from qgate.comparing import layer_files as storing
from qgate.dumps import layout
from qgate.engine import journal
from qgate.engine.journal import Journal
from qgate.engines.record import KIND as ENGINES
from qgate.errors import QgateError
from qgate.modes import calibration
from qgate.page import data
from qgate.results import files, read
from qgate.summaries.record import ANALYSIS
from tests.baselines.building import ORIGIN, key, recorded
from tests.dumps.making import write

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
    output = said(capsys, "report", "a=failed.jsonl", "b=results.jsonl", "-o", "two.html")
    assert "fixed" in output


@pytest.mark.usefixtures("old")
def test_captures_are_read(capsys: Capsys) -> None:
    assert "int8" in said(capsys, "layers", "compare", "int8", "--output-dir", "capture")


# Other ones --------------------------------------------------------------------------------------


def raised(path: Path, pattern: str, by: str) -> None:
    """Another version in place of the one that is there."""
    text = path.read_text()
    changed = re.sub(pattern, by, text, count=1)
    assert changed != text
    path.write_text(changed)


def written(folder: Path) -> None:
    """Write files as qgate writes them now, beside the old ones."""
    recorded(folder / "baselines")
    origin = replace(ORIGIN, model="tiny")
    write_candidate(folder / "candidates", Candidate(origin, "int8", "s", {key(): 0.5}))
    write(folder / "dump", [torch.ones(4)])


VERSION = r'"version": ?\d+'


@pytest.mark.parametrize("version", [1, 9])
@pytest.mark.parametrize(
    ("file", "pattern", "argv", "words"),
    [
        ("baselines/tiny/manifest.json", VERSION, ["baselines", "verify"], "version {}, and this qgate reads version 2. {}"),
        ("baselines/tiny/accepted/2-1.txt", "version 3", ["baselines", "verify"], "version {}, and this qgate reads version 3. {}"),
        ("candidates/*.json", VERSION, ["baselines", "accept", "."], "version {}, and this qgate reads version 2. {}"),
        ("dump/dump.json", VERSION, ["dumps", "ls", "dump"], "version {}, and this qgate reads version 2: read it with qgate 0.1.0, or collect again"),
    ],
    ids=["manifest", "accepted errors", "candidate", "dump"],
)  # fmt: skip
def test_files_of_other_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, version: int, file: str,
    pattern: str, argv: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    (path,) = tmp_path.glob(file)
    raised(path, pattern, re.sub(r"\S+$", str(version), pattern.replace(r" ?\d+", " 0")))
    with_version = path.read_bytes()
    assert main(argv) in (1, 2)
    out, err = capsys.readouterr()
    remedy = "Update qgate." if version == 9 else ""
    assert words.format(version, remedy) in " ".join((out + err).split())
    assert path.read_bytes() == with_version


@pytest.mark.parametrize(
    ("file", "change", "argv", "words"),
    [
        ("results.jsonl", (r'"schema":1,"kind":"header","qgate":"0.1.0"', '"schema":9,"kind":"header","qgate":"0.9.0"'),
         ["report", "results.jsonl"], "has schema 9; qgate 0.1.0 reads schema 1. Read it with qgate 0.9.0."),
        ("capture/mode_int8_stats.json", (VERSION, '"version": 9'), ["layers", "compare", "int8", "--output-dir", "capture"], "version 9, and this qgate reads"),
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


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("qgate activations 1", "by another version of qgate: it is a 'qgate activations 1', and"),
        ("qgate activations 9", "by another version of qgate: it is a 'qgate activations 9', and"),
        ("qgate dump analysis 1", "is no record of activations"),
    ],
)
def test_other_records_of_activations_are_refused(tmp_path: Path, kind: str, words: str) -> None:
    (tmp_path / "activations.json").write_text(json.dumps({"kind": kind}))
    with pytest.raises(QgateError, match=words):
        read_record(tmp_path / "activations.json")


def test_a_newer_journal_is_not_overwritten(tmp_path: Path) -> None:
    with Journal(tmp_path, "request") as writer:
        writer.record("a", 1)
    raised(writer.path, f"journal {journal.VERSION}", "journal 9")
    before = writer.path.read_bytes()
    with pytest.raises(
        QgateError, match="'qgate journal 9' and this qgate writes 'qgate journal 1'"
    ):
        Journal(tmp_path, "request")
    assert writer.path.read_bytes() == before


# What is told of them ------------------------------------------------------------------------------

VERSIONS: dict[str, Callable[[], int]] = {
    "results.jsonl": lambda: files.SCHEMA,
    "report.json": lambda: data.SCHEMA,
    "baselines/NAME/manifest.json": lambda: manifest.VERSION,
    "baselines/NAME/accepted/MODE.txt": lambda: accepted.VERSION,
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
