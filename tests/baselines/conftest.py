"""No test here waits for the disk, but for those that ask to."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written outlives a process without; `test_what_waits_for_the_disk` looks after it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch, fast: None) -> None:  # noqa: ARG001
    """The disk as it is."""
    monkeypatch.undo()


class Clock:
    """A clock of locks that only their sleeping moves on; `slept` is the sum of it."""

    def __init__(self) -> None:
        self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    stand_in = SimpleNamespace(
        monotonic=lambda: clock.slept,
        sleep=lambda seconds: clock.sleep(seconds),
        strftime=time.strftime,
    )
    monkeypatch.setattr("qgate.storage.files.time", stand_in)
    return clock
