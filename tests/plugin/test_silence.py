"""A run that compared nothing, or less than it looks like, is not green."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Key, Store
from qgate.cli import main
from qgate.results import Tally
from tests.plugin.conftest import Run
from tests.plugin.projects import SITE, accepted, add, files, page, records, tightened
from tests.shares import proof, share

OWN = "import pytest\nfrom qgate.gate import Measured\n"


def own(project: Path, text: str, name: str = "test_own.py") -> None:
    for file in (project / "suites").glob("test_*.py"):
        if file.name != name:
            file.unlink()
    (project / "suites" / name).write_text(OWN + text)


@proof
def test_the_reference_alone_is_nothing_to_compare(suites: Run) -> None:
    for workers in ([], ["-n", "1"]):
        result = suites("--mode", "fp32", *workers, alone=bool(workers))
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "nothing is selected" in str(result.stderr) + str(result.stdout)


@proof
def test_gates_that_all_skip_are_no_green_run(project: Path, suites: Run) -> None:
    own(project, "def test_it(gate, mode): pytest.skip('not today')\n")
    result = suites()
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["no gate ran: all of them were skipped"])


def test_sites_that_are_gone_are_in_records_and_candidates(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = Store(project / "baselines", "tiny-llama").accepted("int8")
    assert baseline is not None
    key = Key("layer_outputs", "model.layers.0.mlp.gone_proj:output", "local", "relative_mse")
    accepted(project).write_bytes(
        replace(baseline, values={**baseline.values, key: 0.5}).to_bytes()
    )
    result = suites("--layers", "first")
    result.assert_outcomes(passed=1, failed=1)
    (row,) = (row for row in records(project)[1:] if not row["passed"])
    assert (row["site"], row["checks"][0]["kind"]) == (
        "model.layers.0.mlp.gone_proj:output",
        "absent",
    )
    result.stdout.fnmatch_lines(
        ["cause: *gone_proj:output*", "1 of 2 gates failed, 1 fault in int8"]
    )
    monkeypatch.chdir(project)
    assert main(["baselines", "accept"]) == 0
    suites("--layers", "first").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("absolute=['relative_mse<1e-12'], sites='nothing_like_this'", "matches no site"),
        ("absolute=['relative_mse<1e-12'], modes='imt8'", "unknown mode pattern 'imt8'"),
        ("absolute=['bits_per_byte<0.001']", "it limits nothing"),
    ],
)
def test_a_limit_that_limits_nothing_is_an_error(
    project: Path, suites: Run, marker: str, words: str
) -> None:
    own(
        project,
        f"@pytest.mark.limits({marker})\ndef test_it(gate, mode, layer): gate.layer(mode, layer)\n",
    )
    result = suites("--layers", "first")
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.TESTS_FAILED)
    assert words in str(result.stderr) + str(result.stdout)
    assert "passed" not in result.parseoutcomes()


def test_a_dry_run_is_no_free_green(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")
    which = ("--update-dry-run", "--update-which", "new")
    result = suites(*which, "--baselines", "none", "--layers", "first", "--allow-partial")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["baselines: * entries would change"])
    assert not (project / "none").exists()


MEASURED = (
    "def m(site, value): return [Measured(site=site, layer='', scope='task', order=0, nonfinite=0,\n"
    "    values={'kl_divergence': value}, gated=('kl_divergence',))]\n"
)


ASKED = "def test_it(gate, mode): gate(m('mine', 1.0), mode)\n"
WITHOUT_VERDICT = {
    "never asked": ("def test_it(gate, mode): pass\n", "the gate of this test was never"),
    "accepted errors of its own": (
        MEASURED.replace("gated=", "accepted={'kl_divergence': 1.0}, gated=") + ASKED,
        "brings accepted errors of its own",
    ),
    "what no report could read": (
        MEASURED.replace("gated=", "pictures=({'kind': 'errors'},), gated=") + ASKED,
        "measured at mine cannot be recorded: pictures[[]0[]].elements is missing",
    ),
    "their own fixture": (
        "@pytest.fixture\ndef model(): return 1\ndef test_it(gate): gate.canary()\n",
        "a gate needs qgate's fixture `model`",
    ),
}


@share(4)
@pytest.mark.parametrize(("text", "words"), WITHOUT_VERDICT.values(), ids=WITHOUT_VERDICT)
def test_a_gate_without_a_verdict_is_an_error(
    project: Path, suites: Run, text: str, words: str
) -> None:
    own(project, text)
    result = suites()
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"set-up failed, no verdict: *{words}*"])
    assert page(project)


@proof
def test_measurements_of_ones_own_are_recorded_and_held(project: Path, suites: Run) -> None:
    own(
        project,
        MEASURED + "def test_one(gate, mode): gate(m('mine.one', 0.5), mode)\n"
        "def test_two(gate, mode): gate(m('mine.two', 0.25), mode)\n",
    )
    suites().assert_outcomes(failed=2)
    assert suites("--update-baselines").parseoutcomes() == {"updated": 2}
    suites().assert_outcomes(passed=2)
    suites("--update-baselines").assert_outcomes(passed=2)
    file = project / "suites" / "test_own.py"
    file.write_text(file.read_text().replace("0.25", "0.75"))
    result = suites()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["kl_divergence 0.75 > 0.255 at mine.two (mode int8): 3x accepted"])


@proof
def test_two_tests_of_one_name_do_not_overwrite_each_other(project: Path, suites: Run) -> None:
    own(
        project,
        MEASURED + "def test_one(gate, mode): gate(m('mine', 0.5), mode)\n"
        "def test_two(gate, mode): gate(m('mine', 0.25), mode)\n",
    )
    before = files(project)
    for workers in ([], ["-n", "1"]):
        result = suites("--update-baselines", *workers, alone=bool(workers))
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["ERROR: *measured different errors under one name*"])
        assert files(project) == before


def test_accepting_a_candidate_makes_the_baseline_of_an_update(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted(project).unlink()
    suites("--layers", "first")
    monkeypatch.chdir(project)
    assert main(["baselines", "accept"]) == 0
    by_accept = accepted(project).read_bytes()
    accepted(project).unlink()
    suites("--layers", "first", "--update-baselines")
    assert by_accept == accepted(project).read_bytes()
    assert b"@worst_channel" in by_accept


def test_what_a_failing_test_measured_is_not_recorded(project: Path, suites: Run) -> None:
    own(project, "def test_it(gate, mode, layer):\n    gate.layer(mode, layer)\n    assert False\n")
    before = files(project)
    result = suites("--update-baselines", "--update-which", "all", "--layers", "first")
    result.assert_outcomes(failed=1)
    assert files(project) == before


@proof
def test_an_update_with_a_crashed_worker_writes_nothing(project: Path, suites: Run) -> None:
    tightened(project)
    (project / "suites" / "test_z.py").write_text(
        "import os\ndef test_z(gate, mode): os._exit(3)\n"
    )
    before = files(project)
    result = suites("--update-baselines", "-n", "1", alone=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR: worker gw? went down with what it had measured*"])
    assert files(project) == before


def test_skipped_gates_do_not_make_others_unused(project: Path, suites: Run) -> None:
    (project / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items): items[:] = items[:-1]\n"
    )
    result = suites()
    assert "unused: " not in str(result.stdout)
    assert records(project)[0]["complete"] is False


def test_an_expected_failure_is_not_recorded_as_passed_and_proposes_nothing(
    project: Path, suites: Run
) -> None:
    tightened(project)
    mark = "\nimport pytest\npytestmark = pytest.mark.xfail(reason='bug 17')\n"
    with (project / "suites" / "test_layer_outputs.py").open("a") as file:
        file.write(mark)
    assert suites().ret == pytest.ExitCode.OK
    rows = records(project)[1:]
    (failed,) = (row for row in rows if not row["passed"])
    assert (failed["site"], failed["xfailed"]) == (SITE, "bug 17")
    assert "commands" not in failed
    assert not any("xfailed" in row for row in rows if row["layer"] != "layers.1")
    assert Tally(rows).counts.failed == 0
    assert not (project / "qgate-out" / "candidates").exists()
    assert not any(row["layer"] == "layers.1" for row in rows if "xfailed" not in row)


@share(4)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import datetime; record['when'] = datetime.datetime.now()", "not JSON serializable"),
        ("record.pop('checks')", "checks is missing"),
        ("record['pictures'] = [{'kind': 'errors'}]", "pictures[[]0[]].elements is missing"),
        ("raise RuntimeError('no network')", "no network"),
    ],
)
def test_a_hook_that_breaks_a_record_is_named(
    project: Path, suites: Run, body: str, words: str
) -> None:
    (project / "conftest.py").write_text(f"def pytest_qgate_record(item, record):\n    {body}\n")
    result = suites("--layers", "first")
    result.assert_outcomes(errors=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*a hook pytest_qgate_record broke the record of*{words}*"])


def test_broken_gates_are_told_to_github(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(project, "def test_it(gate, mode): raise gate.layer('int9', 'layers.0')\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project / "summary.md"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = suites()
    assert "unknown mode" in (project / "summary.md").read_text()
    result.stdout.fnmatch_lines(["::error title=qgate::*unknown mode 'int9'*"])


def test_no_name_of_a_model_gives_orders_to_github(project: Path, suites: Run) -> None:
    (project / "conftest.py").write_text(
        "import torch, qgate\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in 'ab')\n"
        "    def forward(self, x): return self.layers[1](self.layers[0](x))\n"
        "def build(): return qgate.Model(Net(), [torch.ones(1, 4)], 'a\\n::error::x <script>')\n"
        "def pytest_qgate_models(config): return {'mine': build}\n"
    )
    result = suites("--model", "mine")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert not [line for line in result.stdout.lines if line.startswith("::error::x")]


@proof
@pytest.mark.usefixtures("measured_anew")
def test_an_update_of_new_entries_leaves_the_reference(project: Path, suites: Run) -> None:
    add(project, "test_reference.py")
    (project / "conftest.py").write_text(
        "import torch.nn.functional as F\nplain = F.silu\nF.silu = lambda x, *a: plain(x, *a) * 1.02\n"
        "import qgate.models.llama as llama\n"
        "for name in ('silu',):\n"
        "    if hasattr(llama, name): setattr(llama, name, F.silu)\n"
    )
    before = files(project)
    assert suites("-k", "reference", alone=True).ret == pytest.ExitCode.TESTS_FAILED
    result = suites("-k", "reference", "--update-baselines", "--update-which", "new", alone=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert files(project) == before
    result = suites("-k", "reference", "--update-baselines", alone=True)
    assert result.parseoutcomes()["updated"] == 1
    assert files(project) != before


def test_markers_take_lists_and_name_themselves(project: Path, suites: Run) -> None:
    own(
        project,
        "@pytest.mark.qgate_modes(['int8', 'fp16'])\n"
        "def test_it(gate, mode, layer): gate.layer(mode, layer)\n",
    )
    suites("--layers", "first").assert_outcomes(failed=2, deselected=8)
    own(project, "@pytest.mark.qgate_formats('nope')\ndef test_it(fmt): pass\n")
    result = suites()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*marker qgate_formats of test_it: *unknown format 'nope'*"])


def test_two_modes_of_one_name_are_refused(project: Path, suites: Run) -> None:
    for name in ("int8", "mine"):
        (project / "conftest.py").write_text(
            "from qgate.modes import Mode, Rule\ndef pytest_qgate_modes(config):\n"
            f"    return 2 * [Mode('{name}', 'x', rules=(Rule(':weight$', 'int8'),))]\n"
        )
        result = suites()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert f"pytest_qgate_modes brings mode '{name}'" in str(result.stderr)


def test_a_module_called_qgate_is_no_gate(pytester: pytest.Pytester) -> None:
    folder = pytester.path / "qgate_"
    folder.mkdir()
    pytester.makepyfile(test_it="import pytest\n@pytest.mark.parametrize('x', [1])\ndef qgate(x): pass\n"
                        "class Test_qgate:\n    qgate = 1\n    def test_it(self): pass\n"
                        "def test_two(): pass\ntest_two.qgate = True\n")  # fmt: skip
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.OK
    assert "no gate ran" not in str(result.stdout)
