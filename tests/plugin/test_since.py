"""`pytest suites --since COMMIT`: the gates that a difference can touch, and no fewer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adoption.repository import run
from tests.campaigns import source_faults
from tests.campaigns.source_faults import make_project, pytest_run, selected
from tests.shares import proof, share

GATES = 21
"""Seven of each of three modes."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("recorded").resolve() / "project")


@pytest.fixture
def project(recorded: Path, tmp_path: Path) -> Path:
    """Two kernels that share a function; all gates passed at HEAD."""
    folder = tmp_path.resolve() / "project"
    shutil.copytree(recorded, folder)
    return folder


def edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return plant


def write(file: str, text: str = "") -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)

    return plant


def other_torch(folder: Path) -> None:
    path = folder / "baselines" / "example" / "manifest.json"
    path.write_text(path.read_text().replace('"torch": "', '"torch": "0.'))
    run(["git", "commit", "--quiet", "--all", "--message", "Of an earlier torch"], folder)


def accept_less(folder: Path) -> None:
    path = folder / "baselines" / "example" / "accepted" / "my_other.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


NOTHING: list[str] = []
EVERYTHING = ["my_int8", "my_other", "int8"]
# What differs, the modes whose gates run, and words of the note; "all gates run: " where the
# difference cannot be traced.
DIFFERENCES = {
    "nothing": (lambda _: None, NOTHING, "nothing differs"),
    "a document": (write("NOTES.md", "More"), NOTHING, "NOTES.md"),
    "a comment": (edit("suites/kernel_b.py", "codes =", "codes  ="), NOTHING, "suites/kernel_b.py"),
    "a kernel": (edit("suites/kernel_b.py", "(-127", "(-126"), ["my_other"], "(B_rounded)"),
    "another": (edit("suites/kernel_a.py", "self.bias)", "None)"), ["my_int8"], "(ALinear)"),
    "what both share": (
        edit("suites/row_scales.py", "/ 127", "/ 126"), ["my_int8", "my_other"], "(row_scale)"),
    "a suite": (
        edit("suites/test_outputs.py", "gate.", "mode and gate."), EVERYTHING, "test_outputs.py"),
    "the model": (edit("suites/qgate_model.py", "x + self", "x - self"), EVERYTHING, "(Block)"),
    "samples": (edit("suites/qgate_model.py", "< 0.25", "< 0.5"), EVERYTHING, "(held_out)"),
    "accepted errors": (accept_less, EVERYTHING, "baselines/example/accepted/my_other.txt"),
    "what runs at import": (
        edit("suites/qgate_model.py", "import qgate\n", "import qgate\n\nLEVELS = 1\n"), EVERYTHING,
        "all gates run: suites/qgate_model.py differs in what runs when it is imported"),
    "a new module": (write("tools/x.py"), EVERYTHING, "all gates run: tools/x.py is new"),
    "settings": (
        edit("qgate.toml", "samples = 2", "samples = 3"), EVERYTHING,
        "all gates run: qgate.toml differs"),
    "a conftest": (
        edit("suites/conftest.py", "append(HERE)", "insert(0, HERE)"), EVERYTHING,
        "all gates run: suites/conftest.py differs"),
    "data": (write("suites/x.npy"), EVERYTHING, "all gates run: suites/x.npy differs"),
    "requirements": (
        write("constraints.txt", "torch"), EVERYTHING, "all gates run: constraints.txt differs"),
    "torch": (other_torch, EVERYTHING, "all gates run: the baseline of example is of torch 0."),
    "code that cannot be traced": (
        edit("suites/kernel_b.py", "linear(B", "eval('linear')(B"), EVERYTHING,
        "all gates run: kernel_b.py may run code that it does not name: eval"),
    "a document that code reads": (
        lambda folder: [edit("suites/kernel_b.py", "codes =", "name, codes = 'NOTES.md',")(folder),
                        write("NOTES.md", "z")(folder)],
        EVERYTHING, "all gates run: NOTES.md differs, and code names it"),
    "a file that is not in the commit": (
        lambda folder: [write(".gitignore", "qgate-out/\nkernel_b.py\n")(folder),
                        run(["git", "rm", "-q", "--cached", "suites/kernel_b.py"], folder),
                        run(["git", "commit", "-qam", "Forget it"], folder),
                        edit("suites/kernel_a.py", "(-127", "(-126")(folder)],
        EVERYTHING, "all gates run: suites/kernel_b.py is not in"),
}  # fmt: skip


@share(6)
@pytest.mark.parametrize(("plant", "modes", "words"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_only_gates_that_a_difference_can_touch_run(
    project: Path, plant: Callable[[Path], object], modes: list[str], words: str
) -> None:
    plant(project)
    nodes, said = selected(project)
    note = " ".join(said[said.index("--since HEAD: ") :].split())
    assert words in note
    assert note.startswith("--since HEAD: all gates run") is words.startswith("all gates run")
    if words != "test_outputs.py":
        assert {node for node in nodes if any(f"-{mode}" in node for mode in modes)} == nodes
        assert len(nodes) == GATES // 3 * len(modes)
    else:
        assert nodes == {node for node in nodes if "test_outputs.py" in node} != set()


def test_a_run_since_a_commit_is_partial_and_says_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit("suites/kernel_b.py", "(-127", "(-120")(project)
    status, said = pytest_run(project, "--since=HEAD", "--allow-partial")
    assert status == 1
    assert "cause: layers.0.up:output (example, mode my_other)" in said
    header = json.loads((project / "qgate-out" / "results.jsonl").open().readline())
    assert header["complete"] is False
    omitted = [
        (part["cause"], part["reason"], part["mode"]) for part in header["extent"]["omitted"]
    ]
    assert {("deselected", "--since HEAD", mode) for mode in ("my_int8", "int8")} <= {*omitted}
    monkeypatch.setattr(source_faults, "clean", lambda: {"CI": "true"})
    edit("suites/kernel_b.py", "(-120", "(-127")(project)
    status, said = pytest_run(project, "--since=HEAD")
    assert "partial run, only 0 of" in said
    assert "deselected by --since HEAD" in said
    assert status in (1, 5)


@share(4)
@pytest.mark.parametrize("number", range(2))
def test_no_gate_that_a_planted_fault_breaks_is_left_out(project: Path, number: int) -> None:
    """A share of `python -m tests.campaigns.source_faults`."""
    fault = source_faults.drawn(project, 12, seed=7)[6 * number]
    verdict = source_faults.judge(project, fault)
    assert not verdict.missed, fault.label


@proof
def test_the_judge_of_planted_faults_sees_a_gate_that_is_left_out(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_faults, "selected", lambda _: (set(), ""))
    text = (project / "suites" / "kernel_a.py").read_text().replace("(-127", "(-12")
    fault = source_faults.SourceFault("kernel_a.py", "A_rounded", text, "clamped")
    assert source_faults.judge(project, fault).missed


@pytest.mark.parametrize(
    ("commit", "words"),
    [("nowhere", "'nowhere' is no commit of"), ("--all", "--since: expected one argument")],
)
def test_an_unknown_commit_is_a_usage_error(project: Path, commit: str, words: str) -> None:
    status, said = pytest_run(project, "--since", commit)
    assert status == 4
    assert words in said
