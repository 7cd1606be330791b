"""What breaks around the gates is told from what the gates found, and nothing is lost over it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Key
from tests.baselines.building import rewrite
from tests.plugin.conftest import Run
from tests.plugin.projects import SITE, accepted, add, files, gist, records, tightened
from tests.shares import proof, share


def test_the_marker_selects_gates(project: Path, suites: Run) -> None:
    (project / "suites" / "test_theirs.py").write_text(
        "import pytest\n@pytest.fixture\ndef gate(): return 1\ndef test_it(gate): assert gate == 1\n"
    )
    suites("-m", "qgate", "--layers", "first").assert_outcomes(passed=2, deselected=5)
    suites("-m", "not qgate", "--layers", "first").assert_outcomes(passed=1, deselected=6)


def test_what_raises_while_a_gate_computes_is_an_error_and_no_failure(
    project: Path, suites: Run
) -> None:
    (project / "suites" / "test_own.py").write_text(
        "def test_kernel(gate, monkeypatch):\n"
        "    def broken(*a): raise RuntimeError('kernel refused')\n"
        "    monkeypatch.setattr(gate.session.bench, 'measure', broken)\n"
        "    gate.layer('int8', 'layers.0')\n"
        "def test_typo(gate): gate.layer('int9', 'layers.0')\n"
        "def test_their_own_assertion(gate): assert not gate\n"
    )
    result = suites("--layers", "first", "-rfE")
    result.assert_outcomes(passed=2, errors=2, failed=1, deselected=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "set-up failed, no verdict: *test_kernel*: RuntimeError: kernel refused",
            "set-up failed, no verdict: *test_typo*: unknown mode 'int9'. Did you mean int8*",
            "ERROR *test_kernel* - RuntimeError: kernel refused",
        ]
    )


def test_a_kernel_that_raises_beside_green_gates_is_said_in_a_few_lines(
    project: Path, suites: Run
) -> None:
    (project / "suites" / "test_own.py").write_text(
        "def test_kernel(gate, monkeypatch):\n"
        "    def broken(*a): raise RuntimeError('kernel refused')\n"
        "    monkeypatch.setattr(gate.session.bench, 'measure', broken)\n"
        "    gate.layer('int8', 'layers.0')\n"
    )
    result = suites("--layers", "first")
    result.assert_outcomes(passed=2, errors=1, deselected=4)
    text = result.stdout.str().partition("= qgate: ")[2].partition("= short test summary")[0]
    lines = text.splitlines()[1:-1]
    assert lines[0].startswith("set-up failed, no verdict: suites/test_own.py::test_kernel")
    assert lines[1] == "no verdict for one gate, its set-up failed"
    assert len(lines) <= 8
    result = suites("--layers", "first", "-v")
    assert "compared in int8" in result.stdout.str()


def test_stale_accepted_errors_are_an_error_before_anything_is_measured(
    project: Path, suites: Run
) -> None:
    rewrite(accepted(project), lambda errors: replace(errors, weights="0" * 64))
    result = suites("--layers", "first")
    result.assert_outcomes(errors=1, deselected=5)
    result.stdout.fnmatch_lines(
        [
            "the accepted errors of mode int8 are stale: *other weights*",
            "*set-up failed, no verdict*",
        ]
    )
    assert json.loads((project / "qgate-out" / "results.jsonl").read_text())["kind"] == "header"


@proof
def test_a_line_edited_by_hand_is_an_error_with_the_command_that_measures_it_again(
    project: Path, suites: Run
) -> None:
    before = files(project)
    file = accepted(project)
    lines = file.read_text().splitlines()
    (index,) = (
        k for k, line in enumerate(lines) if line.split()[1:4] == [SITE, "local", "relative_mse"]
    )
    value = lines[index].split()[4]
    lines[index] = lines[index].replace(value, repr(float(value) * 100))
    file.write_text("\n".join(lines) + "\n")
    result = suites()
    result.assert_outcomes(errors=6)
    result.stdout.fnmatch_lines(
        [
            f"*int8.txt:{index + 1}: layer_outputs {SITE} local relative_mse was edited*not edited "
            "by hand*`pytest suites * --model tiny-llama --mode int8 --update-baselines`*"
        ]
    )
    edited = files(project)
    assert suites("--layers", "first", "--update-baselines").ret == pytest.ExitCode.TESTS_FAILED
    assert files(project) == edited
    assert suites("--update-baselines").parseoutcomes() == {"passed": 5, "updated": 1}
    assert files(project) == before


@proof
def test_another_reference_has_accepted_errors_of_its_own(project: Path, suites: Run) -> None:
    add(project, "test_reference.py")
    before = files(project)
    options = ("--reference", "fp16", "--layers", "first")
    result = suites(*options)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["  to record it: * --reference fp16 *--mode int8 --update-baselines"]
    )
    result = suites(*options, "--update-baselines")
    assert result.ret == pytest.ExitCode.OK
    after = files(project)
    new = {name for name in after if before.get(name) != after[name]}
    assert [name for name in new if "accepted" in name] != []
    assert all("int8" in name and "fp16" in name for name in new), "FP32 references are FP32's"
    suites(*options).assert_outcomes(passed=3)
    suites("--layers", "first").assert_outcomes(passed=3)


def test_a_reference_in_another_basis_is_not_compared(suites: Run) -> None:
    options = ("--model", "tiny-mamba", "--reference", "2-1", "--layers", "first")
    result = suites(*options, "--mode", "int8")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*mode 'int8' is in basis 'plain', and the reference '2-1' in *"])


def test_baselines_that_cannot_be_written_are_an_error_and_stay(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tightened(project)
    before = files(project)

    def refuse(*_args: object) -> None:
        raise OSError(28, "No space left on device", "int8.txt")

    monkeypatch.setattr("qgate.storage.updates.LocalFiles._replace", refuse)
    result = suites("--update-baselines", "--layers", "layers.1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["baselines: nothing written", "ERROR: the baselines in * could not be written: No space*"]
    )
    assert files(project) == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qgate-out", "is a file, and results need a folder of that name: remove it, or give it "
         "another name."),
        ("qgate-out/results.jsonl", "Is a directory; name a file."),
    ],
)  # fmt: skip
def test_results_that_cannot_be_written_do_not_look_green(
    name: str, reason: str, project: Path, suites: Run
) -> None:
    if name == "qgate-out":
        (project / name).write_text("a file where the folder has to be")
    else:
        (project / name).mkdir(parents=True)
    result = suites("--layers", "first")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2)
    errors = [line for line in result.stdout.lines if line.startswith("ERROR: ")]
    message = f"'{project / name}' {reason}"
    if name != "qgate-out":
        message = f"records cannot be written to '{project / name}': {reason}"
    assert errors == [f"ERROR: {message}"]


def test_an_interrupted_run_is_not_called_skipped(project: Path, suites: Run) -> None:
    (project / "suites" / "test_a_first.py").write_text(
        "import pytest\ndef test_first(gate): pytest.exit('enough')\n"
    )
    result = suites("--layers", "first")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["gates held: 0 of *"])
    assert "no gate ran" not in result.stdout.str()


@proof
def test_a_crashed_worker_is_red_and_the_others_are_recorded(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CI the gates that did not run are named."""
    monkeypatch.setenv("CI", "true")
    (project / "suites" / "test_crash.py").write_text(
        "import os\ndef test_crash(gate, mode): os._exit(1)\n"
    )
    result = suites("-n", "2", alone=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["failed"] == 1
    assert result.parseoutcomes()["passed"] == 6
    result.stdout.fnmatch_lines(["*worker 'gw?' crashed while running*test_crash*"])
    result.stdout.fnmatch_lines(
        ["partial run, only 6 of 7 gates were held: 1 not run: worker gw? *"]
    )
    assert records(project)[0]["complete"] is False
    assert {row["node"].partition("[")[0] for row in records(project)[1:]} == {
        "suites/test_layer_outputs.py::test_layer_outputs", "suites/test_task.py::test_task"
    }  # fmt: skip


@proof
def test_an_update_of_two_workers_is_written_in_one_step(project: Path, suites: Run) -> None:
    tightened(project)
    shutil.copytree(project / "baselines", project / "serial")
    suites("--update-baselines", "--update-which", "all", "--baselines", "serial")
    result = suites("--update-baselines", "--update-which", "all", "-n", "2", alone=True)
    assert result.ret == pytest.ExitCode.OK
    assert files(project) == {
        str(p.relative_to(project / "serial")): p.read_bytes()
        for p in (project / "serial").rglob("*")
        if p.is_file()
    }
    assert not list((project / "baselines").rglob("*.lock"))


@proof
def test_unused_accepted_errors_are_told_on_complete_runs(project: Path, suites: Run) -> None:
    gone = Key("layer_outputs", SITE.replace("layers.1.", "layers.7."), "local", "relative_mse")
    rewrite(accepted(project), lambda errors: replace(errors, values=errors.values | {gone: 1.0}))
    result = suites()
    result.stdout.fnmatch_lines(
        ["unused: 1 accepted errors of tiny-llama int8, such as *layers.7.*"]
    )
    assert "unused: " not in str(suites("-k", "task").stdout)
    assert "unused: " not in str(suites("--layers", "first").stdout)


def test_reruns_keep_the_last_attempt(project: Path, suites: Run) -> None:
    tightened(project)
    (project / "conftest.py").write_text(
        "import pytest\n"
        "from _pytest.runner import runtestprotocol\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    for again in range(2):\n"
        "        reports = runtestprotocol(item, nextitem=nextitem, log=False)\n"
        "        last = again or not any(r.failed for r in reports)\n"
        "        for r in reports:\n"
        "            if r.failed and not last: r.outcome = 'rerun'\n"
        "            item.ihook.pytest_runtest_logreport(report=r)\n"
        "        if last: return True\n"
    )
    suites("--layers", "layers.1", alone=True)
    rows = records(project)[1:]
    assert {row["attempt"] for row in rows if "layers.1" in row["node"]} == {1}
    assert {row["attempt"] for row in rows if "task" in row["node"]} == {0}
    assert len({(row["node"], row["site"], row["scope"]) for row in rows}) == len(rows)


@share(12)
@pytest.mark.parametrize(
    "options",
    [("-W", "error"), ("-p", "no:html"), ("-p", "no:xdist"), ("-p", "no:terminal"), ("-s",),
     ("-p", "no:randomly", "--lf"), ("--html=r.html", "--self-contained-html")],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_runs_beside_other_plugins_and_strict_settings(
    pytester: pytest.Pytester, project: Path, suites: Run, options: tuple[str, ...]
) -> None:
    pytester.makepyprojecttoml(
        "[tool.pytest]\nstrict = true\naddopts = ['-p', 'no:cacheprovider']"
        if "--lf" not in options
        else "[tool.pytest]\nstrict = true"
    )
    result = suites("--layers", "first", *options, alone=True)
    assert result.ret == pytest.ExitCode.OK, str(result.stdout) + str(result.stderr)
    assert len(gist(project)) > 20
