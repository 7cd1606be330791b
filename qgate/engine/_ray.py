"""The engine of Ray, which schedules, retries and stores results; only this file imports Ray.

Workers merge results, so the driver has references and one final result.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qgate.engine.workers import RAY, Failure, Workers
from qgate.errors import QgateError

# Number of times that Ray repeats an item whose worker or node was lost.
RETRIES = 2
# Ray itself repeats an item whose worker ran out of memory without end.
OUT_OF_MEMORY_TRIES = 6
_PATIENCE = 10.0
# Ray takes a node for dead that misses five heartbeats, as it does on a machine that is too busy.
# A cluster of this machine alone needs none: it ends with the driver.
_OWN_CLUSTER = {"health_check_failure_threshold": 100_000}


class _OutOfMemoryError(Exception):
    """An item ran out of memory at each try."""


class RayBackend:
    """Tasks of a Ray cluster; an existing connection is used and stays open."""

    eager = False

    def __init__(
        self, workers: Workers, function: Callable[..., Any], shared: Sequence[Any]
    ) -> None:
        self._ray = ray = _import_ray()
        self._was_up = bool(ray.is_initialized())
        if not self._was_up:
            _connect(ray, workers)
        cores = int(ray.cluster_resources().get("CPU", 1))
        self.ahead = 3 * max(1, min(cores, workers.jobs or cores))
        if workers.gpus_per_task and not ray.cluster_resources().get("GPU"):
            self.close()
            raise QgateError(
                f"{workers.gpus_per_task:g} GPUs per task were asked for, and the Ray cluster has "
                "none: set gpus_per_task to 0 (in qgate.toml, or with --set gpus_per_task=0)."
            )
        options: dict[str, object] = {"max_retries": RETRIES, "num_returns": 2}
        if workers.gpus_per_task:
            options["num_gpus"] = workers.gpus_per_task
        self._task = ray.remote(_leaf).options(**options)
        self._merge = ray.remote(_merge_all).options(max_retries=RETRIES)
        self._function = ray.put(function)
        self._shared = [ray.put(value) for value in shared]
        self._home = str(Path.cwd())

    def start(self, item: Any) -> tuple[Any, Any]:
        done, result = self._task.remote(
            self._home, OUT_OF_MEMORY_TRIES, self._function, item, *self._shared
        )
        return done, result

    def wait(self, handle: tuple[Any, Any]) -> Failure | None:
        try:
            self._ray.get(handle[0])
        except self._ray.exceptions.RayError as error:
            self._silence(handle[1])
            cause = _cause_of(error)
            if isinstance(cause, _OutOfMemoryError):
                return Failure(str(cause))
            if self._is_of_ray(cause):
                return Failure(_failure_text(cause))
            raise cause from None
        return None

    def _is_of_ray(self, cause: BaseException) -> bool:
        """Tell an error of Ray, which lost a worker, a node or an input, from the function's."""
        exceptions = self._ray.exceptions
        return isinstance(cause, exceptions.RayError) and not isinstance(
            cause, exceptions.RayTaskError
        )

    def _silence(self, result: Any) -> None:
        """Fetch a failed result, which Ray would otherwise report once more."""
        with contextlib.suppress(Exception):
            self._ray.get(result)

    def fold(self, merge: Callable[[Any, Any], Any], handles: Sequence[tuple[Any, Any]]) -> Any:
        return None, self._merge.remote(merge, *(result for _, result in handles))

    def result(self, handle: tuple[Any, Any]) -> Any:
        try:
            return self._ray.get(handle[1])
        except self._ray.exceptions.RayError as error:
            cause = _cause_of(error)
            if self._is_of_ray(cause):
                raise QgateError(f"a result was lost: {_failure_text(cause)}.") from None
            raise cause from None

    def close(self) -> None:
        """Disconnect if this connected; items that run on an open connection run to their end.

        They are at most `ahead`. Ray 2.60 ends the whole process when a task that is canceled ends
        at the same moment: once in a few hundred errors.
        """
        if not self._was_up:
            self._ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise QgateError(
            "the engine ray needs Ray: pip install 'pytest-qgate[ray]', or set engine to local."
        ) from None
    return ray


def _connect(ray: Any, workers: Workers) -> None:
    """Connect to a cluster; `ray` alone means a running one, else a new one on this machine."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    address = os.environ.get("RAY_ADDRESS", "") if workers.engine == RAY else workers.engine
    try:
        _knock(address)
        if workers.engine != RAY:
            ray.init(workers.engine, **quiet)
            return
        try:
            ray.init("auto", **quiet)
        except ConnectionError:
            own = {"include_dashboard": False, "_system_config": _OWN_CLUSTER, **quiet}
            ray.init("local", num_cpus=workers.jobs, **own)
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise QgateError(
            f"no Ray cluster answers at {address or workers.engine!r}: {why}. Start one with "
            "`ray start --head`, name another address, or set engine to local."
        ) from None


def _knock(address: str) -> None:
    """Raise an OSError where nothing listens at host:port; Ray would try for minutes."""
    match = re.fullmatch(r"(?:ray://)?([^/\s:]+):(\d{1,5})", address)
    if match:
        socket.create_connection((match[1], int(match[2])), timeout=_PATIENCE).close()


def _leaf(
    home: str, tries: int, function: Callable[..., Any], item: Any, *shared: Any
) -> tuple[None, Any]:
    """Return two results: one to wait for, and one that stays on its node until it is needed.

    Relative paths mean the same as in the driver if its folder exists.
    """
    if _attempts() >= tries:
        raise _OutOfMemoryError(f"its worker ran out of memory, tried {tries} times")
    with contextlib.suppress(OSError):
        os.chdir(home)
    return None, function(item, *shared)


def _attempts() -> int:
    """Count earlier tries of this item; lost workers and nodes end at RETRIES already."""
    import ray

    worker = getattr(ray._private.worker.global_worker, "core_worker", None)
    attempt_number = getattr(worker, "get_current_task_attempt_number", None)
    return 0 if attempt_number is None else int(attempt_number())


def _merge_all(merge: Callable[[Any, Any], Any], first: Any, *more: Any) -> Any:
    for next_one in more:
        first = merge(first, next_one)
    return first


def _cause_of(error: Any) -> BaseException:
    """Return the error of the function without Ray's wrapper."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _failure_text(error: BaseException) -> str:
    kinds = {
        "OutOfMemoryError": "its worker ran out of memory",
        "WorkerCrashedError": "its worker ended",
        "NodeDiedError": "its node was lost",
        "ObjectLostError": "its result was lost with a node",
        "OwnerDiedError": "the cluster ended or lost what it needs",
    }
    name = type(error).__name__
    return f"{kinds.get(name, name)}, tried {RETRIES + 1} times"
