"""Here processes start as users have them: each loads what it needs by itself."""

from __future__ import annotations

import multiprocessing

import pytest


@pytest.fixture(autouse=True)
def cold_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgate.engine._backends.multiprocessing", multiprocessing)
