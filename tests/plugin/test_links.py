"""Links in the place of what a run removes: nothing behind them is lost, and the run says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.conftest import Run
from tests.plugin.projects import SITE, header, tightened
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

NAME = f"{SITE.replace(':', '.')}.int8"


@pytest.fixture
def precious(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's, with names that qgate writes too."""
    folder: Path = tmp_path_factory.mktemp("precious")
    for name in ("notes.txt", "run.py", "old/run.py", "repro/old/run.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    return folder


def lost(folder: Path) -> list[str]:
    """Return the names of files that are gone or changed."""
    names = ("notes.txt", "run.py", "old/run.py", "repro/old/run.py")
    paths = [(name, folder / name) for name in names]
    return [name for name, p in paths if not p.exists() or p.read_text() != "precious"]


@share(3)
@pytest.mark.parametrize("is_red", [False, True], ids=["green", "red"])
@pytest.mark.parametrize("name", ["qgate-out", "qgate-out/repro", f"qgate-out/repro/{NAME}"])
def test_nothing_is_removed_through_a_link(
    name: str, is_red: bool, project: Path, precious: Path, suites: Run
) -> None:
    if is_red:
        tightened(project)
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).symlink_to(precious)
    result = suites()
    assert lost(precious) == []
    assert (project / name).is_symlink(), "a link of the user's stays"
    assert result.ret == int(is_red)
    is_written_to = is_red and name == f"qgate-out/repro/{NAME}"
    if name != f"qgate-out/repro/{NAME}" or is_written_to:
        result.stdout.fnmatch_lines([f"*'*{name}' is a link, and nothing is * through it: *"])
    assert header(project)["exit"] == int(is_red)


@always
def test_what_an_earlier_run_left_is_removed_and_nothing_else(project: Path, suites: Run) -> None:
    tightened(project)
    repro = project / "qgate-out" / "repro"
    for name in ("old/run.py", "old/inputs.safetensors", "mine/run.py", "mine/notes.txt", "notes"):
        (repro / name).parent.mkdir(parents=True, exist_ok=True)
        (repro / name).write_text("kept")
    (repro / "linked").symlink_to(project / "suites")
    assert suites().ret == pytest.ExitCode.TESTS_FAILED
    names = sorted(path.relative_to(repro).as_posix() for path in repro.rglob("*"))
    assert names == sorted(
        ["linked", "mine", "mine/notes.txt", "notes", NAME, f"{NAME}/inputs.safetensors",
         f"{NAME}/run.py"]
    )  # fmt: skip
    assert [*(project / "suites").iterdir()]


@proof
def test_a_value_of_an_earlier_failure_behind_a_link_is_an_error(
    project: Path, precious: Path, suites: Run
) -> None:
    out = project / "qgate-out"
    tightened(project)
    assert suites().ret == pytest.ExitCode.TESTS_FAILED
    (candidate,) = (out / "candidates").iterdir()
    candidate.rename(precious / candidate.name)
    (out / "candidates").rmdir()
    (out / "candidates").symlink_to(precious)
    result = suites("--update-baselines")
    assert (precious / candidate.name).exists()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    message = "*candidates' is a link, and nothing is removed through it: *"
    result.stdout.fnmatch_lines([f"ERROR: a candidate of an earlier run is still there: {message}"])


@share(3)
@pytest.mark.parametrize("kind", ["a file", "a link to a file", "a link to nothing"])
def test_results_that_have_no_folder_are_an_error(
    kind: str, project: Path, precious: Path, suites: Run
) -> None:
    out = project / "qgate-out"
    if kind == "a file":
        out.write_text("precious")
    else:
        out.symlink_to(precious / ("notes.txt" if kind == "a link to a file" else "nothing"))
    result = suites()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"ERROR: *'*qgate-out' is {kind}*remove it*"])
    assert lost(precious) == []
    assert out.is_symlink() or out.read_text() == "precious"
