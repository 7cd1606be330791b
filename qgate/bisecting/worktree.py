"""A git worktree of this process alone, in the folder for temporary files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qgate.errors import QgateError
from qgate.storage.git import GitRepository
from qgate.storage.locks import open_handle, try_lock

_PREFIX = "qgate-bisect-"
_OWNER, _TREE = "owner", "tree"


@dataclass(frozen=True)
class OwnWorktree:
    """The worktree and the folder around it, both of which are removed at the end."""

    repository: GitRepository
    around: Path

    @property
    def root(self) -> Path:
        return self.around / _TREE

    @property
    def folder(self) -> Path:
        """Return the folder that stands for the one where the command was run."""
        return self.root / self.repository.folder.relative_to(self.repository.root)

    def check_out(self, commit: str) -> None:
        """Put a commit into the worktree, without anything that an earlier one has left."""
        for words in (
            ("checkout", "--quiet", "--detach", "--force", commit),
            ("clean", "-ffdxq"),
        ):
            self.repository.run(*words, folder=self.root)


@contextlib.contextmanager
def own_worktree(repository: GitRepository, commit: str) -> Iterator[OwnWorktree]:
    """Make a worktree at a commit, and remove those that killed processes have left."""
    _remove_leftovers(repository)
    around = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    handle = open_handle(around / _OWNER, os.O_RDWR | os.O_CREAT)
    worktree = OwnWorktree(repository, around)
    try:
        try_lock(handle)
        repository.run("worktree", "add", "--quiet", "--detach", str(worktree.root), commit)
        yield worktree
    finally:
        os.close(handle)
        _remove(repository, worktree.root)


def _remove(repository: GitRepository, root: Path) -> None:
    with contextlib.suppress(QgateError):
        repository.run("worktree", "remove", "--force", "--force", str(root))
    shutil.rmtree(root.parent, ignore_errors=True)


def _remove_leftovers(repository: GitRepository) -> None:
    """Remove worktrees of this command whose process has ended."""
    for line in repository.run("worktree", "list", "--porcelain").splitlines():
        root = Path(line.removeprefix("worktree "))
        is_ours = root.name == _TREE and root.parent.name.startswith(_PREFIX)
        if line.startswith("worktree ") and is_ours and _is_abandoned(root.parent):
            _remove(repository, root)


def _is_abandoned(around: Path) -> bool:
    try:
        handle = open_handle(around / _OWNER, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        return try_lock(handle) is True
    finally:
        os.close(handle)
