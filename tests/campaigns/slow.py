"""A file system that takes its time at every step, with somebody who reads meanwhile.

The verb does what it always does, only later; who reads the baselines beside it is answered, each
time with those of before or of after.
"""

from __future__ import annotations

import os
import time

from tests.campaigns.cases import Bench, Benches, Progress, Tally, shares
from tests.campaigns.forked import Child, Ended, ran
from tests.campaigns.moments import slow
from tests.campaigns.scenarios import SCENARIOS, qgate

_READ = qgate("baselines", "list")
_DELAYS_S = (0.002, 0.01, 0.03)


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    for name, share in shares(names, count).items():
        bench = benches.of(SCENARIOS[name])
        answers = _answers(bench) if (bench.case / "baselines").is_dir() else set()
        for number in range(share):
            delay = _DELAYS_S[number % len(_DELAYS_S)]
            child = Child(bench.scenario.verb, bench.fresh(), slow(bench.case, delay))
            bad = _read_meanwhile(bench, child, answers) if answers else []
            ended = child.ended()
            bench.tally.failures += [f"{delay:g} s a step: {text}" for text in bad]
            bench.judge_told(f"{delay:g} s a step", ended, "\0")
        tallies.append(bench.tally)
        say(f"{name}: done")
    return tallies


def _answers(bench: Bench) -> set[str]:
    """What a reader says before and after."""
    answers = {ran(_READ, bench.fresh()).said}
    assert bench.new
    ran(bench.scenario.verb, bench.fresh())
    return answers | {_read(bench).said}


def _read(bench: Bench) -> Ended:
    return ran(_READ, bench.case)


def _read_meanwhile(bench: Bench, child: Child, answers: set[str]) -> list[str]:
    bad = []
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        reading = _read(bench)
        bench.tally.seen["looks"] += 1
        if reading.status or reading.said not in answers:
            bad.append(f"a reader is told {reading.said[-300:]!r}")
        time.sleep(0.01)
    return bad
