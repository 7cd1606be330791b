"""The guard of a collector's hooks: nothing that they do is raised into the program."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from qgate.errors import QgateError


class Guard:
    """Does the work of hooks: of one thread at a time, and in the process that collects.

    A forked process has no thread that writes, and a trace or a compiled graph would hold what
    hooks compute: there nothing is done. Errors go to `on_error`; only a refusal to begin, such as
    of a folder that is taken, ends the program.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __call__(self, work: Callable[..., Any], *args: Any) -> Any:
        # Asked first, as the compiler folds it and sees nothing of the others.
        if torch.compiler.is_compiling() or torch._C._is_tracing() or self.is_elsewhere():
            return None
        with self._lock:
            try:
                return work(*args)
            except QgateError:
                raise
            except Exception as error:
                self._on_error(error)
                return None

    def is_elsewhere(self) -> bool:
        """Tell whether this is a fork of the process that collects."""
        return os.getpid() != self._process


class CallingThread:
    """The thread whose call of the model is collected; calls of others meanwhile are not."""

    def __init__(self) -> None:
        self.ignored = 0
        self._thread: threading.Thread | None = None
        self._depth = 0
        self._depths_elsewhere: dict[int, int] = {}

    def enter(self) -> bool:
        """Note a call of the model; False where another thread is in one."""
        thread, ident = threading.current_thread(), threading.get_ident()
        busy = self._thread is not None and self._thread.is_alive()
        if ident in self._depths_elsewhere or (busy and self._thread is not thread):
            self.ignored += ident not in self._depths_elsewhere
            self._depths_elsewhere[ident] = self._depths_elsewhere.get(ident, 0) + 1
            return False
        self._depth = self._depth + 1 if self._thread is thread else 1
        self._thread = thread
        return True

    def leave(self) -> bool:
        """Note the end of a call, also of one that raised; False where it is not collected."""
        ident = threading.get_ident()
        if ident in self._depths_elsewhere:
            self._depths_elsewhere[ident] -= 1
            if not self._depths_elsewhere[ident]:
                del self._depths_elsewhere[ident]
            return False
        self._depth -= 1
        if self._depth <= 0:
            self._thread, self._depth = None, 0
        return True

    def is_ignored(self) -> bool:
        """Tell whether this thread is in a call that is not collected."""
        return threading.get_ident() in self._depths_elsewhere
