"""Check right kernels of published packages, and faults planted in them.

python -m tests.kernel_checks.real                        all, one line each, and a summary
python -m tests.kernel_checks.real --only "SwiGLU MLP"    those whose title holds the text
python -m tests.kernel_checks.real --right                right kernels alone
python -m tests.kernel_checks.real --write docs/real-kernels.md   the page, too
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.kernel_checks.real.verdicts import RIGHT, ROOMS, Verdict, judge_all


def summarize(verdicts: Sequence[Verdict]) -> str:
    right = [verdict for verdict in verdicts if verdict.fault == RIGHT]
    faults = [verdict for verdict in verdicts if verdict.fault != RIGHT]
    red = [verdict for verdict in faults if not verdict.green]
    with_words = sum(verdict.has_words for verdict in faults)
    return (
        f"right kernels: {sum(v.green for v in right)} of {len(right)} are green\n"
        f"faults: {len(red)} of {len(faults)} are red; the first line names "
        f"{sum(v.named for v in red)} of {with_words} that have words"
    )


def show(verdict: Verdict) -> str:
    word = "green" if verdict.green else "named" if verdict.named else "red"
    mark = " " if verdict.is_as_wanted else "!"
    title = f"{verdict.kernel}: {verdict.fault or 'RIGHT'}"
    return f"{mark} {word:5} {verdict.seconds:6.1f} s  {title:72} {verdict.first_line}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="text that a title must hold")
    parser.add_argument("--room", default="", help="one file of kernels")
    parser.add_argument("--right", action="store_true", help="leave faults out")
    args = parser.parse_args()
    rooms = [room for room in ROOMS if room.module.startswith(args.room)]
    verdicts = []
    for verdict in judge_all(rooms, args.only, args.right):
        verdicts.append(verdict)
        print(show(verdict), flush=True)
    print(summarize(verdicts))
    return int(not all(verdict.is_as_wanted for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
