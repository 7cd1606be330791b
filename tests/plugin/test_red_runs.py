"""A red run: its cause at length and first, what follows in two lines, and nothing of it accepted."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from qgate.cli import main
from tests.plugin.projects import accepted, begin
from tests.plugin.test_failure_page import MODEL
from tests.shares import always, proof, slow_file

pytestmark = slow_file

LAYER = "test_layer_outputs[net.py:build-ours-layers.0]"
OUTPUTS = "test_outputs[net.py:build-ours]"


@pytest.fixture
def net(
    pytester: pytest.Pytester, recorded_once: Callable[..., None]
) -> Callable[..., pytest.RunResult]:
    """Run the suites of layers and outputs on a model of one layer, which has baselines."""
    project = begin(pytester, "test_layer_outputs.py", "test_outputs.py")
    # What follows runs before its cause.
    (project / "suites" / "test_layer_outputs.py").rename(project / "suites" / "test_places.py")
    (project / "net.py").write_text(MODEL)

    def with_fault(fault: str, *options: str) -> pytest.RunResult:
        (project / "fault").write_text(fault)
        return pytester.runpytest_inprocess("suites", "--model", "net.py:build", *options)

    update = ("--mode", "ours,mine,int8", "--update-baselines", "--no-report")
    recorded_once("red runs", project, lambda: with_fault("", *update))
    return with_fault


def blocks_of(result: pytest.RunResult) -> dict[str, list[str]]:
    """Return the lines below the head of each failure, by the name of its test, in order."""
    blocks: dict[str, list[str]] = {}
    name = ""
    for line in result.stdout.lines:
        if line.startswith("=") and blocks:
            break
        if line.startswith("___"):
            name = line.strip("_ ")
            blocks[name] = []
        elif name:
            blocks[name].append(line)
    return blocks


def test_a_cause_is_told_first_and_what_follows_in_two_lines(
    net: Callable[..., pytest.RunResult],
) -> None:
    result = net("half", "--mode", "ours,int8")
    blocks = blocks_of(result)
    assert list(blocks) == [LAYER, OUTPUTS]
    assert len(blocks[LAYER]) == 2
    assert "--update-baselines cannot accept this" in blocks[LAYER][-1]
    finding, relation = blocks[OUTPUTS]
    assert "x accepted" in finding
    assert relation == "  follows from layers.0:output"
    lines = result.stdout.lines
    (listed,) = [line for line in lines if line.startswith("FAILED ")]
    assert listed.startswith("FAILED layers.0:output (net, mode ours) is wrong: ")
    assert listed.endswith(f"::{LAYER}")
    assert " failed, " in lines[-1]
    end = lines[next(n for n, line in enumerate(lines) if line.startswith("cause: ")) :]
    assert end.index("  follows from it: the logits") < 6
    assert any(re.fullmatch(r"  see net\.py:\d+ \w+\.forward(  again: .*)?", line) for line in end)
    assert any(line.startswith("cannot be accepted: ") for line in end)
    assert len(end[: end.index("  report in qgate-out/report.html")]) < 12
    assert "2 of 4 gates failed, 1 fault in ours (green: int8)" in end
    assert not any(line.startswith(("smallest defects", "compared in")) for line in end)
    assert "  report in qgate-out/report.html" in end


@proof
def test_all_of_a_red_run_is_told_where_it_is_asked_for(
    net: Callable[..., pytest.RunResult],
) -> None:
    result = net("half", "--mode", "ours", "-v")
    blocks = blocks_of(result)
    assert next(iter(blocks)) == OUTPUTS
    assert len(blocks[OUTPUTS]) > 2
    result.stdout.fnmatch_lines(
        ["2 of 2 gates failed, 1 fault in ours; comparisons: *", "compared in ours: *"]
    )


@proof
def test_nothing_of_a_mode_is_accepted_beside_what_no_update_can_accept(
    pytester: pytest.Pytester, net: Callable[..., pytest.RunResult],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = accepted(pytester.path, "net", "ours")
    before = file.read_bytes()
    result = net("half", "--mode", "ours", "--update-baselines")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes() == {"failed": 1, "passed": 1}, "nothing was updated"
    result.stdout.fnmatch_lines(["nothing of mode ours is written: no update can accept what *"])
    assert file.read_bytes() == before
    assert net("half", "--mode", "ours").ret == pytest.ExitCode.TESTS_FAILED
    capsys.readouterr()
    assert main(["baselines", "accept", "qgate-out", "--baselines", "baselines"]) == 1
    output = capsys.readouterr()
    assert output.err.count("refused: net: ") == 2
    assert "the mode has values that no update can accept: layers.0:output" in output.err
    assert "0 entries changed, 2 of 2 candidates refused" in output.out
    assert file.read_bytes() == before


@proof
def test_another_mode_is_accepted_beside_a_broken_one(
    pytester: pytest.Pytester, net: Callable[..., pytest.RunResult]
) -> None:
    files = [accepted(pytester.path, "net", mode) for mode in ("ours", "mine")]
    ours, mine = (file.read_bytes() for file in files)
    result = net("half", "--mode", "ours,mine", "--update-baselines")
    assert result.parseoutcomes()["updated"] == 2, "those of the right mode"
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert files[0].read_bytes() == ours
    assert files[1].read_bytes() != mine


@always
def test_what_lacks_accepted_errors_is_told_once(
    pytester: pytest.Pytester, net: Callable[..., pytest.RunResult]
) -> None:
    for file in (pytester.path / "baselines" / "net" / "accepted").iterdir():
        file.unlink()
    result = net("", "--mode", "ours,int8")
    result.assert_outcomes(failed=4)
    (lines,) = blocks_of(result).values()
    assert lines == [
        "4 tests have no accepted errors yet; -v names all",
        "  to record it: pytest suites --model net.py:build --mode ours,int8 --update-baselines",
    ]
    (listed,) = [line for line in result.stdout.lines if line.startswith("FAILED ")]
    assert listed.startswith("FAILED 4 tests have no accepted errors yet - suites/")


@proof
def test_a_run_that_stops_at_the_first_failure_stops_at_its_cause(
    pytester: pytest.Pytester, net: Callable[..., pytest.RunResult]
) -> None:
    suites = pytester.path / "suites"
    (suites / "test_places.py").rename(suites / "test_layer_outputs.py")
    (suites / "test_outputs.py").rename(suites / "test_a_outputs.py")
    result = net("half", "--mode", "ours", "-x")
    assert list(blocks_of(result)) == [LAYER]
    result.stdout.fnmatch_lines(["cause: layers.0:output (net, mode ours) is wrong: *2.02 times*"])
