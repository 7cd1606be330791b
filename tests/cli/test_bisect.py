"""`qgate bisect` over real commits of a small project, each run in a worktree."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

# Imported here, since a run in a fork would import them each time.
import qgate.gate.measuring.model_gates
import qgate.plugin.records
import qgate.plugin.sessions
import qgate.plugin.summary  # noqa: F401
from qgate.bisecting import running
from qgate.bisecting.record import CommitName, CommitRun
from qgate.cli import main
from tests.adoption.repository import clean, run
from tests.campaigns.forked import ran
from tests.shares import proof

Capsys = pytest.CaptureFixture[str]
FEW = ("--layers", "first")
LEVELS = "LEVELS = 127\n"
# Its levels are in a package, and stand for no format of qgate: any error may be accepted.
REPLACED = {
    "/ 127": "/ LEVELS",
    "import copy\n": "import copy\nfrom qgate_kernels import LEVELS\n",
    'Kernel(my_int8, stands_for="int8")': "my_int8",
}
SETTINGS = """model = ["qgate_model:build"]
mode = ["my_int8"]
samples = 2
seqlen = 32
"""


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Do what `python -m pytest …` does, in a fork of this process, which has loaded torch."""

    def verb() -> int:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        return int(pytest.main([*arguments[2:]]))

    ended = ran(verb, folder)
    return ended.status, ended.said


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose kernel is a package of its own; the fourth commit makes it worse.

    That commit also accepts its errors, and the one before it cannot be imported.
    """
    folder = tmp_path_factory.mktemp("clone")
    run(["git", "init", "--quiet", "--initial-branch=main"], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["init", "--suites", "layer_outputs"]) == 0
    (folder / "qgate.toml").write_text(SETTINGS)
    source = folder / "suites" / "qgate_model.py"
    text = source.read_text()
    for old, new in REPLACED.items():
        assert old in text
        text = text.replace(old, new)
    source.write_text(text)
    kernels = folder / "src" / "qgate_kernels" / "__init__.py"
    kernels.parent.mkdir(parents=True)

    def accept() -> None:
        # The command of a user, in an environment as bisect makes it.
        environment = {**clean(), "PYTHONPATH": str(folder / "src")}
        command = ["-m", "pytest", "suites", "-q", "--update-baselines", "--no-report", *FEW]
        status, output = run_forked(command, folder, environment)
        assert status == 0, output
        shutil.rmtree(folder / "qgate-out")

    def commit(subject: str, kernel: str) -> None:
        kernels.write_text(kernel)
        if "accept" in subject:
            accept()
        run(["git", "add", "--all"], folder)
        run(["git", "commit", "--quiet", "--allow-empty", "--message", subject], folder)

    commit("Add gates and accept", LEVELS)
    commit("Document it", LEVELS + "# a comment\n")
    commit("Import what is not there", "import nowhere\n")
    commit("Use 124 levels | and accept", "LEVELS = 124\n")
    commit("Document that", "LEVELS = 124  # as many\n")
    commit("Document more", "LEVELS = 124  # as many as that\n")
    return folder


@pytest.fixture
def clone(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project as its author has it, installed as a link, with work that is not committed."""
    folder = tmp_path / "clone"
    shutil.copytree(recorded, folder)
    (folder / "src" / "qgate_kernels" / "__init__.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder / "src")
    monkeypatch.setattr(running, "run_python", run_forked)
    for name in [*os.environ]:
        if name not in clean():
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "250")
    return folder


def state(folder: Path) -> list[str]:
    said = [run(["git", *words.split()], folder) for words in (
        "status --short --ignored", "worktree list", "log --all --oneline")]  # fmt: skip
    return [*said, *sorted(map(str, folder.glob("[!.]*/**/*")))]


@proof
def test_the_commit_and_the_site_are_found(clone: Path, capsys: Capsys) -> None:
    before = state(clone)
    assert main(["bisect", "main~5", "main", "--", *FEW]) == 0
    out, err = capsys.readouterr()
    first, _, _, _, *table = out.splitlines()
    assert '"Use 124 levels | and accept" turned red: or' in first
    assert "could not be judged; layers.0.up:output (example, mode my_int8)" in first
    verdicts = [line.split()[1] for line in table]
    assert verdicts == ["green", "green", "skipped", "red", "red"]
    assert "No module named 'nowhere'" in table[2]
    assert "layers.0.up:output (my_int8)" in table[-1]
    assert err.count("\n") == 5, "a line for each run"
    assert state(clone) == before


@pytest.mark.parametrize("state", ["green", "red"])
@pytest.mark.usefixtures("clone")
def test_ends_that_do_not_differ_exit_with_1(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def run_commit(_: running.CommitGates, name: CommitName) -> CommitRun:
        return CommitRun(name, {"suites/test_a.py::test_a": state})

    monkeypatch.setattr(running.CommitGates, "run", run_commit)
    assert main(["bisect", "main~5", "main", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["found"] is False
    assert [run["verdict"] for run in answer["runs"]] == [state, state]
    assert main(["bisect", "main~5", "main"]) == 1
    end = "BAD" if state == "green" else "GOOD"
    assert capsys.readouterr().out.startswith(f"{end} ")


def test_code_of_the_checkout_is_never_judged(clone: Path, capsys: Capsys) -> None:
    """Whatever a conftest puts on the path: each commit would have the same verdict."""
    (clone / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(clone / 'src')!r})\n")
    (clone / "src" / "qgate_kernels" / "__init__.py").write_text(LEVELS)
    run(["git", "add", "conftest.py"], clone)
    run(["git", "commit", "--quiet", "--message", "Insert a path"], clone)
    run(["git", "commit", "--quiet", "--allow-empty", "--message", "Nothing"], clone)
    assert main(["bisect", "main~1", "main", "--", *FEW]) == 2
    assert "imported 'src/qgate_kernels/__init__.py' of your checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["main~99", "main"], "'main~99' is no commit of"),
        (["main", "main~1"], "no ancestor"),
        (["main~5", "main", "--suites", "nowhere"], "GOOD .* has no verdict: there is no 'nowhere'"),
        (["main~5", "main", "--", "--update-baselines"], "--update-baselines is not allowed"),
        (["main~5", "main", "--json", "--", "--baselines=x"], "--baselines is not allowed"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("clone")
def test_usage_is_one_line_and_exit_2(argv: list[str], words: str, capsys: Capsys) -> None:
    assert main(["bisect", *argv]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(words, error), error
