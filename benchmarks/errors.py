"""`errors(actual, reference)` against the plain numpy formulas: time in turn, and peak memory.

    python benchmarks/errors.py [--rounds 3] [--log2 22 26] [--threads N]

The plain way is what one writes first: both tensors to float64, one numpy expression per metric,
`np.corrcoef` and `np.percentile`. Memory is what a process grows by while it runs one of the two
once, sampled from /proc, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import _turns
import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from qgate.stats.error_stats import errors

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def plain(actual: Tensor, reference: Tensor) -> dict[str, float]:
    a = actual.to(torch.float64).numpy().ravel()
    r = reference.to(torch.float64).numpy().ravel()
    difference = a - r
    magnitude = np.abs(difference)
    mse = np.mean(difference**2)
    rmse = np.sqrt(mse)
    mae = np.mean(magnitude)
    p50, p90, p95, p99 = np.percentile(magnitude, [50, 90, 95, 99])
    return {
        "mse": mse,
        "rmse": rmse,
        "mae": mae,
        "max_abs": np.max(magnitude),
        "cosine": np.dot(a, r) / (np.linalg.norm(a) * np.linalg.norm(r)),
        "correlation": np.corrcoef(a, r)[0, 1],
        "psnr_db": 20 * np.log10(np.max(np.abs(r)) / rmse),
        "relative_error": 100 * mae / np.mean(np.abs(r)),
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
    }


def one_pass(actual: Tensor, reference: Tensor) -> dict[str, float]:
    found = errors(actual, reference)
    return found.metrics() | found.percentiles()


WAYS: dict[str, Callable[[Tensor, Tensor], dict[str, float]]] = {
    "qgate": one_pass,
    "numpy": plain,
}


def pair(log2: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(2**log2, generator=generator)
    actual = torch.randn(2**log2, generator=generator).mul_(0.01).add_(reference)
    return actual.to(dtype), reference.to(dtype)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def grown(work: Callable[[], object]) -> int:
    """The most bytes by which the process grew while it worked."""
    peak = before = resident()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    sampler = threading.Thread(target=sample)
    sampler.start()
    work()
    peak = max(peak, resident())
    done.set()
    sampler.join()
    return peak - before


def grown_apart(way: str, name: str, log2: int) -> float:
    """MB, in a fresh process that has run the same on a little data first."""
    command = [sys.executable, __file__, "--memory-of", way, name, str(log2)]
    return int(subprocess.run(command, check=True, capture_output=True).stdout) / 1e6


def disagreement(mine: dict[str, float], theirs: dict[str, float]) -> float:
    """The largest relative difference of what both report, percentiles apart."""
    return max(abs(mine[key] - value) / abs(value) for key, value in theirs.items() if key in mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log2", type=int, nargs="+", default=[22, 26])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        way, name, log2 = args.memory_of
        WAYS[way](*pair(16, DTYPES[name]))
        tensors = pair(int(log2), DTYPES[name])
        print(grown(lambda: WAYS[way](*tensors)))
        return
    print(
        f"torch {torch.__version__}, numpy {np.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {args.threads} threads"
    )
    table = []
    for log2 in args.log2:
        for name, dtype in DTYPES.items():
            actual, reference = pair(log2, dtype)
            results: dict[str, dict[str, float]] = {}

            def run(
                way: str,
                actual: Tensor = actual,
                reference: Tensor = reference,
                results: dict[str, dict[str, float]] = results,
            ) -> None:
                results[way] = WAYS[way](actual, reference)

            times = _turns.seconds(
                {way: lambda way=way, run=run: run(way) for way in WAYS}, args.rounds
            )
            exact = {k: v for k, v in results["numpy"].items() if not k.startswith("p9")}
            exact.pop("p50")
            row: list[object] = [f"2^{log2}", name]
            row += [f"{statistics.median(times[way]):.3f}" for way in WAYS]
            row.append(f"{_turns.median_ratio(times['numpy'], times['qgate']):.1f}x")
            row += [f"{grown_apart(way, name, log2):.1f}" for way in WAYS]
            row.append(f"{disagreement(results['qgate'], exact):.1e}")
            table.append(row)
    headers = ["elements", "dtype", "qgate s", "numpy s", "ratio", "qgate MB", "numpy MB", "differ"]
    print(tabulate(table, headers=headers))


if __name__ == "__main__":
    main()
