"""Readers that end: a pipe that nobody reads, and `| head -1`, in the place of a verb's streams.

A verb does all of its work all the same, and ends with its own status.
"""

from __future__ import annotations

import os
import sys
import threading

from tests.campaigns.cases import Bench, Benches, Progress, Tally, shares
from tests.campaigns.forked import OURS, Fault, ran
from tests.campaigns.scenarios import SCENARIOS
from tests.campaigns.wholeness import differing, tree

_STREAMS = ((1,), (1, 2), (2,))


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    for name, share in shares(names, count).items():
        bench = benches.of(SCENARIOS[name])
        for number in range(share):
            streams = _STREAMS[number // 2 % len(_STREAMS)]
            lines = number % 2 * bench.random.choice((1, 1, 3))
            _cut(bench, streams, lines)
        tallies.append(bench.tally)
        say(f"{name}: done")
    return tallies


def without_reader(*numbers: int, lines: int = 0) -> Fault:
    """Give a child pipes in the place of its streams, whose reader ends after some lines."""

    def read(reading: int) -> None:
        line_count = lines
        while line_count and (letter := os.read(reading, 1)):
            line_count -= letter == b"\n"
        os.close(reading)

    def close() -> None:
        for number in numbers:
            reading, writing = os.pipe()
            os.dup2(writing, number)
            os.close(writing)
            if lines:
                threading.Thread(target=read, args=(reading,), daemon=True).start()
            else:
                os.close(reading)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    return close


def _cut(bench: Bench, streams: tuple[int, ...], lines: int) -> None:
    new = bench.new
    close = without_reader(*streams, lines=lines)

    def fault() -> None:
        close()
        os.environ["PYTEST_PLUGINS"] = "qgate.plugin.closed_pipes"  # as `qgate run` has it

    ended = ran(bench.scenario.verb, bench.fresh(), fault)
    bad = []
    if ended.status != bench.scenario.status:
        bad.append(f"status {ended.status}, not {bench.scenario.status}: {ended.said[-300:]!r}")
    if "Traceback" in ended.said or ended.status == OURS:
        bad.append(f"a crash: {ended.said[-600:]!r}")
    bad += [f"after it {text}" for text in differing(tree(bench.case), new)]
    bench.tally.seen["all of its work" if not bad else "less"] += 1
    bench.note(f"streams {streams} read for {lines} lines", ended, bad)
