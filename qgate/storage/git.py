"""Git, asked about the repository around a folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from qgate.errors import QgateError

if TYPE_CHECKING:
    from qgate.storage.locations import Location

# Variables by which git itself, in a hook, points its children at another repository or index.
_OF_AN_OUTER_GIT = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_IMPLICIT_WORK_TREE",
)  # fmt: skip


@dataclass(frozen=True)
class GitRepository:
    """A working tree: its root, and the folder in it that paths are relative to."""

    root: Path
    folder: Path

    @classmethod
    def around(cls, folder: Location) -> GitRepository:
        """Return the repository around a folder; an error where there is none, as in a store."""
        problem = f"{str(folder.resolve())!r} is in no git repository: run this in a clone."
        if not isinstance(folder, Path):
            raise QgateError(problem)
        try:
            root = _output(folder, "rev-parse", "--show-toplevel")
        except QgateError:
            raise QgateError(problem) from None
        return cls(Path(root).resolve(), folder.resolve())

    def run(
        self,
        *words: str,
        folder: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Run git without hooks in the folder, or in another one; return what it prints."""
        return _output(folder or self.folder, *words, environment=environment)

    def is_clean(self) -> bool:
        """Tell if nothing in the folder differs from the last commit."""
        return not self.run("status", "--porcelain", "--untracked-files=all", "--", ".")

    def commit(self, subject: str, body: str) -> str:
        """Commit what is in the folder, and nothing else, as the user would; return its hash."""
        self.run("add", "--force", "--all", "--", ".")
        words = ("commit", "--quiet", "--only", "-m", subject, "-m", body, "--", ".")
        _output(self.folder, *words, hooks=True)
        return self.run("rev-parse", "HEAD")

    def names(self, *words: str) -> list[str]:
        """Return names that git ends with NUL, whatever folder it is asked in."""
        return [name for name in self.run(*words, folder=self.root).split("\0") if name]

    def commit_of(self, revision: str) -> str:
        """Return the commit that a revision names."""
        try:
            return self.run("rev-parse", "--verify", "--quiet", "--end-of-options",
                            f"{revision}^{{commit}}")  # fmt: skip
        except QgateError:
            raise QgateError(
                f"{revision!r} is no commit of {str(self.root)!r}: name a hash, a branch or a "
                "tag, as `git log` shows them; a shallow clone has only the last ones."
            ) from None


def last_changes(folder: Location, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the commit and the date that each file of a folder was last changed at, if any.

    A store has none, nor has a folder outside git, nor a shallow clone: there the oldest commit
    seems to have made everything.
    """
    changes = {}
    with contextlib.suppress(QgateError):
        if not isinstance(folder, Path):
            return {}
        if _output(folder, "rev-parse", "--is-shallow-repository") == "true":
            return {}
        for name in names:
            commit, _, date = _output(folder, "log", "-1", "--format=%H %cs", "--", name).partition(
                " "
            )
            if commit:
                changes[name] = (commit, date)
    return changes


def _without_outer_git() -> dict[str, str]:
    """Return an environment in which git finds the repository by the folder it runs in."""
    return {name: text for name, text in os.environ.items() if name not in _OF_AN_OUTER_GIT}


def _output(
    folder: Path,
    *words: str,
    hooks: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    without = [] if hooks else ["-c", f"core.hooksPath={os.devnull}"]
    command = ["git", *without, "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="surrogateescape",
            env={**_without_outer_git(), **environment}, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise QgateError("git is not installed here, or not on PATH: install it first.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise QgateError(f"`git {' '.join(words[:2])}` failed: {lines[-1]}.")
    return done.stdout.strip("\n")
