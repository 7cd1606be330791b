"""What all tests share: a world without CI, one browser, and one Ray at a time."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

# A run of pytest inside a test forgets what it imported first; upath would import these again, and
# the paths that a process holds would be of other classes than those that a pickle looks up.
import upath.implementations.cloud
import upath.implementations.http
import upath.implementations.memory  # noqa: F401
from hypothesis import HealthCheck, settings
from playwright.sync_api import Browser

from tests import warm
from tests.browser import chromium
from tests.known_packages import known_packages
from tests.shares import Shares
from tests.shares import pytest_addoption as pytest_addoption

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

# Before torch is imported, here and in what tests start: workers of xdist share the processors.
if _workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    _share = max(1, (os.cpu_count() or 1) // int(_workers))
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, str(_share))
# Threads that wait for each other sleep: where processors are busy they would spin for minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# No test fails because its machine is busy.
settings.register_profile("qgate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qgate")

# Files that take longest, the longest first: pytest-xdist begins with them, so that no worker is
# left alone with one at the end. By itself it begins with the files of most tests.
LONGEST_FIRST = (
    "plugin/test_silence.py", "test_house.py", "test_readme.py", "campaigns/mutants/test_planted.py",
    "golden/test_golden.py", "adoption/test_recipes.py", "engines/test_series.py",
    "charts/test_pages_in_browser.py", "page/test_gate_page_in_browser.py",
    "kernels/test_compiled.py", "kernels/test_interpreted.py", "adoption/test_wheel.py",
    "gate/test_held_outputs.py", "sweeps/test_texts_and_plots.py", "adoption/test_core_alone.py",
    "gate/test_own_kernel_faults.py", "collecting/test_collector.py", "cli/test_activations.py",
    "collecting/test_modules.py", "museum/test_museum.py", "activation_stats/test_compute.py",
    "collecting/test_starting.py", "gate/test_fed_faults.py", "engine/test_running.py",
    "audit/test_plugin.py", "engines/test_sync.py", "cli/test_sweep_ray.py",
    "activation_stats/test_shards.py",
)  # fmt: skip
# What one worker does: there is one Ray on a machine, for which another would have to wait, and the
# suites, like runs of them in tests, measure a model once for all of them.
TOGETHER = {
    "ray": (
        "tests/activation_stats/test_shards.py::test_the_command_line_writes_the_same_record_with_any",
        "tests/checkpoints/test_running.py::test_ray_gives",
        "tests/cli/test_sweep_ray.py", "tests/engine/test_ray",
    ),
    "suites": ("suites/",),
    "runs of suites": ("tests/plugin/",),
}  # fmt: skip
_HERE = Path(__file__).parent

# A hundred times what the longest test takes alone.
HUNG_S = 900

_OF_CI = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Shares(config), "shares of cases")
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal files out as `--dist loadfile` does, but for those that stay together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            alone = super()._split_scope(nodeid)
            return next((name for name, of in TOGETHER.items() if nodeid.startswith(of)), alone)

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, and the suites of users before all others."""
    if not hasattr(config, "workerinput"):
        return
    places = {_HERE / name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(
        key=lambda item: places.get(item.path, len(places) * item.path.is_relative_to(_HERE))
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Begin a whole run with another part of the files than other workers do.

    A file is compiled by the worker that comes to it first: for all of them that takes half a
    minute, which workers side by side would take each.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or not any(
        Path(argument).resolve() == _HERE for argument in session.config.args
    ):
        return
    files = sorted(_HERE.rglob("test_*.py"))
    first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    for path in files[first:] + files[:first]:
        name = ".".join(path.relative_to(_HERE.parent).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told as it is collected
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of every garbage collection.

    pytest collects garbage when it ends, and hundreds of tests run pytest in a fork: each of them
    would visit a million objects of torch and of all tests, and so copy the memory they are in.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def failing_if_hung() -> Iterator[None]:
    """Fail where a test stands still, instead of keeping all others waiting without a name."""

    def fail(*_: object) -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        pytest.fail(f"this test took more than {HUNG_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(HUNG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with failing_if_hung():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with failing_if_hung():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    with failing_if_hung():
        yield
        if "ray_cluster" not in getattr(nextitem, "fixturenames", ()):
            _clusters.clear()
            _SHARED_RAY.close()


@pytest.fixture(scope="session", autouse=True)
def outside_ci() -> Iterator[None]:
    """Tests say themselves when they play a CI job, wherever they run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _OF_CI:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_processes() -> Iterator[None]:
    """Let the processes of `--jobs N` start in no time; tests/engine starts them as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qgate.engine._backends.multiprocessing", warm.stand_in())
        yield


@pytest.fixture(scope="session", autouse=True)
def packages_read_once() -> Iterator[None]:
    with known_packages():
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as chromium_browser:
        yield chromium_browser


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


@pytest.fixture
def no_ray() -> Iterator[None]:
    """For a test that finds no cluster on this machine, or starts one of its own."""
    with _ray_alone():
        yield


_SHARED_RAY = contextlib.ExitStack()
_clusters: list[Cluster] = []


@pytest.fixture
def ray_cluster() -> Cluster:
    """Return a cluster to which this process is connected, as all tests in a row share it."""
    if not _clusters:
        from tests.ray_cluster import running

        _SHARED_RAY.enter_context(_ray_alone())
        _clusters.append(_SHARED_RAY.enter_context(running()))
    return _clusters[0]
