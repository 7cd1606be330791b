"""A run that leaves gates out says so, and is red in CI unless the command allows it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from qgate.cli import main
from qgate.results import read
from qgate.results.coverage import coverage_texts
from tests.gate.benches import MAMBA
from tests.plugin.conftest import Run
from tests.plugin.projects import add, page
from tests.shares import proof, share

FIRST = "suites/test_layer_outputs.py::test_layer_outputs[tiny-llama-int8-layers.0]"
TASK = "suites/test_task.py::test_task[tiny-llama-int8]"
GATES = 6
"""The gates of one mode: five layers and the task."""
ALL = "35 of 35 quantized modules, 1 of 1 outputs, 5 of 5 layers; tokens 128 of 128"


def extent(folder: Path) -> dict[str, Any]:
    return dict(read(folder / "results.jsonl")[0]["extent"])


def marked(project: Path, mark: str, name: str = "test_task.py") -> None:
    """Mark all tests of a suite."""
    file = project / "suites" / name
    line = f"\nimport pytest\npytestmark = {mark}\n"
    file.write_text(file.read_text(encoding="utf-8") + line, encoding="utf-8")


def plant(project: Path, name: str) -> None:
    """Write what leaves gates out of a run, other than an option."""
    conftest = project / "conftest.py"
    match name:
        case "skip":
            marked(project, "pytest.mark.skip(reason='not today')")
        case "xfail":
            marked(project, "pytest.mark.xfail(reason='bug 17')", "test_layer_outputs.py")
        case "xfail, not run":
            marked(project, "pytest.mark.xfail(run=False, reason='it hangs')")
        case "skip a file":
            file = project / "suites" / "test_task.py"
            skip = "import pytest\npytest.skip('no GPU', allow_module_level=True)\n"
            file.write_text(skip + file.read_text(encoding="utf-8"), encoding="utf-8")
        case "hook" | "first hook":
            first = "@pytest.hookimpl(tryfirst=True)\n" if name == "first hook" else ""
            conftest.write_text(
                f"import pytest\n{first}def pytest_collection_modifyitems(items):\n"
                "    items[:] = [item for item in items if 'layers' not in item.nodeid]\n"
            )
        case "skip in a fixture":
            conftest.write_text(
                "import pytest\n@pytest.fixture(autouse=True)\n"
                "def _(request):\n    if 'task' in request.node.name: pytest.skip('slow')\n"
            )
        case "ignore":
            conftest.write_text("collect_ignore = ['suites/test_task.py']\n")
        case "settings":
            (project / "qgate.toml").write_text("layers = 'first'\n")


# Options, what else is planted, gates that are held and asked for, and words of the sentence.
PARTIAL: dict[str, tuple[tuple[str, ...], str, tuple[int, int], str]] = {
    "--layers": (("--layers", "first"), "", (2, 6),
                 "4 left out by --layers first (int8 at layers.1, layers.2, layers.3 *"),
    "layers in settings": ((), "settings", (2, 6), "4 left out by --layers first (int8 at *"),
    "-k": (("-k", "layers.0 or task"), "", (2, 6), "4 deselected by -k 'layers.0 or task' (int8 *"),
    "-m": (("-m", "not limits"), "", (1, 6), "5 deselected by -m 'not limits' (int8 at *"),
    "--deselect": (("--deselect", TASK), "", (5, 6), "1 deselected by --deselect (int8 at task)*"),
    "--ignore": (("--ignore", "suites/test_task.py"), "", (5, 5), "all of test_task.py deselected*"),
    "collect_ignore": ((), "ignore", (5, 5), "all of test_task.py deselected by --ignore or *"),
    "node ids": ((FIRST,), "", (1, 5), "4 deselected by the tests named (int8 at layers.1,*"),
    "conftest": ((), "hook", (1, 6), "5 deselected by a conftest or plugin (int8 at *"),
    "conftest, first": ((), "first hook", (1, 6), "5 deselected by a conftest or plugin (int8 *"),
    "skip": ((), "skip", (5, 6), "1 skipped: not today (int8 at task)*"),
    "skip in a fixture": ((), "skip in a fixture", (5, 6), "1 skipped: slow (int8 at task)*"),
    "skip a file": ((), "skip a file", (5, 5), "all of test_task.py skipped: no GPU*"),
    "xfail": ((), "xfail", (6, 6), ""),
    "xfail, not run": ((), "xfail, not run", (5, 6), "1 expected to fail (xfail): *it hangs (*"),
}  # fmt: skip


@share(6)
@pytest.mark.parametrize("name", [name for name in PARTIAL if name != "xfail"])
def test_gates_that_are_left_out_are_named_and_red_in_ci(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, planted, (judged, gates), words = PARTIAL[name]
    plant(project, planted)
    monkeypatch.setenv("CI", "true")
    paths = () if name == "node ids" else ("suites",)
    result = suites(*options, "--no-report", paths=paths)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = [line for line in result.stdout.lines if line]
    first = lines[next(i for i, line in enumerate(lines) if "= qgate: " in line) + 1]
    shortfall = (
        "not all gates were held" if judged == gates else f"only {judged} of {gates} gates were"
    )
    assert first.startswith(f"partial run, {shortfall}")
    result.stdout.fnmatch_lines([f"partial run, *: {words}--allow-partial if this is intended"])
    header, _ = read(project / "qgate-out" / "results.jsonl")
    assert (header["exit"], header["complete"]) == (1, False)
    fields = header["extent"]
    assert (fields["judged"], fields["gates"], fields["fails"]) == (judged, gates, True)


def test_a_partial_run_is_green_elsewhere_and_where_it_is_allowed(
    suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--layers", "first", "--no-report"]
    sentence = "  gates held: 2 of 6; 4 left out by --layers first*"
    result = suites(*options)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([sentence])
    monkeypatch.setenv("CI", "true")
    result = suites(*options, "--allow-partial")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([sentence])


@proof
def test_a_gate_that_fails_as_expected_is_not_held(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(project, "xfail")
    monkeypatch.setenv("CI", "true")
    assert suites().ret == pytest.ExitCode.OK, "what passes all the same is held"
    accepted = project / "baselines" / "tiny-llama" / "accepted" / "int8.txt"
    shutil.rmtree(project / "baselines")
    result = suites("--baselines", str(accepted.parent))
    assert result.ret != pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["partial run, only 1 of 6 gates were held: 5 expected to fail *"])


def test_a_whole_run_holds_all_gates(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    for options in (["-v"], ["-v", "-n", "2"]):
        result = suites(*options, alone="-n" in options)
        assert result.ret == pytest.ExitCode.OK
        result.stdout.fnmatch_lines([f"gates held: {GATES} of {GATES}", f"compared in int8: {ALL}"])
        whole = {"gates": GATES, "judged": GATES, "omitted": [], "allowed": False, "fails": False}
        fields = extent(project / "qgate-out")
        assert [coverage_texts(fields.pop("coverage")), fields] == [[f"int8: {ALL}"], whole]


@proof
@pytest.mark.parametrize(
    "options", [["--mode", "int8,2-1"], ["--mode", "2-1,int8", "--model", "tiny-mamba"]]
)
def test_modes_that_fit_no_model_and_dumps_are_not_asked_for(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    add(project, "test_dump_overflow.py")
    monkeypatch.setenv("CI", "true")
    result = suites(*options)
    assert result.ret == pytest.ExitCode.OK
    coverage = extent(project / "qgate-out")
    assert coverage["omitted"] == []
    assert coverage["judged"] == coverage["gates"] > 0


@proof
def test_workers_name_the_same_gates_as_one_process(project: Path, suites: Run) -> None:
    plant(project, "skip")
    suites("-k", "layers.0 or task")
    alone = extent(project / "qgate-out")
    suites("-k", "layers.0 or task", "-n", "2", alone=True)
    assert extent(project / "qgate-out") == alone
    assert [group["cause"] for group in alone["omitted"]] == ["deselected", "skipped"]


def test_gates_that_a_stopped_run_did_not_reach_are_named(project: Path, suites: Run) -> None:
    (project / "suites" / "test_a.py").write_text("def test_a(gate): assert False\n")
    result = suites("-x")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["gates held: 0 of 7; 6 not run: stopping after 1 failures (int8*"])


def test_gates_that_are_all_deselected_are_named(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "suites" / "test_other.py").write_text("def test_other(): pass\n")
    assert suites("-m", "not qgate").ret == pytest.ExitCode.OK
    monkeypatch.setenv("CI", "true")
    result = suites("-m", "not qgate")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["partial run, only 0 of 6 gates were held: 6 deselected by -m *"])
    assert suites("-m", "not qgate", "--qgate-allow-partial").ret == pytest.ExitCode.OK


def test_listing_tests_is_no_run(suites: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = suites("--collect-only", "--layers", "first")
    assert result.ret == pytest.ExitCode.OK
    assert "gates" not in str(result.stdout).partition("collected")[2]


def test_pages_and_annotations_say_it(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(project, "skip")
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project / "summary.md"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = suites()
    sentence = "only 5 of 6 gates were held: 1 skipped: not today (int8 at task)"
    result.stdout.fnmatch_lines([f"::error title=qgate::partial run, {sentence}*"])
    assert sentence in (project / "summary.md").read_text(encoding="utf-8")
    assert "Gates that were not held" in page(project)
    assert "not today" in page(project)


# Shards ------------------------------------------------------------------------------------------


def shards(project: Path, suites: Run, target: Path, *options: str) -> list[str]:
    """Run two shards and return the folders of their results."""
    for number in (1, 2):
        modes = ("--model", MAMBA, "--mode", "int8,2-1")
        suites(*modes, "--shard", f"{number}/2", "--no-report", *options)
        shutil.copytree(project / "qgate-out", target / f"part{number}")
    return [str(target / f"part{number}") for number in (1, 2)]


@proof
def test_shards_are_judged_together(
    project: Path, suites: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("CI", "true")
    folders = shards(project, suites, tmp_path)
    assert [extent(Path(folder))["omitted"] for folder in folders] == [[], []]
    command = ["report", "--merge", str(tmp_path / "all")]
    assert main([*command, *folders]) == 0
    assert extent(tmp_path / "all")["judged"] == 2 * GATES
    assert main([*command, folders[1], "--partial"]) == 1
    out = capsys.readouterr().out
    assert "partial run, not all gates were held: of a missing shard: shard 1 of 2" in out
    assert main([*command, folders[1], "--partial", "--allow-partial"]) == 0
    monkeypatch.delenv("CI")
    assert main([*command, folders[1], "--partial"]) == 0
    assert "of a missing shard: shard 1 of 2" in capsys.readouterr().out


@share(2)
@pytest.mark.parametrize("allowed", [False, True])
def test_gates_that_shards_skip_are_in_the_whole(
    project: Path, suites: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], allowed: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("CI", "true")
    plant(project, "skip")
    options = ["--layers", "first", *(["--allow-partial"] if allowed else [])]
    folders = shards(project, suites, tmp_path, *options)
    capsys.readouterr()
    out = tmp_path / "all"
    assert main(["report", *folders, "--merge", str(out)]) == (0 if allowed else 1)
    whole = extent(out)
    assert (whole["judged"], whole["gates"]) == (2, 2 * GATES)
    assert whole["fails"] is not allowed
    text = capsys.readouterr().out
    assert "8 left out by --layers first (" in text
    assert "2 skipped: not today (" in text
