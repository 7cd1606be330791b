"""Choice of engine: this process, several on this machine, or a Ray cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qgate.errors import QgateError

LOCAL, RAY = "local", "ray"
_ADDRESS = re.compile(r"ray://[^/\s:]+:\d{1,5}")


@dataclass(frozen=True)
class Workers:
    """Settings of the engine.

    engine         local, ray (the cluster of RAY_ADDRESS or of this machine, else a new one here),
                   or ray://host:port
    jobs           processes; 1 of the local engine is this process, None of Ray all its cores
    gpus_per_task  share of a GPU that Ray reserves for each item, such as 0.5
    """

    engine: str = LOCAL
    jobs: int | None = None
    gpus_per_task: float = 0.0

    def __post_init__(self) -> None:
        if self.engine not in (LOCAL, RAY) and not _ADDRESS.fullmatch(self.engine):
            raise QgateError(
                f"engine {self.engine!r} is not known; it is local, ray, or ray://host:port."
            )
        if self.jobs is not None and self.jobs < 1:
            raise QgateError(f"{self.jobs} jobs are not allowed; use 1 or more.")
        if not 0 <= self.gpus_per_task <= 64:
            raise QgateError(f"{self.gpus_per_task} GPUs per task are not allowed; use 0 to 64.")
        if self.gpus_per_task and self.engine == LOCAL:
            raise QgateError(
                "gpus_per_task shares the GPUs of a Ray cluster; the local engine has none to "
                "share: choose the device instead."
            )

    @property
    def is_local(self) -> bool:
        return self.engine == LOCAL

    @property
    def is_here(self) -> bool:
        """True if only this process computes."""
        return self.is_local and (self.jobs or 1) == 1


@dataclass(frozen=True)
class Failure:
    """An item whose process ended; errors of the function itself are raised."""

    reason: str


def workers_of(workers: Workers | int) -> Workers:
    """Return workers; a number means that many processes on this machine."""
    return workers if isinstance(workers, Workers) else Workers(jobs=max(1, workers))
