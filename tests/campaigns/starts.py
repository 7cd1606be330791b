"""Ctrl-C in the first 0.4 s of a command, at drawn moments: while Python and qgate are imported.

It ends with one line and status 130, or by the signal (or, of the import of `site`, with status 1) while
Python itself begins; a traceback may show no file of qgate.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys

from tests.campaigns.cases import Benches, Progress, Tally

WITHIN_S = 0.4
# As the script that an installer writes for the console.
_COMMAND = (sys.executable, "-c", "from qgate.__main__ import main; raise SystemExit(main())")


def campaign(benches: Benches, _names: list[str], count: int, say: Progress) -> list[Tally]:
    tally, draw = Tally("qgate show formats"), random.Random(benches.seed)
    for number in range(1, count + 1):
        moment = draw.uniform(0, WITHIN_S)
        ended, output = _interrupted(moment)
        tally.cases += 1
        if ended == 0 or (
            ended == 130 and output.endswith(": interrupted\n") and output.count("\n") == 2
        ):
            tally.seen["done" if ended == 0 else "one line"] += 1
        elif ended in (1, -signal.SIGINT) and "/qgate/" not in output:
            tally.seen["Python began"] += 1
        else:
            tally.failures.append(f"after {moment:.3f} s, status {ended}: {output[-600:]!r}")
        if number % 100 == 0:
            say(f"{number} of {count}, {len(tally.failures)} failed")
    return [tally]


def _interrupted(moment: float) -> tuple[int, str]:
    with subprocess.Popen(
        [*_COMMAND, "show", "formats"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(moment)
        if running.returncode is None:
            running.send_signal(signal.SIGINT)
        output = running.communicate()[1]
    return running.returncode, output
