"""Small git repositories to search in."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.adoption.repository import clean


@dataclass
class History:
    """A repository whose commits have no files; each is known by its subject."""

    folder: Path

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=self.folder,
            env=clean(),
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def commit(self, subject: str) -> str:
        self.git("commit", "--quiet", "--allow-empty", "--message", subject)
        return self.git("rev-parse", "HEAD")

    def subjects(self, commits: Sequence[str]) -> list[str]:
        return [self.git("log", "-1", "--format=%s", commit) for commit in commits]


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    folder = tmp_path / "clone"
    folder.mkdir()
    made = History(folder)
    made.git("init", "--quiet", "--initial-branch=main")
    monkeypatch.chdir(folder)
    return made
