"""Runs of many processes that lose one: `-n 4`, `--jobs 2`, and a sweep on Ray.

Each is a command of its own, as a user types it. The one that was typed is killed, or one of those
it started; in the end no process is left, and the same verb in one process makes all whole.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.campaigns.cases import Bench, Benches, Progress, Tally, shares
from tests.campaigns.forked import Ended
from tests.campaigns.scenarios import (
    ACTIVATIONS_WORDS,
    CHECKPOINT_WORDS,
    ROOT,
    SCENARIOS,
    SWEEP_WORDS,
)
from tests.campaigns.wholeness import whole_file

_PYTHON = (sys.executable, "-m")
_GATES = (*_PYTHON, "pytest", "suites", "--model", "own:build", "--mode", "int8,mxfp8", "-q",
          "-p", "no:cacheprovider", "-p", "no:warnings")  # fmt: skip
# Which scenario, and its verb as a command of many processes.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "-n 2 update": ("update", (*_GATES, "-n", "2", "--update-baselines")),
    "-n 4 update": ("update", (*_GATES, "-n", "4", "--update-baselines")),
    "-n 4 gates": ("gates", (*_GATES, "-n", "4")),
    "sweep --jobs 2": ("sweep", (*_PYTHON, "qgate", *SWEEP_WORDS, "--jobs", "2")),
    "activations --jobs 2": (
        "activations", (*_PYTHON, "qgate", *ACTIVATIONS_WORDS, "--jobs", "2"),
    ),
    "checkpoint --jobs 2": (
        "checkpoint", (*_PYTHON, "qgate", *CHECKPOINT_WORDS, "--jobs", "2"),
    ),
    "sweep on Ray": ("sweep", (*_PYTHON, "qgate", *SWEEP_WORDS, "--set", "engine=ray")),
}  # fmt: skip
_GONE_S, _LONGEST_S = 30.0, 300.0


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    chosen_runs = {title: run for title, run in RUNS.items() if run[0] in names}
    for run_title, share in shares(list(chosen_runs), count).items():
        name, command = chosen_runs[run_title]
        # Pages and records of a run name its command, which is another one here.
        growing = {**SCENARIOS[name].growing, "qgate-out/*": whole_file}
        bench = benches.of(replace(SCENARIOS[name], growing=growing), run_title)
        assert bench.new
        with _cluster() if "ray" in command else contextlib.nullcontext(None) as address:
            _lose(bench, command, share, address, say)
        tallies.append(bench.tally)
    return tallies


def _lose(
    bench: Bench, command: tuple[str, ...], count: int, address: str | None, say: Progress
) -> None:
    whole = _run(bench, command, address)
    seconds = whole.ended().seconds
    bad = bench.state() + [f"status {whole.status}"] * (whole.status != bench.scenario.status)
    bench.note("undisturbed", whole.ended(), bad)
    say(f"{bench.tally.name}: {seconds:.1f} s undisturbed")
    for number in range(count):
        run = _run(bench, command, address, after=bench.random.uniform(0.1, 1.0) * seconds,
                   child=number % 2 == 1, draw=bench.random.random())  # fmt: skip
        bench.tally.seen[f"lost {run.victim}"] += 1
        extra = [f"{len(run.left)} processes are left: {run.left[:2]}"] if run.left else []
        if run.victim != "the command" and "Traceback" in run.said:
            extra.append(f"a crash: {run.said[-400:]!r}")
        bench.tally.failures += [f"{run.victim} lost: {text}" for text in extra]
        bench.judge(f"lost {run.victim} after {run.moment:.2f} s", run.ended())
        say(f"{bench.tally.name}: {number + 1} of {count}")


class _Run:
    """A command that lost a process, and what became of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.begun = time.monotonic()
        self.victim, self.moment, self.said, self.seconds = "nothing", 0.0, "", 0.0
        self.left: list[str] = []

    @property
    def status(self) -> int:
        return int(self.process.returncode)

    def ended(self) -> Ended:
        return Ended(self.status, self.said, self.seconds)


def _run(
    bench: Bench, command: tuple[str, ...], address: str | None, after: float = 0.0,
    child: bool = False, draw: float = 0.0,
) -> _Run:  # fmt: skip
    case = bench.fresh()
    more = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(case)]), "CAMPAIGN": str(os.getpid())}
    more |= {} if address is None else {"RAY_ADDRESS": address}
    log = bench.home / "said"
    with log.open("w") as file:
        run = _Run(subprocess.Popen(command, cwd=case, env={**os.environ, **more},
                                    stdout=file, stderr=subprocess.STDOUT))  # fmt: skip
    if after:
        handle = os.pidfd_open(run.process.pid)
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        if not waiting.poll(after * 1000):
            run.moment = after
            started = _descendants(run.process.pid)
            chosen = started[int(draw * len(started))] if child and started else run.process.pid
            run.victim = "the command" if chosen == run.process.pid else "one of its processes"
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
        os.close(handle)
    try:
        run.process.wait(timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        run.process.kill()
        run.process.wait()
        run.left.append("the command itself, which hung")
    run.seconds = time.monotonic() - run.begun
    end = time.monotonic() + _GONE_S
    while (strays := _working_in(case)) and time.monotonic() < end:
        time.sleep(0.1)
    run.left += strays.values()
    for pid in strays:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.said = log.read_text(errors="replace")
    return run


def _descendants(pid: int) -> list[int]:
    """Those that work; not the one in which Python itself keeps its books."""
    descendants = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                words = Path(f"/proc/{child}/cmdline").read_bytes()
                descendants += [] if b"resource_tracker" in words else [child]
                descendants += _descendants(child)
    return descendants


def _working_in(case: Path) -> dict[int, str]:
    """Processes of this campaign whose working directory is the folder of the case."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink() == case and int(entry.name) != os.getpid():
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words.strip() and not words.startswith("ray::"):
                    processes[int(entry.name)] = words[:120]
    return processes


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        yield str(cluster.address)
    finally:
        cluster.shutdown()
