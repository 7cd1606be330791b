"""Check the kernels of rooms in processes of their own, and collect the verdicts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.kernel_checks.real.collection import ROOMS, Room
from tests.kernel_checks.real.kernel import Fault, RealKernel

ROOT = Path(__file__).resolve().parents[3]
RIGHT, BEGIN = "", "verdict "


@dataclass(frozen=True)
class Verdict:
    """What `check_kernel` said of one kernel.

    fault       name of the planted fault, empty for the kernel as it should be
    reported    where the fault was published, if it is the package's own
    green       True if the check passed
    first_line  of the failure, or what the report names of a green kernel
    named       True if the first line holds the words of the fault
    """

    package: str
    kernel: str
    fault: str
    reported: str
    green: bool
    first_line: str
    named: bool
    has_words: bool
    seconds: float

    @property
    def is_as_wanted(self) -> bool:
        return self.green == (self.fault == RIGHT)


def judge(kernel: RealKernel, fault: Fault | None = None) -> Verdict:
    """Check a kernel, or one of its faults; never raise."""
    start = time.perf_counter()
    try:
        report = kernel.check(fault)
        green, line = True, describe(report)
    except AssertionError as failure:
        green, line = False, (str(failure).splitlines() or [""])[0]
    except Exception as error:  # a crash is no verdict, and never green
        green, line = False, f"no verdict: {type(error).__name__}: {error}".splitlines()[0]
    words = "" if fault is None else fault.words
    crashed = line.startswith("no verdict: ")
    return Verdict(
        kernel.package,
        kernel.name,
        RIGHT if fault is None else fault.name,
        "" if fault is None else fault.reported,
        green,
        line,
        bool(words) and not green and not crashed and bool(re.search(words, line)),
        bool(words),
        round(time.perf_counter() - start, 2),
    )


def describe(report: Any) -> str:
    """Say which conventions and which arithmetic a report names."""
    parts = [f"{slot}: {name}" for slot, name in report.conventions.items()]
    parts += [str(report.arithmetic)] if getattr(report, "arithmetic", "") else []
    return "; ".join(parts)


def judge_all(
    rooms: Sequence[Room] = ROOMS, only: str = "", right_only: bool = False
) -> Iterator[Verdict]:
    """Judge every kernel and fault whose title holds `only`, room after room."""
    for room in rooms:
        yield from _in_a_process(room, only, right_only)


def _in_a_process(room: Room, only: str, right_only: bool) -> Iterator[Verdict]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("TRITON_INTERPRET", None)
    if room.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.kernel_checks.real.verdicts", room.module, only]
    with subprocess.Popen(
        [*command, *(["right"] if right_only else [])],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith(BEGIN):
                yield Verdict(**json.loads(line.removeprefix(BEGIN)))
        errors = process.stderr.read()
    if process.returncode:
        raise RuntimeError(
            f"{room.module} ended with status {process.returncode}: {errors[-2000:]}"
        )


def main(module: str, only: str, right_only: bool) -> None:
    """Judge the kernels of one room, and print a line of JSON for each."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    room = next(room for room in ROOMS if room.module == module)
    for kernel in room.load():
        for fault in (None, *(() if right_only else kernel.faults)):
            title = kernel.name if fault is None else f"{kernel.name}: {fault.name}"
            if only in f"{kernel.package}: {title}":
                print(BEGIN + json.dumps(asdict(judge(kernel, fault))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "", "right" in sys.argv[3:])
