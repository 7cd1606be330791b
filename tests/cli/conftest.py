"""A folder of its own for what a command reads and writes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, in which commands are run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
