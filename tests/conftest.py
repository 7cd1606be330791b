"""What all tests share: a world without CI, and one browser."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser import chromium

# Before torch is imported, here and in what tests start: workers of xdist share the processors.
if _workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    _share = max(1, (os.cpu_count() or 1) // int(_workers))
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, str(_share))

_OF_CI = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY")


@pytest.fixture(scope="session", autouse=True)
def outside_ci() -> Iterator[None]:
    """Tests say themselves when they play a CI job, wherever they run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _OF_CI:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found
