"""A failure at each step of a verb, one case each: the step fails once, from there on, or is the last.

Kills and full disks draw their steps; here none is left out, and removals fail, too.
"""

from __future__ import annotations

import errno
import os

from tests.campaigns.cases import Bench, Benches, Progress, Tally
from tests.campaigns.forked import OURS, Ended, ran
from tests.campaigns.moments import dying_at, failing_at, failing_from
from tests.campaigns.scenarios import SCENARIOS

USUAL = ("update", "collect")
_REMOVALS = ("os.remove", "os.rmdir", "ftruncate", "os.truncate", "os.chmod")


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    """Disturb every step, or each n-th one where that is more than `count` cases."""
    chosen = [name for name in names if name in USUAL or len(names) < len(SCENARIOS)]
    tallies = []
    for name in chosen:
        bench = benches.of(SCENARIOS[name])
        assert bench.new
        every = max(1, -(-3 * len(bench.steps) * len(chosen) // count))
        for step in range(benches.first_step, len(bench.steps) + 1, every):
            _disturb(bench, step)
            if step % 10 == 1:
                failed = len(bench.tally.failures)
                say(
                    f"{name}: step {step} of {len(bench.steps)}, {failed} of {bench.tally.cases} failed"
                )
        say(f"{name}: each {every}. of {len(bench.steps)} steps")
        tallies.append(bench.tally)
    return tallies


def _disturb(bench: Bench, step: int) -> None:
    verb, kind = bench.scenario.verb, bench.steps[step - 1]
    about = f"step {step}, {kind}"
    code = errno.EIO if step % 2 else errno.ENOSPC
    ended = ran(verb, bench.fresh(), failing_at(bench.case, step, code))
    if kind.startswith(_REMOVALS):
        _judge_removal(bench, f"{errno.errorcode[code]} at {about}", ended)
    else:
        bench.judge_told(f"{errno.errorcode[code]} at {about}", ended, os.strerror(code))
        ended = ran(verb, bench.fresh(), failing_from(bench.case, step, code, once=False))
        bench.judge_told(f"{errno.errorcode[code]} from {about}", ended, os.strerror(code))
    ended = ran(verb, bench.fresh(), dying_at(bench.case, step))
    bench.tally.seen["killed"] += ended.status < 0
    bench.judge(f"killed before {about}", ended)


def _judge_removal(bench: Bench, fault: str, ended: Ended) -> None:
    """A file that cannot be removed may stay for the next run, which removes it."""
    crash = "Traceback" in ended.said or ended.status == OURS
    bad = [f"a crash: {ended.said[-600:]!r}"] if crash else []
    bad += bench.state()
    bad += bench.end(ran(bench.scenario.verb, bench.case))
    bench.note(fault, ended, bad)
