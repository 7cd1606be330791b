"""What a run leaves for people: its page, the head of its records, and the options that say so."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from qgate.page.pages import write_page
from qgate.page.runs import read_run
from qgate.project.options import OPTIONS
from qgate.results.pictures import PLOTS
from tests.plugin.conftest import Run
from tests.plugin.projects import header, page, records
from tests.shares import proof, share


def drawn(project: Path) -> list[list[str]]:
    """The kinds of pictures of every record."""
    return [
        [picture["kind"] for picture in row.get("pictures", ())] for row in records(project)[1:]
    ]


def test_the_choices_are_those_of_the_contract() -> None:
    assert OPTIONS["plots"].choices == PLOTS


def test_a_run_leaves_a_page_and_names_it(project: Path, suites: Run) -> None:
    result = suites("--layers", "first")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["  report in qgate-out/report.html"])
    lines = [line.strip() for line in result.stdout.lines]
    assert lines[next(i for i, line in enumerate(lines) if "= qgate: " in line) + 1]
    assert "tiny-llama" in page(project)
    head = header(project)
    about = ("exit", "broken", "errors", "notes", "baselines", "update", "complete")
    assert [head[name] for name in about] == [0, {}, [], [], "baselines", None, False]
    kinds = drawn(project)
    assert [kind for kind in kinds if kind] == [["errors"]], "one gate has tensors, one row of it"


@share(4)
@pytest.mark.parametrize("choice", PLOTS)
def test_pictures_are_of_what_may_be_drawn(project: Path, suites: Run, choice: str) -> None:
    result = suites("--layers", "first", "--plots", choice)
    assert result.ret == pytest.ExitCode.OK
    count = sum(map(bool, drawn(project)))
    assert count == (1 if choice in ("worst", "all") else 0)


@proof
@pytest.mark.usefixtures("measured_anew")
def test_without_pictures_nothing_is_computed_for_them(
    suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("qgate.gate.measuring.site_errors.error_picture", never)
    assert suites("--layers", "first", "--plots", "none").ret == pytest.ExitCode.OK


@share(3)
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("no_report = true\nplots = 'none'\n", []),
        ("", ["--no-report", "--plots=none"]),
        ("plots = 'all'\n", ["--qgate-no-report", "--qgate-plots=none"]),
    ],
)
def test_no_page_where_none_is_wanted(
    project: Path, suites: Run, text: str, options: list[str]
) -> None:
    (project / "qgate.toml").write_text(text)
    result = suites("--layers", "first", *options)
    assert result.ret == pytest.ExitCode.OK
    assert not (project / "qgate-out" / "report.html").exists()
    assert "report in" not in result.stdout.str()
    assert not any(drawn(project))


def test_a_conftest_that_owns_the_names_keeps_them(project: Path, suites: Run) -> None:
    (project / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--plots', action='store_true')\n"
        "    parser.addoption('--no-report', default='theirs')\n"
    )
    result = suites("--layers", "first", "--plots", "--no-report=x", "--qgate-plots=none")
    assert result.ret == pytest.ExitCode.OK
    assert page(project)
    assert not any(drawn(project))


def test_a_run_where_every_set_up_failed_has_a_page_that_says_so(
    project: Path, suites: Run
) -> None:
    result = suites("--samples=3")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "passed" not in result.parseoutcomes()
    head = header(project)
    assert head["exit"] == 1
    assert len(head["broken"]) == result.parseoutcomes()["errors"]
    (first, *_) = head["broken"].values()
    assert "\n" not in first
    assert first.split("'")[0][:30] in unescape(page(project))


def test_a_fixture_that_is_not_there_is_told_in_one_line(project: Path, suites: Run) -> None:
    (project / "suites" / "test_own.py").write_text("def test_it(gate, mode, nobody): pass\n")
    suites("--layers", "first")
    (reason,) = header(project)["broken"].values()
    assert reason == "fixture 'nobody' not found"


@pytest.mark.parametrize("error", ["OSError(28, 'disk full')", "ValueError('a bug')"])
def test_a_page_that_cannot_be_made_is_not_green(project: Path, suites: Run, error: str) -> None:
    (project / "conftest.py").write_text(
        "import qgate.page.pages as pages\n"
        f"def fail(*a, **k): raise {error}\n"
        "def pytest_configure(config): config._kept, pages.write_page = pages.write_page, fail\n"
        "def pytest_unconfigure(config): pages.write_page = config._kept\n"
    )
    (project / "qgate-out").mkdir()
    (project / "qgate-out" / "report.html").write_text("of an earlier run")
    result = suites("--layers", "first")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR: report.html could not be made: *"])
    assert (project / "qgate-out" / "results.jsonl").exists()
    assert not (project / "qgate-out" / "report.html").exists()


def test_a_killed_run_leaves_records_that_a_page_can_be_made_of(project: Path, suites: Run) -> None:
    (project / "suites" / "test_zzz.py").write_text(
        "import os\ndef test_it(gate, mode): os._exit(3)\n"
    )
    suites("--layers", "first", alone=True)
    head = header(project)
    assert head["exit"] is None
    assert list(head["models"]) == ["tiny-llama"]
    assert not (project / "qgate-out" / "report.html").exists()
    write_page(project / "late.html", read_run(project / "qgate-out" / "results.jsonl"))
    assert "tiny-llama" in (project / "late.html").read_text(encoding="utf-8")


def test_an_update_is_in_the_header(project: Path, suites: Run) -> None:
    suites("--update-baselines", "--baselines", "none", "--layers", "first", "--plots", "none")
    update = header(project)["update"]
    assert (update["which"], update["done"], update["dry_run"]) == ("failed", True, False)
    assert update["entries"] == len(update["changes"]) > 10
    assert header(project)["baselines"] == "none"
    assert str(project) not in json.dumps({**header(project), "command": []})


@proof
def test_two_workers_leave_one_page(project: Path, suites: Run) -> None:
    result = suites("--layers", "first", "-n", "2", alone=True)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["report in qgate-out/report.html"])
    assert sum(map(bool, drawn(project))) == 1
