"""Check the kernels of rooms in processes of their own, and collect the verdicts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qgate.testing import CheckReport
from tests.kernel_checks.real.collection import ROOMS, Room
from tests.kernel_checks.real.kernel import Fault, RealKernel, title_of

ROOT = Path(__file__).resolve().parents[3]
RIGHT = ""
BEGIN, END = "begin ", "verdict "


@dataclass(frozen=True)
class Verdict:
    """What `check_kernel` said of one kernel.

    fault       name of the planted fault, empty for the kernel as it should be
    is_bug      True if the fault is the package's own
    verdict     "green", "red", or "none" where an exception or the end of the process came first
    first_line  of the failure, or what the report names of a green kernel
    named       True if the first line holds the words of the fault
    """

    package: str
    version: str
    kernel: str
    fault: str
    is_bug: bool
    verdict: str
    first_line: str
    named: bool
    has_words: bool
    seconds: float = 0.0

    @property
    def distribution(self) -> str:
        """Return the name under which the package is installed."""
        return self.package.partition(",")[0]

    @property
    def title(self) -> str:
        title = f"{self.package}: {self.kernel}"
        return title if self.fault == RIGHT or self.is_bug else f"{title}: {self.fault}"

    @property
    def is_as_wanted(self) -> bool:
        return self.verdict == ("green" if self.fault == RIGHT else "red")


def judge(kernel: RealKernel, fault: Fault | None = None) -> Verdict:
    """Check a kernel, or one of its faults; never raise."""
    start = time.perf_counter()
    try:
        verdict, line = "green", describe(kernel.check(fault))
    except AssertionError as failure:
        verdict, line = "red", (str(failure).splitlines() or [""])[0]
    except Exception as error:
        verdict, line = "none", f"{type(error).__name__}: {error}".splitlines()[0]
    words = kernel.words if fault is None else fault.words
    return replace(
        unjudged(kernel, fault),
        verdict=verdict,
        first_line=line,
        named=bool(words) and verdict == "red" and is_named(words, line),
        seconds=round(time.perf_counter() - start, 2),
    )


def unjudged(kernel: RealKernel, fault: Fault | None) -> Verdict:
    """Return the verdict of a case in which the process ends."""
    return Verdict(
        kernel.package,
        version(kernel.package.partition(",")[0]).partition("+")[0],
        kernel.name,
        kernel.bug if fault is None else fault.name,
        bool(kernel.bug),
        "none",
        "the process ended",
        named=False,
        has_words=bool(kernel.words if fault is None else fault.words),
    )


def is_named(words: str, first_line: str) -> bool:
    """Tell whether a first line holds the words; advice to declare other sums is no cause."""
    return "errors look like rounding" not in first_line and bool(re.search(words, first_line))


def describe(report: CheckReport) -> str:
    """Say which conventions and which arithmetic a report names."""
    parts = [f"{slot}: {name}" for slot, name in report.conventions.items()]
    arithmetic = getattr(report, "arithmetic", "")
    return "; ".join([*parts, *([str(arithmetic)] if arithmetic else [])])


@dataclass(frozen=True)
class Selection:
    """Which cases to judge: those whose title holds a text, with or without faults, or by title.

    `known` are titles that were judged before.
    """

    only: str = ""
    right_only: bool = False
    titles: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def holds(self, title: str, fault: Fault | None) -> bool:
        if title in self.known or (self.right_only and fault is not None):
            return False
        return title in self.titles if self.titles else self.only in title


def titles_of(room: Room) -> list[str]:
    """List the titles of a room's cases, in the order in which they are judged."""
    done = subprocess.run(
        _command(room, {"list": True}),
        cwd=ROOT, env=_environment(room), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{room.module} ended with status {done.returncode}: {done.stderr}")
    titles: list[str] = json.loads(done.stdout.splitlines()[-1])
    return titles


def _environment(room: Room) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("TRITON_INTERPRET", None)
    return {**environment, **({"TRITON_INTERPRET": "1"} if room.interpreted else {})}


def _command(room: Room, wanted: dict[str, Any]) -> list[str]:
    return [
        sys.executable, "-m", "tests.kernel_checks.real.verdicts", room.module, json.dumps(wanted)
    ]  # fmt: skip


def judge_room(room: Room, selection: Selection) -> Iterator[Verdict]:
    """Judge the cases of a room in a process, and go on in another one where it ends early."""
    count = 0
    while True:
        begun: Verdict | None = None
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                _command(room, {**asdict(selection), "skip": count}),
                cwd=ROOT, env=_environment(room), stdout=subprocess.PIPE, stderr=errors, text=True,
            ) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(BEGIN):
                    begun = Verdict(**json.loads(line.removeprefix(BEGIN)))
                elif line.startswith(END):
                    yield Verdict(**json.loads(line.removeprefix(END)))
                    count, begun = count + 1, None
            status = process.wait()
            errors.seek(0)
            text = errors.read()
        if begun is None:
            if status:
                raise RuntimeError(f"{room.module} ended with status {status}: {text[-2000:]}")
            return
        yield replace(begun, first_line=f"the process ended with status {status}")
        count += 1


def main(module: str, wanted: str) -> None:
    """Judge the kernels of one room; print a line of JSON before and after each."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    room = next(room for room in ROOMS if room.module == module)
    options = json.loads(wanted)
    if "list" in options:
        cases = [(kernel, fault) for kernel in room.load() for fault in (None, *kernel.faults)]
        print(json.dumps([title_of(kernel, fault) for kernel, fault in cases]))
        return
    skip = options.pop("skip")
    selection = Selection(**options)
    cases = [
        (kernel, fault)
        for kernel in room.load()
        for fault in (None, *kernel.faults)
        if selection.holds(title_of(kernel, fault), fault)
    ]
    for kernel, fault in cases[skip:]:
        print(BEGIN + json.dumps(asdict(unjudged(kernel, fault))), flush=True)
        print(END + json.dumps(asdict(judge(kernel, fault))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
