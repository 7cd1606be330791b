"""A git worktree of this process alone, in the folder for temporary files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qgate.errors import QgateError
from qgate.storage.files import scratch_folder
from qgate.storage.git import GitRepository

_TREE = "qgate-bisect"


@dataclass(frozen=True)
class OwnWorktree:
    """The worktree, and the scratch folder around it."""

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
    with scratch_folder() as around:
        # The folders of killed processes are gone, and the repository still has their names.
        for line in repository.run("worktree", "list", "--porcelain").splitlines():
            root = Path(line.removeprefix("worktree "))
            if line.startswith("worktree ") and root.name == _TREE and not root.exists():
                _remove(repository, root)
        worktree = OwnWorktree(repository, around.resolve())
        try:
            repository.run("worktree", "add", "--quiet", "--detach", str(worktree.root), commit)
            yield worktree
        finally:
            _remove(repository, worktree.root)


def _remove(repository: GitRepository, root: Path) -> None:
    with contextlib.suppress(QgateError):
        repository.run("worktree", "remove", "--force", "--force", str(root))
