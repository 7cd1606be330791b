"""Reports of runs that are not green although their gates passed, in every form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qgate.cli import main
from qgate.errors import QgateError
from qgate.page.runs import read_run
from qgate.results import read, write_results
from tests.results.making import record, write

OTHER = {"passed": 3, "failed": 1, "skipped": 0, "failures": {"test_x": "assert 0"}}


def forms(
    folder: Path, capsys: pytest.CaptureFixture[str], path: Path
) -> tuple[int, dict[str, str]]:
    capsys.readouterr()
    outputs = [folder / f"out{end}" for end in (".html", ".md", ".json")]
    arguments = [word for output in outputs for word in ("-o", str(output))]
    status = main(["report", str(path), *arguments, "--exit-code"])
    contents = {output.suffix: output.read_text(encoding="utf-8") for output in outputs}
    return status, {**contents, "terminal": capsys.readouterr().out}


def whole(folder: Path, **more: object) -> Path:
    """Four gates that pass, as a run that is over leaves them."""
    path = write(
        folder / "r.jsonl", *(record(f"s{n}", node=f"n{n}") for n in range(4)), exit=0, **more
    )
    header, records = read(path)
    write_results(path, header, list(records))
    return path


def test_a_healthy_run_is_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, contents = forms(tmp_path, capsys, whole(tmp_path))
    assert status == 0
    assert "4 gates passed" in contents[".html"]
    assert contents[".md"].startswith("## qgate: 4 gates passed")
    assert json.loads(contents[".json"])["runs"][0]["passed"] is True


@pytest.mark.parametrize("cut", [-1, -40, "line", "all"])
def test_a_file_that_was_cut_off_is_not_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int | str
) -> None:
    path = whole(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    shortened = {"line": lines[:-1], "all": lines[:1]}.get(str(cut))
    path.write_bytes(b"".join(shortened) if shortened else b"".join(lines)[: int(cut)])
    if cut == -1:
        assert read_run(path).passed, "a last line without its end is whole"
        return
    status, contents = forms(tmp_path, capsys, path)
    assert status == 1
    assert "passed</span>" not in contents[".html"].partition("</h1>")[0]
    assert "did not finish" in contents[".html"].partition("</h1>")[0]
    assert "did not finish" in contents[".md"].splitlines()[0]
    assert "did not come to its end" in contents["terminal"]
    (run,) = json.loads(contents[".json"])["runs"]
    assert (run["passed"], run["finished"]) == (False, False)
    assert run["torn"]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"exit": 1}, "the run failed"),
        ({"exit": 3}, "the run failed"),
        ({"exit": 1, "errors": ["no space left"]}, "the run failed"),
        ({"exit": 1, "broken": {"n9": "no baseline"}}, "set-up failed"),
        ({"exit": 1, "other": OTHER}, "1 other test failed"),
        ({"exit": None}, "did not finish"),
    ],
)
def test_gates_that_passed_do_not_make_a_run_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: dict[str, object], words: str
) -> None:
    path = whole(tmp_path)
    written, records = read(path)
    write_results(path, {**written, **header}, list(records))
    status, contents = forms(tmp_path, capsys, path)
    assert status == 1
    first = contents[".md"].splitlines()[0]
    assert words in first, first
    assert "class='good'>All" not in contents[".html"]
    head = contents["terminal"].partition("wrote")[0]
    assert any(
        reason in head
        for reason in ("exit status", "no space left", "no baseline", "other test", "did not come")
    )
    assert json.loads(contents[".json"])["runs"][0]["passed"] is False


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"exit": 1}, "exit status 1"),
        ({"exit": 1, "broken": {"n9": "no baseline"}}, "1 tests had no verdict"),
        ({"exit": 1, "other": OTHER}, "1 other test failed"),
        ({"shard": {"number": 1, "of": 3, "complete": True}}, "it is shard 1 of 3"),
    ],
)
def test_comparisons_warn_of_runs_that_were_not_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: dict[str, object], words: str
) -> None:
    (tmp_path / "other").mkdir()
    good, bad = whole(tmp_path), whole(tmp_path / "other")
    written, records = read(bad)
    write_results(bad, {**written, **header}, list(records))
    assert main(["report", f"a={good}", f"b={bad}", "-o", str(tmp_path / "x.md")]) == 0
    assert words in capsys.readouterr().out


def test_a_shard_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = whole(tmp_path, shard={"number": 1, "of": 3, "complete": True}, complete=False)
    _, contents = forms(tmp_path, capsys, path)
    assert "4 gates passed of shard 1/3" in contents[".html"]


@pytest.mark.parametrize(
    "wrong",
    [{"passed": "yes"}, {"checks": [{"value": "<b>x</b>"}]}, {"checks": [{"passed": 1}]}],
)
def test_values_of_other_kinds_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    damaged = record("a")
    if "checks" in wrong:
        damaged["checks"] = [{**damaged["checks"][0], **wrong["checks"][0]}]  # type: ignore[index]
    else:
        damaged |= wrong
    path = write(tmp_path / "r.jsonl", record("b"))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(damaged) + "\n")
        file.write(json.dumps(record("c")) + "\n")
    with pytest.raises(QgateError, match=r"r.jsonl:3 is damaged: .*(passed|value)"):
        read_run(path)
