"""Tests of a run that are no gates: pytest is red for them, and so is all that is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qgate.cli import main
from tests.plugin.conftest import Run, run_alone
from tests.plugin.projects import header, page, records
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

PLAIN = """
import pytest
def test_fine(): pass
def test_plain(): assert 1 == 2, "two <b>\\nand more"
def test_not_today(): pytest.skip("no")
@pytest.fixture
def bad(): raise ValueError("no kernel")
def test_set_up(bad): pass
@pytest.fixture
def late():
    yield
    raise ValueError("left open")
def test_tear_down(late): pass
@pytest.mark.xfail
def test_known(): assert False
"""
GATES = """
import pytest
def test_before(gate, mode, layer):
    assert not "before"
def test_after(gate, mode, layer):
    gate.layer(mode, layer)
    assert not "after"
@pytest.mark.xfail(strict=True)
def test_strict(gate, mode, layer): gate.layer(mode, layer)
"""


@share(2)
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_a_test_that_is_no_gate_makes_the_run_red(
    project: Path,
    suites: Run,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = project / "step.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (project / "suites" / "test_plain.py").write_text(PLAIN)
    result = suites("--layers", "first", *workers, alone=bool(workers))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    other = header(project)["other"]
    assert [other[name] for name in ("passed", "failed", "skipped")] == [1, 3, 2]
    failure_lines = {node.rpartition("::")[2]: line for node, line in other["failures"].items()}
    assert sorted(failure_lines) == ["test_plain", "test_set_up", "test_tear_down"]
    assert failure_lines["test_plain"] == "AssertionError: two <b>"
    assert failure_lines["test_set_up"] == "ValueError: no kernel"
    for words in ("<h1><span class='fail'>3 other tests failed", "id='others'", "two &lt;b&gt;"):
        assert words in page(project)
    result.stdout.fnmatch_lines(
        ["3 other tests failed, 1 passed, 2 skipped", "* passed, 0 failed |*"]
    )
    result.stdout.fnmatch_lines(["::error title=qgate::other test failed: *no kernel*"])
    markdown = summary.read_text()
    assert markdown.startswith("## qgate: 3 other tests failed, ")
    assert "no kernel" in markdown
    monkeypatch.chdir(project)
    arguments = ["-o", "r.json", "-o", "r.md", "--exit-code"]
    assert main(["report", "qgate-out", *arguments]) == 1
    assert "3 other tests failed" in capsys.readouterr().out
    report = json.loads((project / "r.json").read_text())
    assert report["runs"][0]["passed"] is False
    assert report["runs"][0]["other"]["failed"] == 3
    assert (project / "r.md").read_text().startswith("## qgate: 3 other tests failed")


def test_others_that_pass_are_counted_and_change_nothing(project: Path, suites: Run) -> None:
    (project / "suites" / "test_plain.py").write_text("def test_fine(): pass\n")
    result = suites("--layers", "first")
    assert result.ret == pytest.ExitCode.OK
    assert "other test" not in result.stdout.str()
    assert "<b>1</b> other test passed" in page(project)
    assert "<h1><span class='good'>2 gates passed" in page(project)


def test_a_gate_test_that_fails_by_something_else_is_told(project: Path, suites: Run) -> None:
    for file in (project / "suites").glob("test_*.py"):
        file.unlink()
    (project / "suites" / "test_layer_outputs.py").write_text(GATES)
    result = suites("--layers", "first")
    result.assert_outcomes(failed=3)
    head = header(project)
    names = {node.rpartition("::")[2].partition("[")[0] for node in head["other"]["failures"]}
    assert names == {"test_before", "test_after", "test_strict"}
    assert head["broken"] == {}
    assert "no gate ran" not in result.stdout.str()
    assert "<h1><span class='fail'>3 other tests failed" in page(project)


def test_a_gate_that_fails_as_a_gate_is_told_once(project: Path, suites: Run) -> None:
    suites("--layers", "first", "--samples=3")
    head = header(project)
    assert head["broken"]
    assert head["other"]["failed"] == 0


def test_a_file_that_cannot_be_collected_is_told(project: Path, suites: Run) -> None:
    (project / "suites" / "test_torn.py").write_text("import nothing_like_it\n")
    result = suites("--layers", "first", "--continue-on-collection-errors")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (line,) = header(project)["other"]["failures"].values()
    assert "nothing_like_it" in line
    assert "1 other test failed" in page(project)


@always
def test_without_a_gate_nothing_is_written(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): assert False")
    result = run_alone(pytester)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "other test" not in result.stdout.str()
    assert not (pytester.path / "qgate-out").exists()


@proof
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_what_to_type_is_the_same_everywhere(
    project: Path, suites: Run, workers: list[str]
) -> None:
    """The page says what the failure does, and the command that it gives runs one test."""
    page_of = project / "h.html"
    result = suites(
        "--layers", "first", "--baselines", "none", f"--html={page_of}", "--self-contained-html",
        *workers, alone=bool(workers),
    )  # fmt: skip
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    accept_commands = [line.partition("to record it: ")[2] for line in result.stdout.lines]
    accept = next(filter(None, accept_commands))
    assert accept.startswith("pytest suites --layers first --baselines none --samples 2")
    assert accept.endswith("--model tiny-llama --mode int8 --update-baselines")
    failed = next(record for record in records(project)[1:] if not record["passed"])
    failure_commands = failed["commands"]
    assert failure_commands["accept"] == accept
    assert failure_commands["again"].startswith(f"pytest '{failed['node']}' --layers first")
    assert failure_commands["again"].endswith("--model tiny-llama --mode int8")
    assert f"<code>{accept}</code>" in page(project)
    assert accept in page_of.read_text(encoding="utf-8")
    repeat_words = failure_commands["again"].split()[1:]
    assert suites(*[word.strip("'") for word in repeat_words]).ret == pytest.ExitCode.TESTS_FAILED


def test_a_failed_check_of_a_kernel_is_listed_by_its_finding(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "from qgate.testing import CheckFailure\n"
        "def test_a(): raise CheckFailure('my_gemm is wrong: its bias is lost', None)\n"
        "def test_b(): raise ValueError('no kernel')\n"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(
        [
            "FAILED *::test_a - my_gemm is wrong: its bias is lost",
            "FAILED *::test_b - ValueError: *",
        ]
    )
