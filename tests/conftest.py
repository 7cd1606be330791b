"""What all tests share: a world without CI, one browser, and one Ray at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

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


@contextlib.contextmanager
def _ray_alone() -> Iterator[None]:
    """Whoever asks Ray for the cluster of this machine finds any that runs, also another test's."""
    with (Path(tempfile.gettempdir()) / "qgate-tests-ray.lock").open("w") as file:
        _lock(file, patience=600)
        until = time.monotonic() + 30
        while _ray_runs() and time.monotonic() < until:  # of a test before, whose driver was killed
            time.sleep(0.2)
        if not _ray_runs():  # a killed cluster leaves its address, and Ray would wait for it
            (Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        yield


def _lock(file: IO[str], patience: float) -> None:
    """Fail rather than wait for ever: after a crash, pytest-xdist may leave the holder idle."""
    until = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                pytest.fail(f"another test module held Ray's lock for {patience:g} s")
            time.sleep(0.2)


def _ray_runs() -> bool:
    commands = Path("/proc").glob("[0-9]*/cmdline")
    for command in commands:
        with contextlib.suppress(OSError):
            if b"gcs_server" in command.read_bytes().split(b"\0", 1)[0]:
                return True
    return False


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """For a module whose tests use Ray."""
    with _ray_alone():
        yield


@pytest.fixture
def one_ray_for_a_test() -> Iterator[None]:
    """For a single test, in a module that does not use `one_ray`."""
    with _ray_alone():
        yield
