"""Start the processes of `--jobs N` out of one that has loaded torch, instead of each by itself.

They are forks of a server that does nothing else, so that none inherits threads; all else is as
users have it: what they get is pickled, and what they import after torch they import themselves.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import SimpleNamespace
from typing import Any

PRELOADED = (
    "torch", "numpy", "msgspec", "safetensors.torch", "qgate.formats.quantizer", "qgate.sweeps.running",
    "qgate.drawing.tensor_pass", "qgate.drawing.plots.pictures", "qgate.comparing.dump_comparison",
)  # fmt: skip


class WarmProcess(ForkServerProcess):
    """A process with the environment of the moment it was made, not that of the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess  # type: ignore[assignment]


def context() -> WarmContext:
    made = WarmContext()
    made.set_forkserver_preload(list(PRELOADED))
    return made


def stand_in() -> SimpleNamespace:
    """Return what `qgate.engine._backends` takes for `multiprocessing`."""
    return SimpleNamespace(
        get_context=lambda _method: context(), parent_process=multiprocessing.parent_process
    )
