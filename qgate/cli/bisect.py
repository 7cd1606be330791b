"""Find the commit at which a gate turned red, and the site where it did.

  qgate bisect v1.2 HEAD
  qgate bisect v1.2 HEAD -- --mode 2-1 -k outputs     options of pytest, for shorter runs
  qgate bisect main~20 main --suites tests/accuracy --json

Each commit is checked out into a git worktree of its own, which is removed at the end: your
checkout is not touched, and uncommitted changes are left out. All commits are compared with the
accepted files of GOOD. A commit that cannot be judged (an import fails, it has no suites) is
skipped and named. Bisecting takes two runs, and about log2 of the number of commits between.
Exit status: 0 if the commit was found; 1 if GOOD is red or BAD is green; 2 if a revision is
unknown, or GOOD or BAD cannot be run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, print_json
from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.text import counted, one_line
from qgate.text.printing import print_line, print_text

if TYPE_CHECKING:
    from qgate.bisecting import compute, history, record, running, texts, worktree
    from qgate.page import tables
    from qgate.storage import git
else:
    compute, history = LateModule("qgate.bisecting.compute"), LateModule("qgate.bisecting.history")
    running, texts = LateModule("qgate.bisecting.running"), LateModule("qgate.bisecting.texts")
    worktree, tables = LateModule("qgate.bisecting.worktree"), LateModule("qgate.page.tables")
    git = LateModule("qgate.storage.git")

_REFUSED = ("--update", "--qgate-update", "--baselines", "--qgate-baselines")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("good", metavar="GOOD", help="a commit whose gates passed: a hash, a tag, a branch")
    add("bad", metavar="BAD", help="a later commit at which some gates fail")
    add("--suites", action="append", metavar="PATH", help="a folder or file that pytest runs "
        "(suites); repeatable")  # fmt: skip
    add_json(parser)
    add("options", nargs="*", metavar="-- OPTIONS", help="options for pytest, such as --mode")
    # Words after `--` that stand behind an option are left over by argparse.
    parser.set_defaults(takes_more=True)


def run(args: argparse.Namespace) -> int:
    if args.more and args.more[0] != "--":
        args.parser.refuse(args.more)
    options = [*args.options, *args.more[1:]]
    for word in options:
        if word.startswith(_REFUSED):
            raise QgateError(
                f"{word.partition('=')[0]} is not allowed: every commit is held against the "
                "accepted files of GOOD. Leave it out."
            )
    repository = git.GitRepository.around(Path())
    commits = history.CommitRange(repository, args.good, args.bad)
    with worktree.own_worktree(repository, commits.good) as tree:
        gates = running.CommitGates(tree, args.suites or ["suites"], options)

        def measure(name: record.CommitName) -> record.CommitRun:
            subject = f"{name.short} {one_line(name.subject)}"
            runs_left = counted(commits.steps(), "run")
            print_line(f"{subject} (about {runs_left} left)", file=sys.stderr)
            return gates.run(name)

        answer = compute.bisect(commits, measure)
    if args.json:
        print_json(texts.bisection_data(answer))
    else:
        print_text(f"{texts.diagnosis(answer)}\n")
        width = shutil.get_terminal_size((80, 24)).columns
        for line in tables.table(texts.HEADS, texts.rows(answer)):
            print_line(tables.clip_line(line, width).rstrip())
    return 0 if answer.first is not None else 1
