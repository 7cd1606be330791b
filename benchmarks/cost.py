"""What a gigabyte and a tensor of a dump cost, and what follows for 1, 100 and 10,000 ranks.

    python benchmarks/cost.py [--gigabytes 1] [--rounds 3] [--folder DIR]
    python benchmarks/cost.py --rank-gigabytes 50 --rank-tensors 20000 --cores 640 --network 10

Rates are of one process with one thread and a warm page cache, medians of the rounds. Work is
spread over cores; what the driver does is not. Before the last table the model is held against
commands with two processes, `qgate dumps verify` and `qgate dumps draw`, as they stand.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _turns import seconds
from dumps import write
from tabulate import tabulate

from qgate import stats
from qgate.comparing.dump_comparison import compare_dumps
from qgate.drawing.compute import analyze_dump
from qgate.drawing.files import draw_analysis
from qgate.dumps import Dump, merge_dumps, problems
from qgate.engine import map_items
from qgate.results import rows
from qgate.sweeps.requests import sweep_file
from qgate.sweeps.settings import SweepSettings

_SMALL = 256
# How often the driver reads an index: to choose, to send, and to add up or to pair.
_READS = {"drawn, no pictures": 3, "compared": 4}
RANKS = (1, 100, 10_000)


@dataclass(frozen=True)
class Cost:
    """Of one way of work: per gigabyte and per tensor, spread; per tensor, by the driver."""

    gigabyte: float
    tensor: float
    driver: float = 0.0

    def computing(self, gigabytes: float, tensors: float, cores: int) -> float:
        """Seconds, what the driver does included."""
        spread = (self.gigabyte * gigabytes + self.tensor * tensors) / cores
        return spread + self.driver * tensors


def swept(folder: Path) -> None:
    for path in sorted(folder.rglob("*.safetensors")):
        for found in sweep_file(str(path), SweepSettings(granularity="tensor")):
            assert found.error is None


def rates(home: Path, gigabytes: float, rounds: int) -> dict[str, Cost]:
    """Large tensors tell what a gigabyte costs, and tiny ones what a tensor does besides."""
    elements, tiny = 2**23, 2**10
    count = max(2, round(gigabytes * 1e9 / elements / 2))
    large = [write(home / f"large{n}", count, elements, torch.bfloat16, 0.01 * n) for n in (0, 1)]
    small = [write(home / f"small{n}", _SMALL, tiny, torch.bfloat16, 0.01 * n) for n in (0, 1)]

    def counted(dump: Dump) -> None:
        for record in dump.records():
            stats.counts(dump.tensor(record))

    def ways(folders: list[Path]) -> dict[str, Callable[[], object]]:
        a, b = folders
        return {
            "counted": lambda: counted(Dump.open(a)),
            "verified": lambda: list(problems(Dump.open(a))),
            "swept, 21 levels": lambda: swept(a),
            "drawn, no pictures": lambda: analyze_dump(a),
            "compared": lambda: compare_dumps(Dump.open(a), Dump.open(b)),
        }

    size = count * elements * 2 / 1e9
    big, little = seconds(ways(large), rounds), seconds(ways(small), rounds)
    start = time.perf_counter()
    indexed = len(list(Dump.open(small[0]).records()))
    index = (time.perf_counter() - start) / indexed
    with mock.patch.object(rows, "_MOST_VALUES", 0):  # as those of many tensors are
        told = analyze_dump(small[0])
    texts = {"texts": lambda: draw_analysis(told, home / "texts", plots=False)}
    written = {"drawn, no pictures": statistics.median(seconds(texts, rounds)["texts"]) / _SMALL}
    return {
        name: Cost(
            statistics.median(big[name]) / size,
            statistics.median(little[name]) / _SMALL,
            driver=index * _READS.get(name, 1) + written.get(name, 0),
        )
        for name in big
    }


def same(data: bytes) -> bytes:
    return data


def moved(megabytes: int = 64, items: int = 8) -> float:
    """Seconds per gigabyte that goes to a process of this machine and comes back."""
    given = [bytes(megabytes * 10**6)] * items
    begun = 0.0
    for number, _ in enumerate(map_items(same, given, 2)):
        if number == 1:  # both processes are there
            begun = time.perf_counter()
    return (time.perf_counter() - begun) / ((items - 2) * megabytes / 1e3)


def fixed(home: Path, rounds: int) -> list[list[object]]:
    """What is not computing: reading an index, merging counts, putting ranks together."""
    one = stats.counts(torch.randn(2**20).bfloat16())
    number = iter(range(10**6))
    work = {
        "adding 1,000 counts": lambda: sum((one for _ in range(999)), start=one),
        "reading the index": lambda: list(Dump.open(home / "small0").records()),
        "merging a rank": lambda: merge_dumps([home / "small0"], home / f"merged{next(number)}"),
    }
    times = {name: statistics.median(each) for name, each in seconds(work, rounds).items()}
    return [
        ["a gigabyte to a process and back", moved(), "s"],
        ["two counts merged", times["adding 1,000 counts"] / 1e3 * 1e6, "us"],
        ["counts sent", len(pickle.dumps(one)) / 1e3, "kB"],
        ["a record of the index read", times["reading the index"] / _SMALL * 1e6, "us"],
        ["a rank merged, per record", times["merging a rank"] / _SMALL * 1e6, "us"],
    ]


def held(home: Path, costs: dict[str, Cost]) -> None:
    """The model beside commands with two processes; starting them is told apart."""
    size = sum(path.stat().st_size for path in (home / "large0").rglob("*.safetensors")) / 1e9
    tensors = sum(1 for _ in Dump.open(home / "large0").records())
    commands = {
        "verified": ["dumps", "verify"],
        "drawn, no pictures": ["dumps", "draw", "--no-plots"],
    }
    for name, command in commands.items():
        times = []
        for folder in ("small0", "large0"):
            whole = [sys.executable, "-m", "qgate", *command, str(home / folder), "--jobs", "2"]
            start = time.perf_counter()
            if command[1] == "draw":
                whole += ["--output-dir", str(home / "out")]
            subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        said = costs[name].computing(size, tensors, 2)
        print(
            f"{name}: {size:.1f} GB with two processes {times[1]:.1f} s, of these about "
            f"{times[0]:.1f} s to start; the model says {said:.1f} s for the rest"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="measured on (1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where there is room (default: temporary)")
    parser.add_argument("--rank-gigabytes", type=float, default=10.0, help="of each rank (10)")
    parser.add_argument("--rank-tensors", type=int, default=1000, help="of each rank (1000)")
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--network", type=float, default=2.0, help="gigabytes per second (2)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        home = Path(made)
        costs = rates(home, args.gigabytes, args.rounds)
        rated = [[name, c.gigabyte, c.tensor * 1e3, c.driver * 1e3] for name, c in costs.items()]
        heads = ["one core", "s per GB", "ms per tensor besides", "ms per tensor, the driver"]
        print(tabulate(rated, headers=heads, floatfmt=".2f"), end="\n\n")
        print(tabulate(fixed(home, args.rounds), floatfmt=".1f", tablefmt="plain"), end="\n\n")
        held(home, costs)
    print(
        f"\nHours, {args.rank_gigabytes:g} GB and {args.rank_tensors} tensors of each rank, "
        f"{args.cores} cores, {args.network:g} GB/s; the larger of moving and computing holds:"
    )
    moving = [n * args.rank_gigabytes / args.network / 3600 for n in RANKS]
    table: list[list[object]] = [["moved", *moving]]
    for name, cost in costs.items():
        sizes = [(n * args.rank_gigabytes, n * args.rank_tensors) for n in RANKS]
        table.append([name, *(cost.computing(*size, args.cores) / 3600 for size in sizes)])
    heads = ["", *(f"{n:,} ranks" for n in RANKS)]
    print(tabulate(table, headers=heads, floatfmt=".3f"))


if __name__ == "__main__":
    main()
