"""Check right kernels of published packages, and faults planted in them.

python -m tests.kernel_checks.real                        all, one line each, and a summary
python -m tests.kernel_checks.real --only "SwiGLU MLP"    those whose title holds the text
python -m tests.kernel_checks.real --right                right kernels alone
python -m tests.kernel_checks.real --kept out.jsonl       keep verdicts, and go on where a run ended
python -m tests.kernel_checks.real --write                verdicts.jsonl and docs/real-kernels.md, too
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.kernel_checks.real.collection import ROOMS
from tests.kernel_checks.real.page import PAGE, VERDICTS, make_page, read_verdicts, write_verdicts
from tests.kernel_checks.real.verdicts import RIGHT, Selection, Verdict, judge_room


def summarize(verdicts: Sequence[Verdict]) -> str:
    right = [verdict for verdict in verdicts if verdict.fault == RIGHT]
    faults = [verdict for verdict in verdicts if verdict.fault != RIGHT]
    green = sum(verdict.verdict == "green" for verdict in right)
    red = sum(verdict.verdict == "red" for verdict in faults)
    named, with_words = (sum(getattr(v, key) for v in faults) for key in ("named", "has_words"))
    return (
        f"right kernels: {green} of {len(right)} are green\n"
        f"faults: {red} of {len(faults)} are red; the first line names {named} of the {with_words} "
        "that have words"
    )


def show(verdict: Verdict) -> str:
    word = "named" if verdict.named else verdict.verdict
    mark = " " if verdict.is_as_wanted else "!"
    title = f"{verdict.package}: {verdict.kernel}: {verdict.fault or 'RIGHT'}"
    return f"{mark} {word:5} {verdict.seconds:6.1f} s  {title:80} {verdict.first_line}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="text that a title must hold")
    parser.add_argument("--room", default="", help="files of kernels whose names begin so")
    parser.add_argument("--right", action="store_true", help="leave faults out")
    parser.add_argument(
        "--kept", type=Path, metavar="FILE", help="verdicts that were judged before"
    )
    parser.add_argument(
        "--write", action="store_true", help="write verdicts and page of a whole run"
    )
    args = parser.parse_args()
    if args.write and (args.only or args.room or args.right):
        parser.error("--write needs a whole run, without --only, --room and --right")
    verdicts = read_verdicts(args.kept)
    judged_titles = tuple(verdict.title for verdict in verdicts)
    for room in ROOMS:
        if room.module.startswith(args.room):
            for verdict in judge_room(room, Selection(args.only, args.right, known=judged_titles)):
                verdicts.append(verdict)
                print(show(verdict), flush=True)
                if args.kept:
                    with args.kept.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(verdict)) + "\n")
    print(summarize(verdicts))
    if args.write:
        write_verdicts(VERDICTS, verdicts)
        PAGE.write_text(make_page(verdicts), encoding="utf-8")
    return int(not all(verdict.is_as_wanted for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
