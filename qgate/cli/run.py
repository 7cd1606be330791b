"""Run the suites of this project with pytest, under its settings.

  qgate run                                   all suites
  qgate run --mode 2-1 -n 2                   options are those of pytest and of its plugins
  qgate run --gate-from origin/main           suites, settings and baselines of another commit

--gate-from holds the code of this checkout against the gates of a commit, so that a pull request
cannot silence a gate: it fails if one that the commit has did not run. Exit status: that of pytest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(takes_more=True)
    parser.add_argument("--gate-from", metavar="REF", help="run the gates of this commit or branch")


def run(args: argparse.Namespace) -> int:
    if args.gate_from is not None:
        from qgate.cli._base_gates import run_gates_from

        return run_gates_from(args.gate_from, args.more, Path.cwd())
    suites = [] if args.more and not args.more[0].startswith("-") else ["suites"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *suites, *args.more], check=False
    ).returncode
