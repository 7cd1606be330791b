"""`qgate report`: what it writes, says and refuses, without torch and pytest."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from qgate.cli import main
from qgate.results.files import COLUMNS
from qgate.storage import files
from tests.adoption.repository import PROGRAMS
from tests.results.making import record, write
from tests.shares import proof

Capsys = pytest.CaptureFixture[str]
SCHEMA = json.loads((Path(__file__).parents[2] / "qgate/results/report.schema.json").read_text())
ODD = "a|b\n<script>alert(1)</script>\x1b[31m\u202e::error::=cmd()"


def run(*args: object) -> int:
    return main(["report", *map(str, args)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run before and after a change, of which one comparison broke."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    write(Path("before/results.jsonl"), record("a"), record("b"), record("c", 1.0))
    write(
        Path("after/results.jsonl"), record("a", 1.0), record("b"), record("c", 1.0),
        commit="def", device="cuda", started="2026-11-21T10:00:00+00:00",
    )  # fmt: skip
    return tmp_path


def test_a_page_is_made_where_nothing_else_is_said(folder: Path, capsys: Capsys) -> None:
    assert run("before/results.jsonl") == 0, "a report of a failed run is a report"
    output = capsys.readouterr().out
    assert "2 passed, 1 failed | 3 checks" in output
    assert "Failures, worst first" in output
    assert "wrote report.html (" in output
    assert "\x1b" not in output
    page = (folder / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "c" in page
    assert "id='comparison'" not in page
    assert sorted(path.name for path in folder.iterdir()) == ["after", "before", "report.html"]


def test_every_ending_is_another_form(folder: Path, capsys: Capsys) -> None:
    assert run("before", *(f"--output=r{end}" for end in (".html", ".md", ".csv", ".json"))) == 0
    assert capsys.readouterr().out.count("wrote r.") == 4
    assert (folder / "r.md").read_text().startswith("## qgate: 1 of 3 gates failed")
    with (folder / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["site"] for row in rows] == ["a", "b", "c"]
    report = json.loads((folder / "r.json").read_text())
    Draft202012Validator(SCHEMA).validate(report)
    assert [gate["site"] for gate in report["runs"][0]["gates"]] == ["c", "a", "b"]
    assert report["comparison"] is None


def test_a_run_is_compared_with_the_first(folder: Path, capsys: Capsys) -> None:
    outputs = [f"--output=r{end}" for end in (".html", ".md", ".csv", ".json")]
    assert run("before", "after", *outputs) == 0
    output = capsys.readouterr().out
    assert "after compared with before" in output
    assert "commit: before abc, after def" in output
    assert (
        "1 broke, 0 fixed, 0 worse, 0 better, 0 new, 0 gone, 2 equal (within 2 %; 1 of them fails)"
        in output
    )
    assert "id='comparison'" in (folder / "r.html").read_text()
    assert "## Comparison: after compared with before" in (folder / "r.md").read_text()
    with (folder / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["group"], row["site"], row["before passed"], row["after passed"]) for row in rows] == [
        ("broke", "a", "true", "false"), ("equal", "c", "false", "false"), ("equal", "b", "true", "true"),
    ]  # fmt: skip
    report = json.loads((folder / "r.json").read_text())
    Draft202012Validator(SCHEMA).validate(report)
    assert report["comparison"]["counts"]["broke"] == 1
    assert [row["site"] for row in report["comparison"]["rows"]] == ["a"]
    assert [one_run["name"] for one_run in report["runs"]] == ["before", "after"]


def test_names_of_runs(folder: Path, capsys: Capsys) -> None:
    def headline() -> str:
        return next(
            line for line in capsys.readouterr().out.splitlines() if "compared with" in line
        )

    assert run("cpu=before", "gpu=after/results.jsonl") == 0
    assert headline() == "gpu compared with cpu"
    assert run("before", "after", "--label", "one", "--label", "two") == 0
    assert headline() == "two compared with one"
    write(folder / "x" / "qgate-out" / "results.jsonl", record("a"))
    write(folder / "y" / "qgate-out" / "results.jsonl", record("a"))
    assert run("x", "y") == 0
    assert headline() == "y compared with x"
    write(folder / "a=b.jsonl", record("a"))
    assert run("a=b.jsonl", "before") == 0
    assert headline() == "results compared with a=b"


@pytest.mark.usefixtures("folder")
def test_the_exit_status_is_of_the_report_unless_asked() -> None:
    assert run("before", "--exit-code") == 1
    write(Path("good.jsonl"), record("a"))
    assert run("good.jsonl", "--exit-code") == 0
    assert run("before", "good.jsonl", "--exit-code") == 0, "the last one counts"
    write(Path("broken.jsonl"), record("a"), broken={"test_x": "it broke"})
    assert run("broken.jsonl", "--exit-code") == 1
    write(Path("nothing.jsonl"))
    assert run("nothing.jsonl", "--exit-code") == 1


@proof
def test_the_recipe_compares_with_the_last_run(folder: Path) -> None:
    """The step of docs/reports.md that keeps the results of a run for the next one."""
    page = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (step,) = [
        step["run"] for step in yaml.safe_load(block) if "qgate report" in step.get("run", "")
    ]
    path = os.pathsep.join([str(PROGRAMS), os.environ["PATH"]])
    outputs = []
    for name in ("before", "after"):
        (folder / "qgate-out").mkdir(exist_ok=True)
        shutil.copy(folder / name / "results.jsonl", folder / "qgate-out")
        done = subprocess.run(
            ["sh", "-e", "-c", step], env={**os.environ, "PATH": path}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        outputs.append(done.stdout)
    assert "compared with" not in outputs[0]
    assert "this compared with last" in outputs[1]
    assert "1 broke" in (folder / "qgate-out" / "pr.md").read_text()


def test_what_kept_gates_from_comparing_is_told(folder: Path, capsys: Capsys) -> None:
    write(
        folder / "r.jsonl",
        record("a"),
        broken={"t1": "kernel refused", "t2": "kernel refused"},
        errors=["disk full"],
    )
    assert run("r.jsonl", "-o", "r.md") == 0
    output = capsys.readouterr().out
    assert "set-up failed, no verdict: t1 and 1 more: kernel refused" in output
    assert "disk full" in output
    assert (
        (folder / "r.md")
        .read_text()
        .startswith("## qgate: no verdict for 2 gates, their set-up failed")
    )


def test_a_torn_end_is_told_and_the_rest_is_shown(folder: Path, capsys: Capsys) -> None:
    path = folder / "before/results.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert run("before", "-o", "r.md", "-o", "r.html") == 0
    output = capsys.readouterr().out
    assert "results.jsonl:4: the last record is torn and left out." in output
    assert "2 passed, 0 failed" in output
    assert "torn" in (folder / "r.md").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["nope.jsonl"],
            "there is no file 'nope.jsonl'; there is after/results.jsonl, before/results.jsonl.",
        ),
        (
            ["befor/results.jsonl"],
            "there is no file 'befor/results.jsonl'; there is before/results.jsonl",
        ),
        (["x=nope"], "there is no file 'nope'"),
        (["=before"], "'=before': write NAME=FILE."),
        (["before", "before/results.jsonl"], "was named twice"),
        (["a=before", "a=after"], "two files are called 'a'"),
        (["before", "--label", "a", "--label", "b"], "--label was given 2 times for 1 files"),
        (["empty"], "the folder 'empty' has no results.jsonl"),
        (["text.txt"], "text.txt is no results file of qgate"),
        (["damaged.jsonl"], "damaged.jsonl:2 is damaged"),
        (["old.jsonl"], "old.jsonl has schema 0"),
        (
            ["before", "-o", "x.pdf"],
            "the ending says what is written, and it is one of .html, .md, .csv, .json.",
        ),
        (["before", "-o", "-"], "the ending says what is written"),
        (["before", "--format", "comment", "-o", "x.html"], "--format comment is Markdown, and"),
        (["before", "-o", "x.md", "-o", "./x.md"], "would be written over"),
        (["before", "after", "old.jsonl"], "3 results were named, and a report compares two"),
        (["before", "-o", "no/x.md"], "there is no folder 'no' for 'x.md'"),
        (["before", "-o", "dir.md"], "'dir.md' is a folder"),
    ],
)
def test_what_cannot_be_done_is_said(
    folder: Path, capsys: Capsys, args: list[str], words: str
) -> None:
    for name in ("empty", "dir.md"):
        (folder / name).mkdir()
    (folder / "text.txt").write_text("hello\n")
    good = (folder / "before/results.jsonl").read_text().splitlines()
    (folder / "damaged.jsonl").write_text("\n".join([good[0], "{", *good[1:]]))
    (folder / "old.jsonl").write_text(good[0].replace('"schema":1', '"schema":0') + "\n")
    for name in ("damaged.jsonl", "old.jsonl"):
        if name not in args:
            (folder / name).unlink()
    before = sorted(path.name for path in folder.iterdir())
    assert run(*args) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert sorted(path.name for path in folder.iterdir()) == before, "nothing is written"


def test_no_permission_is_said(
    folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    (folder / "locked").mkdir()
    monkeypatch.setattr("qgate.storage.files._create", refused)  # root may write everywhere
    assert run("before", "-o", "locked/x.html") == 2
    assert "'locked/x.html': Permission denied; name a file" in capsys.readouterr().err
    assert list((folder / "locked").iterdir()) == []


@pytest.mark.parametrize("bad", ["r.html", "r.md"])
@pytest.mark.parametrize("when", ["making", "full", "moving"])
def test_what_cannot_be_written_leaves_all_as_it_was(
    folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, bad: str, when: str
) -> None:
    """`moving` fails at the first file that is moved: the last output; later ones are stopped."""
    assert run("before", "-o", "r.html") == 0
    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    if when == "moving":
        bad = "r.md"
    make, write_, move = files._create, Path.write_bytes, Path.replace

    def making(path: Path) -> int:
        if when == "making" and path.name == f".{bad}.part":
            raise PermissionError(13, "Permission denied")
        return make(path)

    def full(path: Path, data: bytes) -> int:
        if when == "full" and f".{bad}." in path.name:
            raise OSError(28, "No space left on device")
        return write_(path, data)

    def moving(path: Path, to: Path) -> Path:
        if when == "moving" and Path(to).name == bad:
            raise PermissionError(1, "Operation not permitted", str(path), None, str(to))
        return move(path, to)

    monkeypatch.setattr("qgate.storage.files._create", making)
    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "replace", moving)
    assert run("after", "-o", "r.html", "-o", "r.md") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"qgate report: {bad!r}: ")
    assert captured.out == ""
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_reader_that_leaves_gets_the_files_and_the_status(folder: Path) -> None:
    command = [sys.executable, "-c", _BLOCKED, "report", "before", "-o", "p.html", "--exit-code"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (1, b"")
    assert (folder / "p.html").read_text().startswith("<!DOCTYPE html>")


def test_hostile_names_are_harmless_in_every_form(folder: Path, capsys: Capsys) -> None:
    rows: list[dict[str, Any]] = [
        record(ODD, 1.0, mode=ODD, model=ODD, layer=ODD, suite=ODD, node=ODD),
        record("b"),
    ]
    for name in ("x", "y"):
        write(
            folder / name / "results.jsonl",
            *rows,
            modes=[ODD],
            models={ODD: {"weights": ODD}},
            commit=ODD,
            device=ODD,
        )
    outputs = [f"--output=r{end}" for end in (".html", ".md", ".csv", ".json")]
    assert run("x", "--format", "comment", "-o", "comment.md") == 0
    assert run("x", "y", "--label", ODD, "--label", "=y", *outputs) == 0
    output = capsys.readouterr().out
    for text in (
        output,
        (folder / "r.md").read_text(),
        (folder / "comment.md").read_text(),
        (folder / "r.csv").read_text(),
        (folder / "r.html").read_text(),
    ):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert not any(line.lstrip().startswith("::") for line in output.splitlines())
    for name in ("r.md", "comment.md", "r.html"):
        assert "<script>alert" not in (folder / name).read_text()
    with (folder / "r.csv").open() as file:
        assert not any(cell.startswith(("=", "+", "@")) for row in csv.reader(file) for cell in row)
    Draft202012Validator(SCHEMA).validate(json.loads((folder / "r.json").read_text()))


def test_a_comment_says_what_moved_by_how_much_and_since_when(folder: Path, capsys: Capsys) -> None:
    accepted_at = [{"model": "tiny", "mode": "2-1", "commit": "c0ffee" * 6, "date": "2026-10-02"}]
    rows = [record("a", 1.5e-4), record("b", 0.9e-4), record("c"), record("d", 1e-4, accepted={})]
    write(Path("r.jsonl"), *rows, accepted_at=accepted_at, broken={"t": "kernel refused"})
    before = sorted(path.name for path in folder.iterdir())
    assert run("r.jsonl", "--format", "comment", "--exit-code") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "<!-- qgate report --format comment -->", "## qgate: 1 of 4 gates failed, 1 new, 1 fault in 2-1; no verdict for one gate, its set-up failed"
    ]  # fmt: skip
    assert lines[3].startswith("**cause: a (tiny, mode 2-1) ")
    assert "* set-up failed, no verdict: t: kernel refused" in lines
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert table[2:] == [
        ["a (carried)", "tiny 2-1", "relative&#95;mse", "1.0e-04", "1.5e-04", "+50 %", "failed",
         "2026-10-02, c0ffeec0ffee"],
        ["b (carried)", "tiny 2-1", "relative&#95;mse", "1.0e-04", "9.0e-05", "-10 %", "better",
         "2026-10-02, c0ffeec0ffee"],
    ]  # fmt: skip
    assert "1 comparison within 2 % of what was accepted, 1 comparison without an" in lines[-1]
    assert sorted(path.name for path in folder.iterdir()) == before, "it is only printed"


def test_a_comment_on_two_runs_says_since_which(folder: Path, capsys: Capsys) -> None:
    assert run("before", "after", "--format", "comment") == 0
    out = capsys.readouterr().out
    day = json.loads((folder / "before/results.jsonl").open().readline())["started"][:10]
    assert (
        f"| a (carried) | tiny 2-1 | relative&#95;mse | 1.0e-04 | 1 | 10000x | failed | {day}, abc |"
        in out
    )
    assert "1 comparison within 2 % of before." in out
    assert run("after", "after=before/results.jsonl", "--label", "x", "--format", "comment",
               "-o", "c.md", "-o", "c.json") == 0  # fmt: skip
    assert (folder / "c.md").read_text().startswith("<!-- qgate report")
    assert json.loads((folder / "c.json").read_text())["kind"] == "qgate report"
    write(Path("many.jsonl"), *(record(f"s{number}", 2e-4) for number in range(40)))
    run("many.jsonl", "--format", "comment")
    assert "\n+25 more\n" in capsys.readouterr().out
    write(Path("good.jsonl"), record("a"))
    run("good.jsonl", "--format", "comment")
    assert "\nNothing moved.\n" in capsys.readouterr().out


_BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pytest", "_pytest", "matplotlib", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from qgate.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_it_needs_neither_torch_nor_pytest_nor_matplotlib(folder: Path) -> None:
    arguments = [
        "report",
        "before",
        "after",
        *(f"--output=r{end}" for end in (".html", ".md", ".csv", ".json")),
    ]
    process = subprocess.run(
        [sys.executable, "-c", _BLOCKED, *arguments], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert all((folder / f"r{end}").stat().st_size for end in (".html", ".md", ".csv", ".json"))


def test_the_help_has_examples(capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert "--format comment" in output
    assert "qgate report before=a/results.jsonl" in output
