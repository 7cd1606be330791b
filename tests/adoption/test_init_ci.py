"""`qgate init --ci`: what it writes for a service, and what it leaves alone."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from qgate.cli import main

Capsys = pytest.CaptureFixture[str]
GITHUB = {
    ".github/actions/qgate/action.yml",
    ".github/workflows/qgate.yml",
    ".github/workflows/qgate-comment.yml",
}
GITLAB = {".gitlab/qgate.yml", ".gitlab-ci.yml"}


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, where the command is run."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def init(*argv: str) -> int:
    return main(["init", *argv])


def test_files_of_a_service_are_written(repository: Path, capsys: Capsys) -> None:
    assert init("--ci", "github", "--ci", "gitlab", "--ci", "github") == 0
    assert GITHUB | GITLAB | {"qgate.toml", ".gitignore"} < files(repository)
    out = capsys.readouterr().out
    assert "git add suites qgate.toml .gitignore .github/actions/qgate/action.yml" in out
    assert "is yours" not in out
    assert init("--ci", "github", "--ci", "gitlab", "--force") == 0
    assert capsys.readouterr().out.startswith("unchanged:\n")


def test_only_the_action_is_renewed(repository: Path, capsys: Capsys) -> None:
    init("--ci", "github")
    for name in GITHUB:
        (repository / name).write_text("mine: true\n")
    capsys.readouterr()
    assert init("--ci", "github", "--force") == 0
    assert "replaced:\n  .github/actions/qgate/action.yml\n" in capsys.readouterr().out
    assert (repository / ".github/workflows/qgate.yml").read_text() == "mine: true\n"


def test_a_folder_of_a_repository_has_them_at_the_top(repository: Path, capsys: Capsys) -> None:
    (repository / ".git").mkdir()
    (repository / "my product").mkdir()
    assert init("my product", "--into", "the gates", "--ci", "github", "--ci", "gitlab") == 0
    assert files(repository) > GITHUB | GITLAB
    assert "../.github/workflows/qgate.yml" in capsys.readouterr().out
    flow = yaml.safe_load((repository / ".github/workflows/qgate.yml").read_text())
    for job in flow["jobs"].values():
        inputs = next(step["with"] for step in job["steps"] if "qgate" in step.get("uses", ""))
        assert inputs["working-directory"] == "my product"
        assert shlex.split(inputs["suites"]) == ["the gates"]
    template = yaml.safe_load((repository / ".gitlab/qgate.yml").read_text())[".qgate"]
    assert template["variables"]["QGATE_DIR"] == "my product"
    assert template["variables"]["QGATE_SUITES"] == "the gates"
    assert template["artifacts"]["paths"] == ["my product/qgate-out/"]
    assert template["artifacts"]["reports"] == {"junit": "my product/qgate-out/junit.xml"}


@pytest.mark.parametrize(
    ("text", "said"), [("stages: [test]\n", True), ("include: .gitlab/qgate.yml\n", False)]
)
def test_a_pipeline_that_is_there_is_yours(
    repository: Path, capsys: Capsys, text: str, said: bool
) -> None:
    (repository / ".gitlab-ci.yml").write_text(text)
    assert init("--ci", "gitlab") == 0
    assert (repository / ".gitlab-ci.yml").read_text() == text
    advice = ".gitlab-ci.yml is yours, so put there:\n  include:\n    - local: .gitlab/qgate.yml"
    assert (advice in capsys.readouterr().out) is said


def test_files_that_were_removed_stay_away(repository: Path, capsys: Capsys) -> None:
    init()
    for name in ("suites/test_task.py", "suites/qgate_model.py", "qgate.toml", ".gitignore"):
        (repository / name).unlink()
    before = files(repository)
    capsys.readouterr()
    assert init("--ci", "github") == 0
    assert files(repository) == before | GITHUB
    out = capsys.readouterr().out
    assert (
        "left out, since suites has suites already: test_task.py, qgate_model.py, qgate.toml" in out
    )
    assert init("--ci", "github", "--suites", "task") == 0
    assert (repository / "suites/test_task.py").is_file()


def test_a_workflow_that_was_removed_stays_away(repository: Path, capsys: Capsys) -> None:
    init("--ci", "github")
    comment = repository / ".github/workflows/qgate-comment.yml"
    comment.unlink()
    before = files(repository)
    capsys.readouterr()
    assert init("--ci", "github") == 0
    assert files(repository) == before
    assert "left out, since qgate-comment.yml was removed" in capsys.readouterr().out
    assert init("--ci", "github", "--force") == 0
    assert comment.is_file()


def test_tests_of_yours_are_no_suites_that_were_removed(repository: Path) -> None:
    (repository / "suites").mkdir()
    (repository / "suites/test_mine.py").write_text("")
    assert init("--ci", "github") == 0
    assert (repository / "suites/test_task.py").is_file()


def test_a_dry_run_makes_no_folders_of_a_service(repository: Path, capsys: Capsys) -> None:
    assert init("--ci", "github", "--dry-run") == 0
    assert list(repository.iterdir()) == []
    assert "  .github/workflows/qgate.yml\n" in capsys.readouterr().out
