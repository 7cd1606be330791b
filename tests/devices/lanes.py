"""Processes of one part: each is watched, killed when its time is over, and started again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.devices.journal import Journal, Progress
from tests.devices.record import Row, Status

ROOT = Path(__file__).resolve().parents[2]
LOST = 86
"""The exit status of a process whose device answers nothing any more."""
_PR_SET_PDEATHSIG = 1
_SOON_S = 2
"""A case that ran for less when the time was over is not hung."""


def die_with_parent() -> None:
    """Let the system kill this process if the one that started it is killed; on Linux alone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Lane:
    """One process after another that work on the same cases.

    A case in which a process dies, or that takes more than `case_s`, is a row; the next process
    goes on with the case after it. A process that begins no case is the last.
    """

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], folder: Path,
        case_s: float,
    ) -> None:  # fmt: skip
        self.name, self.command, self.environment, self.case_s = name, command, environment, case_s
        self.journal = Journal(folder / f"{name}.jsonl")
        self.log = folder / f"{name}.txt"
        self.progress = Progress()
        self.running = True
        self._size = 0
        self._start()

    def _start(self) -> None:
        self._begun_before = len(self.progress.begun)
        self._case_began = self._began = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def watch(self, until: float) -> None:
        """Read what is new, and see whether the process ended, or its time is over."""
        status = self._process.poll()
        self._read()
        now = time.monotonic()
        took = now - self._case_began
        if status is not None:
            self._close()
            self._after(status, took)
        elif now >= until:
            words = f"after {took:.0f} s, when the time of the part was over"
            self.stop(words, "hung" if took > _SOON_S else "not run")
        elif self.progress.under_way is not None and took > self.case_s:
            self._kill()
            self._note("hung", f"after {took:.0f} s")
            self._start()

    def stop(self, why: str, status: Status = "hung") -> None:
        """Kill the process for good; `status` is that of the case it is in."""
        self._kill()
        self._note(status, why)
        self.running = False

    def _after(self, status: int, took: float) -> None:
        progress = self.progress
        if status == 0 and progress.ended:
            self.running = False
            return
        if status == LOST and progress.under_way is None:  # the case has its row
            self._start()
            return
        if status < 0:
            words = f"with {signal.Signals(-status).name} after {took:.0f} s"
        elif status == 0:
            words = f"after {took:.0f} s without an answer"
        else:
            words = f"with status {status} after {took:.0f} s: {self._last_line()}"
        self._note("died", words)
        if len(self.progress.begun) > self._begun_before:
            self._start()
        else:
            self.running = False

    def _note(self, status: Status, text: str) -> None:
        name = self.progress.under_way or f"{self.name}, outside of its cases"
        self.journal.close_line()
        self.journal.add_row(Row(name, status, text))
        if self.progress.under_way is not None:
            self.journal.add(ends=self.progress.under_way)
        self._read()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            size = self.journal.path.stat().st_size
            if size != self._size:
                self._size = size
                begun = len(self.progress.begun)
                self.journal.read(self.progress)
                if len(self.progress.begun) != begun:
                    self._case_began = time.monotonic()

    def _kill(self) -> None:
        self._close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it for ever
            self._process.wait(5)
        self.journal.close_line()
        self._read()

    def _close(self) -> None:
        """End whatever the process started."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it printed nothing"

    def rows(self) -> list[Row]:
        """Return its rows, and one for what is missing."""
        progress = self.progress
        rows = list(progress.rows)
        if progress.unreadable:
            rows.append(Row(self.name, "unreadable", f"it wrote {progress.unreadable!r}"))
        if not self.running:
            if progress.cases is None:
                rows.append(Row(f"cases of {self.name}", "not run", "it did not say which it has"))
            elif missing_cases := progress.cases - len(set(progress.begun)):
                rows.append(Row(f"{missing_cases} cases of {self.name}", "not run", "no time left"))
        return rows
