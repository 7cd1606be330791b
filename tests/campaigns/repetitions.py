"""The same gates again and again, in every way that must not matter: none may be red.

  python -m tests.campaigns.repetitions --count 100 --seed 1
  python -m tests.campaigns.repetitions --python /path/to/other/bin/python

Each repetition draws the number of threads, the instructions that torch and its libraries may use,
the order of the tests, the number of processes, and the Python that runs them. Of every number that
a gate looked at the spread over the repetitions is kept: that is the noise floor, and the last
table holds it against the room that the gate leaves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
# What other processors would compute with; MKL and oneDNN choose by themselves otherwise.
INSTRUCTIONS = {
    "own": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "sse4.2": {
        "ATEN_CPU_CAPABILITY": "default",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "reproducible": {"MKL_CBWR": "COMPATIBLE"},
}
GATES = (
    ("tiny-mamba", "2-1"),
    ("tiny-mamba", "0,3,fp16"),
    ("tiny-llama", "mxfp4"),
    ("tiny-llama", "mxfp8,int8"),
)
Number = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Way:
    """How one repetition runs."""

    python: str
    threads: int
    instructions: str
    processes: int
    order: int
    model: str
    modes: str

    def command(self) -> list[str]:
        spread = ["-n", str(self.processes), "--dist", "loadfile"] if self.processes else []
        given = ["--model", self.model, "--mode", self.modes, "--layers", "first,last"]
        shuffled = ["-p", "tests.campaigns.shuffled", "-p", "no:cacheprovider", "--no-report"]
        return [self.python, "-m", "pytest", "suites", "-q", *given, *spread, *shuffled]

    def environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        order = {"QGATE_TEST_ORDER": str(self.order), "PYTHONHASHSEED": str(self.order)}
        inner = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **threads, **INSTRUCTIONS[self.instructions], **order, **inner}


@dataclass
class Seen:
    """The least and the largest of a number, and the room a gate left it."""

    low: float = math.inf
    high: float = -math.inf
    bound: float | None = None
    times: int = 0

    def add(self, value: float, bound: float | None) -> None:
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.bound = bound if self.bound is None else self.bound
        self.times += 1

    @property
    def spread(self) -> float:
        """Relative to the larger end; zero where both are zero."""
        size = max(abs(self.low), abs(self.high))
        return (self.high - self.low) / size if size else 0.0


@dataclass
class Tally:
    runs: Counter[str] = field(default_factory=Counter)
    red: list[str] = field(default_factory=list)
    numbers: dict[Number, Seen] = field(default_factory=lambda: defaultdict(Seen))


def ways(count: int, seed: int, pythons: list[str]) -> Iterator[Way]:
    """Every gate, instruction set and Python in turn; the rest is drawn."""
    drawn = random.Random(seed)
    for i in range(count):
        model, modes = GATES[i % len(GATES)]
        yield Way(
            pythons[i // len(GATES) % len(pythons)],
            drawn.choice((1, 1, 2, 3, 4, 8)),
            list(INSTRUCTIONS)[(i // 3) % len(INSTRUCTIONS)],
            drawn.choice((0, 0, 2, 4)),
            drawn.randrange(10**6),
            model,
            modes,
        )


def repeat(way: Way, home: Path, tally: Tally) -> int:
    """One repetition in a folder that has the suites and the baselines, and nothing else."""
    for name in ("conftest.py", "suites", "baselines", "pyproject.toml"):
        (home / name).symlink_to(ROOT / name)
    done = subprocess.run(
        way.command(), cwd=home, env=way.environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        tally.red.append(f"{way}\n{done.stdout[-1500:]}\n{done.stderr[-500:]}")
    found = list(home.glob("qgate-out/**/results*.jsonl"))
    for path in found:
        for line in path.read_text(encoding="utf-8").splitlines():
            note(json.loads(line), tally)
    if not found and not done.returncode:
        tally.red.append(f"{way}\nno results were left")
    return done.returncode


def note(record: dict, tally: Tally) -> None:
    for check in record.get("checks", []):
        value = check["value"]
        if check["metric"] == "quantizer" or not isinstance(value, float):
            continue
        names = (record["model"], record["mode"], check["site"], check["scope"], check["metric"])
        tally.numbers[names].add(value, check["bound"])


def table(tally: Tally) -> list[list[object]]:
    """By metric and scope: how far numbers moved, the one that came nearest to its limit."""
    groups: dict[tuple[str, str], list[tuple[Number, Seen]]] = defaultdict(list)
    for key, seen in tally.numbers.items():
        if seen.times > 1:
            groups[key[4], key[3]].append((key, seen))
    rows: list[list[object]] = []
    for (metric, scope), each in sorted(groups.items()):
        key, widest = max(each, key=lambda pair: pair[1].spread)
        same = sum(seen.low == seen.high for _, seen in each)
        rows.append([metric, scope, len(each), same, widest.spread, f"{key[1]} {key[2]}"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.repetitions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--python", action="append", metavar="PATH", help="repeatable")
    args = parser.parse_args()
    tally, begun = Tally(), time.monotonic()
    for i, way in enumerate(ways(args.count, args.seed, args.python or [sys.executable]), 1):
        with tempfile.TemporaryDirectory(prefix="repetition-") as home:
            status = repeat(way, Path(home), tally)
        tally.runs[f"{way.instructions}, {way.model}"] += 1
        said = f"{way.model} {way.modes}, {way.threads} threads, {way.instructions}"
        took = time.monotonic() - begun
        mark = "green" if status == 0 else f"RED ({status})"
        print(f"{took:7.1f} s  {i}/{args.count} {mark}  {said}, -n {way.processes}", flush=True)
    heads = ["metric", "scope", "numbers", "the same bits", "widest, relative", "where"]
    print(tabulate(table(tally), headers=heads, floatfmt=".2g"))
    for text in tally.red:
        print(text)
    print(f"{args.count} repetitions, {len(tally.red)} red, seed {args.seed}")
    return bool(tally.red)


if __name__ == "__main__":
    raise SystemExit(main())
