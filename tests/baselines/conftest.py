"""No test here waits for the disk, but for those that ask to."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written outlives a process without; `test_what_waits_for_the_disk` looks after it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch, fast: None) -> None:  # noqa: ARG001
    """The disk as it is."""
    monkeypatch.undo()
