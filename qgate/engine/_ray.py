"""Ray as the engine: it schedules, retries, and keeps results where they were made.

Only this file knows Ray. Merging happens on the workers, so the driver holds references and the
one result in the end.
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

# Times that Ray starts an item again whose worker or node was lost.
RETRIES = 2
# Ray itself starts an item whose worker ran out of memory again and again, without end.
OUT_OF_MEMORY_TRIES = 6
_PATIENCE = 10.0


class _OutOfMemoryError(Exception):
    """An item was killed for want of memory each time it was tried."""


class RayBackend:
    """Tasks of a Ray cluster; one that was connected before is used and left connected."""

    eager = False

    def __init__(
        self, workers: Workers, function: Callable[..., Any], shared: Sequence[Any]
    ) -> None:
        self._ray = ray = _imported()
        self._was_up = bool(ray.is_initialized())
        if not self._was_up:
            _connect(ray, workers)
        cores = int(ray.cluster_resources().get("CPU", 1))
        self.ahead = 3 * max(1, min(cores, workers.jobs or cores))
        if workers.gpus_per_task and not ray.cluster_resources().get("GPU"):
            self.close()
            raise QgateError(
                f"{workers.gpus_per_task:g} GPUs per task were asked for, and the Ray cluster has "
                "none: leave --gpus-per-task out."
            )
        options: dict[str, Any] = {"max_retries": RETRIES, "num_returns": 2}
        if workers.gpus_per_task:
            options["num_gpus"] = workers.gpus_per_task
        self._task = ray.remote(_leaf).options(**options)
        self._merge = ray.remote(_folded).options(max_retries=RETRIES)
        self._function = ray.put(function)
        self._shared = [ray.put(each) for each in shared]
        self._home = str(Path.cwd())
        self._open: set[Any] = set()

    def start(self, item: Any) -> tuple[Any, Any]:
        done, result = self._task.remote(
            self._home, OUT_OF_MEMORY_TRIES, self._function, item, *self._shared
        )
        self._open.add(done)
        return done, result

    def wait(self, handle: tuple[Any, Any]) -> Failure | None:
        exceptions = self._ray.exceptions
        try:
            self._ray.get(handle[0])
        except exceptions.RayTaskError as error:
            self._forget(handle[1])
            cause = _cause_of(error)
            if isinstance(cause, _OutOfMemoryError):
                return Failure(str(cause))
            raise cause from None
        except exceptions.RayError as error:
            self._forget(handle[1])
            return Failure(_in_words(error))
        finally:
            self._open.discard(handle[0])
        return None

    def _forget(self, result: Any) -> None:
        """What failed is told once; Ray would print it again when nobody asks for the result."""
        with contextlib.suppress(Exception):
            self._ray.get(result)

    def fold(self, merge: Callable[[Any, Any], Any], handles: Sequence[tuple[Any, Any]]) -> Any:
        return None, self._merge.remote(merge, *(result for _, result in handles))

    def result(self, handle: tuple[Any, Any]) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(handle[1])
        except exceptions.RayTaskError as error:
            raise _cause_of(error) from None
        except exceptions.RayError as error:
            raise QgateError(f"a result was lost: {_in_words(error)}.") from None

    def close(self) -> None:
        for done in getattr(self, "_open", ()):
            self._ray.cancel(done)
        if not self._was_up:
            self._ray.shutdown()


def _imported() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise QgateError(
            "the engine ray needs Ray: pip install 'pytest-qgate[ray]', or use --engine local."
        ) from None
    return ray


def _connect(ray: Any, workers: Workers) -> None:
    """To the cluster named; `ray` alone means the one there is, else a new one on this machine."""
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
            ray.init("local", num_cpus=workers.jobs, include_dashboard=False, **quiet)
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise QgateError(
            f"no Ray cluster answers at {address or workers.engine!r}: {why}. Start one with "
            "`ray start --head`, name another address, or use --engine local."
        ) from None


def _knock(address: str) -> None:
    """Whether anybody listens at host:port: Ray itself would try for minutes."""
    found = re.fullmatch(r"(?:ray://)?([^/\s:]+):(\d{1,5})", address)
    if found:
        socket.create_connection((found[1], int(found[2])), timeout=_PATIENCE).close()


def _leaf(
    home: str, tries: int, function: Callable[..., Any], item: Any, *shared: Any
) -> tuple[None, Any]:
    """Two results: one to wait for, one that stays where it is until it is needed.

    Relative paths mean the same as in the driver, where its folder is there.
    """
    if _attempts() >= tries:
        raise _OutOfMemoryError(f"its worker ran out of memory, tried {tries} times")
    with contextlib.suppress(OSError):
        os.chdir(home)
    return None, function(item, *shared)


def _attempts() -> int:
    """How often this item was started before; lost workers and nodes end at RETRIES already."""
    import ray

    worker = getattr(ray._private.worker.global_worker, "core_worker", None)
    asked = getattr(worker, "get_current_task_attempt_number", None)
    return 0 if asked is None else int(asked())


def _folded(merge: Callable[[Any, Any], Any], first: Any, *others: Any) -> Any:
    for other in others:
        first = merge(first, other)
    return first


def _cause_of(error: Any) -> BaseException:
    """What the function raised, and not Ray's wrapping of it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _in_words(error: Exception) -> str:
    kinds = {
        "OutOfMemoryError": "its worker ran out of memory",
        "WorkerCrashedError": "its worker ended",
        "NodeDiedError": "its node was lost",
        "ObjectLostError": "its result was lost with a node",
    }
    name = type(error).__name__
    return f"{kinds.get(name, name)}, tried {RETRIES + 1} times"
