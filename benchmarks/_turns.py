"""Timing in turn: A B C A B C …, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def seconds(candidates: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for count in range(rounds + 1):
        for name, work in candidates.items():
            start = time.perf_counter()
            work()
            if count:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """The median over rounds of slow / fast."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
