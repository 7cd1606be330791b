"""Clocks that stand still, jump and lie, and files from the future: nothing else may change."""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from typing import Any

from tests.campaigns.cases import Benches, Progress, Tally, shares
from tests.campaigns.forked import Fault, ran
from tests.campaigns.scenarios import SCENARIOS

_YEAR = 365.25 * 86400
# How far the clock is off, in seconds; None is another distance at every look.
OFFSETS: dict[str, float | None] = {
    "ten years back": -10 * _YEAR,
    "a hundred years on": 100 * _YEAR,
    "an hour back": -3600.0,
    "at its beginning": -time.time() + 60,
    "jumping": None,
}
MOMENTS = {"files of 1970": 1.0, "files of 2100": 130 * _YEAR}


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    for name, share in shares(names, count).items():
        bench = benches.of(SCENARIOS[name])
        assert bench.new
        faults = [*OFFSETS, *MOMENTS]
        for number in range(share):
            fault_name = faults[number % len(faults)]
            case = bench.fresh()
            if fault_name in MOMENTS:
                for path in (case, *case.rglob("*")):
                    os.utime(path, (MOMENTS[fault_name], MOMENTS[fault_name]))
            ended = ran(bench.scenario.verb, case, _clock(fault_name, bench.random.random()))
            # Nothing is excused: it does its work as it does with a clock that is right.
            bench.judge_told(fault_name, ended, "\0")
        tallies.append(bench.tally)
        say(f"{name}: done")
    return tallies


def _clock(told: str, seed: float) -> Fault | None:
    if told not in OFFSETS:
        return None
    offset, draw = OFFSETS[told], random.Random(seed)

    def off() -> float:
        return draw.uniform(-20, 20) * _YEAR if offset is None else offset

    def fault() -> None:
        real = time.time

        class Moved(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return cls.fromtimestamp(time.time(), tz)

        time.time = lambda: max(0.0, real() + off())
        time.time_ns = lambda: int(time.time() * 1e9)
        for module in list(sys.modules.values()):
            if getattr(module, "datetime", None) is datetime.datetime:
                module.datetime = Moved  # type: ignore[attr-defined]

    return fault
