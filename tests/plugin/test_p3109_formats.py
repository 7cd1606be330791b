"""Formats of IEEE P3109, which have no entry in the list of formats: suites, limits, commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gate.benches import LLAMA, MAMBA, session
from tests.plugin.conftest import SHORT
from tests.plugin.projects import add
from tests.shares import proof

RULE = """
[[limits.rules]]
sites = "."
modes = "{pattern}"
scopes = ["sweep"]
absolute = ["flushed_share<1e-6"]
reason = "nothing may be flushed"
"""


@pytest.fixture
def format_suites(project: Path) -> Path:
    add(project, "test_overflow.py", "test_scaling.py")
    return project


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    paths = ("suites/test_overflow.py", "suites/test_scaling.py")
    words = ("--model", MAMBA, "--layers", "first", "--format", "Binary8P3SE")
    return pytester.runpytest_inprocess(*paths, *SHORT, *words, *options)


@proof
def test_suites_record_and_hold_them_and_limits_name_them(
    pytester: pytest.Pytester, format_suites: Path
) -> None:
    missing = run(pytester)
    missing.assert_outcomes(failed=3)
    missing.stdout.fnmatch_lines(
        [
            "no accepted * (format binary8p3se): record it with --update-baselines*",
            "*to record it: pytest * --format binary8p3se --update-baselines",
        ]
    )
    assert run(pytester, "--update-baselines").ret == 0
    assert list((format_suites / "baselines" / MAMBA).rglob("*binary8p3se*"))
    outcome = run(pytester)
    outcome.assert_outcomes(passed=3)
    outcome.stdout.fnmatch_lines(["*passed, 0 failed | * missing: 0"])
    for pattern in ("binary8p3se", "binary8*"):
        (format_suites / "qgate.toml").write_text(RULE.format(pattern=pattern))
        result = run(pytester)
        assert result.parseoutcomes()["failed"] >= 1
        result.stdout.fnmatch_lines(["flushed_share * (format binary8p3se): absolute limit*"])


@pytest.mark.parametrize("pattern", ["binary8p9se", "binary9*", "bin8*"])
def test_limits_of_names_that_do_not_exist_are_refused(
    pytester: pytest.Pytester, format_suites: Path, pattern: str
) -> None:
    (format_suites / "qgate.toml").write_text(RULE.format(pattern=pattern))
    result = run(pytester)
    assert result.ret != pytest.ExitCode.OK
    words = f"unknown mode pattern '{pattern}'"
    assert words in result.stdout.str() + result.stderr.str()


def test_commands_take_them_as_formats(tmp_path: Path) -> None:
    subject = session(tmp_path, LLAMA).subject
    assert subject.selecting("binary8p3se") == [("format", "binary8p3se")]
    assert subject.selecting("int8") == [("mode", "int8")]
