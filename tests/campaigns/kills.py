"""SIGKILL before every step, in the middle of a write, and at any moment; there also SIGTERM, Ctrl-C.

After the last two a verb ends by itself: it says no traceback and leaves nothing in the folder for
temporary files.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from tests.campaigns.cases import Bench, Benches, Progress, Tally, shares, spread
from tests.campaigns.forked import Child
from tests.campaigns.moments import dying_at, dying_at_byte
from tests.campaigns.scenarios import SCENARIOS

# Of ten kills: before a step, in the middle of a write, at a moment drawn from the whole run.
_STEPS, _BYTES = 5, 2
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    for name, share in shares(names, count).items():
        bench = benches.of(SCENARIOS[name])
        _kill(bench, share, say)
        tallies.append(bench.tally)
    return tallies


def _kill(bench: Bench, count: int, say: Progress) -> None:
    new, folder = bench.new, bench.case
    assert new, "an undisturbed run leaves files"
    steps = spread(bench.random, len(bench.steps), max(1, count * _STEPS // 10))
    for step in steps:
        ended = Child(bench.scenario.verb, bench.fresh(), dying_at(folder, step)).ended()
        bench.judge(f"killed before step {step}, {bench.steps[step - 1]}", ended)
        bench.tally.seen["killed"] += ended.status < 0
    say(f"{bench.tally.name}: {len(steps)} of {len(bench.steps)} steps")
    for _ in range(count * _BYTES // 10):
        size = bench.drawn_size()
        ended = Child(bench.scenario.verb, bench.fresh(), dying_at_byte(size)).ended()
        bench.judge(f"killed at byte {size} of a file", ended)
        bench.tally.seen["killed"] += ended.status < 0
    say(f"{bench.tally.name}: in the middle of writes")
    while bench.tally.cases < count:
        moment = bench.random.uniform(0, 1.05 * bench.seconds)
        sent = _SIGNALS[bench.tally.cases % len(_SIGNALS)]
        before = _temporary()
        ended = Child(bench.scenario.verb, bench.fresh()).ended(moment, sent)
        bad: list[str] = []
        if sent is not signal.SIGKILL:
            bad += [f"it leaves {name} in TMPDIR" for name in sorted(_temporary() - before)]
            bad += [f"a crash: {ended.said[-2000:]!r}"] * _crashed(ended.said)
            bad += ["it hung"] * ("hung: killed" in ended.said)
            bench.tally.seen["stopped"] += ended.status not in (0, bench.scenario.status)
        bench.judge(f"{sent.name} after {moment:.4f} s", ended, bad)
        bench.tally.seen["killed"] += ended.status < 0
    say(f"{bench.tally.name}: done")


def _crashed(said: str) -> bool:
    """Tell if there is a traceback, but for those of Ctrl-C that are pytest's own.

    It has one while it is starting, and one where the interrupted instruction has no line.
    """
    is_starting = "in _prepareconfig" in said and said.rstrip().endswith("\nKeyboardInterrupt")
    is_without_line = "in pytest_keyboard_interrupt" in said and "self._rawentry.tb_lineno" in said
    return "Traceback" in said and not (is_starting or is_without_line)


def _temporary() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir()}
