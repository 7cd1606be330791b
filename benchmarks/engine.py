"""What spreading work costs and brings: overhead per item, two processes against one, Ray.

    python benchmarks/engine.py [--elements 67108864] [--files 10] [--rounds 3] [--no-ray]
    python benchmarks/engine.py --memory

Times are slopes, of many items less few, so that starting processes or a cluster is left out. The
work is that of `qgate sweep` without pictures: a bf16 file is read, counted, swept at 21 levels.
Memory is the driver's peak, each figure in a process of its own, where every item returns 2 MB that
is merged into one.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from qgate.engine import Workers, map_items, merged
from qgate.sweeps.requests import sweep_file
from qgate.sweeps.settings import SweepSettings

ENGINES = {
    "one process": Workers(),
    "two processes": Workers(jobs=2),
    "ray": Workers("ray", jobs=2),
}


def swept(path: str) -> float:
    """What one worker does of a sweep; one thread, as workers are many."""
    torch.set_num_threads(1)
    (found,) = sweep_file(path, SweepSettings(granularity="tensor"))
    return float(found.records[0]["advice"]["recommended"])


def nothing(item: int) -> int:
    return item


def table(item: int) -> np.ndarray:
    return np.full(1 << 18, item, dtype=np.int64)


def added(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a + b


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def slope(function: Callable, items: list, few: int, workers: Workers) -> float:
    """Seconds per item, once everything has been started."""
    times = [
        seconds(lambda n=n: list(map_items(function, items[:n], workers)))
        for n in (few, len(items))
    ]
    return (times[1] - times[0]) / (len(items) - few)


def speed(args: argparse.Namespace, engines: dict[str, Workers]) -> None:
    for name, workers in engines.items():
        count = 20_000 if name == "one process" else 2_000
        each = [
            slope(nothing, list(range(count)), count // 10, workers) for _ in range(args.rounds)
        ]
        print(f"{name:14} overhead per item {statistics.median(each) * 1e6:8.1f} us")
    with tempfile.TemporaryDirectory() as home:
        paths = []
        for number in range(args.files):
            paths.append(str(Path(home) / f"{number}.safetensors"))
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(args.elements, generator=generator).bfloat16()
            save_file({"x": x}, paths[-1])
        list(map(swept, paths[:1]))
        turns: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds):
            for name, workers in engines.items():
                turns[name].append(slope(swept, paths * 2, args.files, workers))
        one = turns["one process"]
        for name, times in turns.items():
            ratios = [a / b for a, b in zip(one, times, strict=True)]
            print(
                f"{name:14} {statistics.median(times):6.3f} s per file of {args.elements} numbers, "
                f"{statistics.median(ratios):.2f} times as fast as one process "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        if "ray" in turns:
            ratios = [r / p for r, p in zip(turns["ray"], turns["two processes"], strict=True)]
            print(f"ray takes {statistics.median(ratios):.2f} times as long as two processes here")


def memory(engines: dict[str, Workers]) -> None:
    for name in engines:
        peaks = []
        for count in (100, 1_000, 10_000):
            done = subprocess.run(
                [sys.executable, __file__, "--peak", name, "--items", str(count)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            peaks.append(float(done.stdout.split()[-1]))
        shown = ", ".join(f"{peak:.0f}" for peak in peaks)
        print(f"{name:14} driver's peak at 100, 1,000 and 10,000 items of 2 MB: {shown} MB")


def peak(name: str, items: int) -> None:
    found = merged(table, added, range(items), ENGINES[name])
    assert found.result is not None
    assert int(found.result[0]) == items * (items - 1) // 2
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", choices=ENGINES)
    parser.add_argument("--items", type=int, default=100)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines = {name: of for name, of in ENGINES.items() if not (args.no_ray and name == "ray")}
    if args.peak:
        peak(args.peak, args.items)
    elif args.memory:
        memory(engines)
    else:
        speed(args, engines)


if __name__ == "__main__":
    main()
