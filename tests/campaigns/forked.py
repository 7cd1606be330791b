"""Verbs in children of a warm process: the real code, without the seconds that torch takes to load.

A child works in the folder of its case, says what it says into a pipe, and ends without what this
process would do at its own end.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Verb = Callable[[], int]
Fault = Callable[[], None]
LONGEST_S = 600.0
_MOST_SAID = 1 << 20
# Signals that a verb answers, from its start to its end.
_POLITE = {signal.SIGINT, signal.SIGTERM}
OURS = 70
"""Exit status of a child whose verb raised, which no verb of qgate may."""


@dataclass(frozen=True)
class Ended:
    """Status (below 0 the signal), all that was said, seconds."""

    status: int
    said: str
    seconds: float


class Child:
    """One running verb."""

    def __init__(self, verb: Verb, folder: Path, fault: Fault | None = None) -> None:
        self._said, saying = os.pipe()  # which no limit on files cuts short
        fcntl.fcntl(saying, fcntl.F_SETPIPE_SZ, _MOST_SAID)
        sys.stdout.flush()
        sys.stderr.flush()
        self.begun = time.monotonic()
        waiting = signal.pthread_sigmask(signal.SIG_BLOCK, _POLITE)
        self.pid = os.fork()
        if not self.pid:
            _work(verb, folder, fault, saying)
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        os.close(saying)
        self._handle = os.pidfd_open(self.pid)

    def ended(self, killed_after_s: float | None = None, sent: int = signal.SIGKILL) -> Ended:
        """Wait for its end, or send it a signal; what hangs is killed and told."""
        limit = LONGEST_S if killed_after_s is None else killed_after_s
        waiting = select.poll()
        waiting.register(self._handle, select.POLLIN)
        hung = not waiting.poll(limit * 1000)
        if hung and sent != signal.SIGKILL:
            os.kill(self.pid, sent)
            killed_after_s = None
            hung = not waiting.poll(LONGEST_S * 1000)
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._handle)
        seconds = time.monotonic() - self.begun
        os.set_blocking(self._said, False)
        try:
            output = os.read(self._said, _MOST_SAID).decode(errors="replace")
        except BlockingIOError:
            output = ""
        os.close(self._said)
        if hung and killed_after_s is None:
            output += f"\nhung: killed after {limit:g} s"
        return Ended(status, output, seconds)


def _work(verb: Verb, folder: Path, fault: Fault | None, saying: int) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] in ("suites", "conftest"):
            del sys.modules[name]  # of a pytest run in another folder
    _use_one_thread()
    gc.freeze()  # what the parent has is not visited, and so not copied
    status, coverage, begun = OURS, _coverage(), False
    try:
        os.dup2(saying, 1)
        os.dup2(saying, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        if fault is not None:
            fault()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _POLITE)
        begun = True
        status = verb()
        signal.pthread_sigmask(signal.SIG_BLOCK, _POLITE)
    except SystemExit as end:  # of SIGTERM
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        if begun or not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            if coverage is not None:
                coverage.stop()
                coverage.save()
        os._exit(status & 0xFF)


def _use_one_thread() -> None:
    """Keep torch to one thread: those of the parent are not in its fork, which would wait for them."""
    torch.set_num_threads(1)
    torch.set_num_threads = lambda _number: None


def _coverage() -> Any:
    """Measure this child if its parent is measured: it ends without writing what was."""
    module = sys.modules.get("coverage")
    settings = os.environ.get("COVERAGE_PROCESS_START")
    if module is None or not settings:
        return None
    measured = module.Coverage(config_file=settings, data_suffix=True, auto_data=True)
    measured.start()
    return measured


def ran(verb: Verb, folder: Path, fault: Fault | None = None) -> Ended:
    """A verb from its start to its end."""
    return Child(verb, folder, fault).ended()


def warmed(verb: Verb, folder: Path) -> Ended:
    """A verb from its start to its end; what it imported is imported here, for all that follow."""
    listed = Path(tempfile.gettempdir()) / "modules"

    def telling() -> int:
        status = verb()
        names = [name for name, module in list(sys.modules.items()) if _is_shared(module)]
        listed.write_text("\n".join(names))
        return status

    ended = ran(telling, folder)
    if listed.exists():
        for name in listed.read_text().split():
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        listed.unlink()
    return ended


def _is_shared(module: object) -> bool:
    """Part of what is installed, and not of the folder of a case."""
    file = str(getattr(module, "__file__", None) or "")
    root = str(Path(__file__).resolve().parents[2])
    return file.startswith((sys.prefix, sys.base_prefix, root)) and "tests" not in Path(file).parts
