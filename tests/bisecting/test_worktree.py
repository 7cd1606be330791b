"""A worktree of one process: where it is, what it leaves, and what a killed one has left."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from qgate.bisecting.worktree import OwnWorktree, own_worktree
from qgate.storage.git import GitRepository
from tests.bisecting.conftest import History


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def state(history: History) -> str:
    return "\n".join(history.git(*words.split()) for words in ("status --short", "log --all -1",
                     "worktree list", "branch --all", "reflog"))  # fmt: skip


def test_a_commit_is_checked_out_beside_the_clone(history: History, temporary: Path) -> None:
    (history.folder / "file").write_text("one")
    (history.folder / "folder").mkdir()
    history.git("add", "--all")
    first = history.commit("1")
    (history.folder / "file").write_text("two")
    history.git("commit", "--quiet", "--all", "--message", "2")
    hook = history.folder / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {temporary}/hook\n")
    hook.chmod(0o755)
    (history.folder / "file").write_text("not committed")
    before = state(history)
    with own_worktree(GitRepository.around(Path("folder")), "HEAD") as tree:
        assert tree.folder == tree.root / "folder"
        (tree.root / ".gitignore").write_text("*\n")
        (tree.root / "left").touch()
        tree.check_out(first)
        assert (tree.root / "file").read_text() == "one"
        assert sorted(path.name for path in tree.root.iterdir()) == [".git", "file"]
    assert state(history) == before
    assert (history.folder / "file").read_text() == "not committed"
    assert not [*temporary.iterdir()], "neither a worktree nor what a hook leaves"


def test_an_interrupt_leaves_nothing(history: History, temporary: Path) -> None:
    history.commit("1")
    with (
        pytest.raises(KeyboardInterrupt),
        own_worktree(GitRepository.around(Path()), "HEAD"),
    ):
        raise KeyboardInterrupt
    assert not [*temporary.iterdir()]
    assert history.git("worktree", "list").count("\n") == 0


def test_the_next_process_removes_what_a_killed_one_has_left(
    history: History, temporary: Path
) -> None:
    history.commit("1")
    history.git("worktree", "add", "--quiet", "--detach", str(temporary / "theirs" / "tree"))
    repository = GitRepository.around(Path())

    def killed_in(moved_to: Path | None = None) -> None:
        if (child := os.fork()) == 0:
            entered = own_worktree(repository, "HEAD")
            around = entered.__enter__().around
            if moved_to is not None:
                around.rename(moved_to)
            os._exit(0)  # without an end, as after a kill
        os.waitpid(child, 0)

    killed_in()
    killed_in()
    killed = [path for path in temporary.iterdir() if path.name != "theirs"]
    # The second one has removed the first.
    assert len(killed) == 1

    def folders(tree: OwnWorktree) -> set[Path]:
        assert tree.root.is_dir()
        return {*temporary.iterdir()}

    with own_worktree(repository, "HEAD") as one, own_worktree(repository, "HEAD") as other:
        assert folders(one) == folders(other) == {
            temporary / "theirs", one.around, other.around,
        }  # fmt: skip
    # A folder that somebody else has removed leaves only a name in the repository.
    killed_in(temporary / "moved")
    assert "qgate-bisect" in history.git("worktree", "list")
    with own_worktree(repository, "HEAD"):
        pass
    assert "qgate-bisect" not in history.git("worktree", "list")
    assert (temporary / "theirs" / "tree").is_dir()
