"""Run the suites of this project with pytest, under its settings.

  qgate run                                   all suites
  qgate run --mode 2-1 -n 2                   with options of pytest and its plugins
  qgate run suites/test_task.py -k int8       one file (SUITES are folders, files or tests)
  qgate run --gate-from origin/main           with the suites and baselines of another commit

The suites are those that `suites` in qgate.toml names, or else the folder suites beside it.
--gate-from judges the code of this checkout by the suites, settings and baselines of another
commit, so that a pull request cannot silence a gate: it fails if a gate of that commit has no
verdict. `pytest --help` lists all options. The exit status is that of pytest: 0 if all gates
passed; 1 if one failed, or has no verdict with --gate-from or where CI is set, or if pytest ended
before its gates were judged; 2 to 5 if they could not be run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate.cli import _base_gates
    from qgate.cli import _receipts as receipts
    from qgate.project import settings
else:
    _base_gates = LateModule("qgate.cli._base_gates")
    receipts = LateModule("qgate.cli._receipts")
    settings = LateModule("qgate.project.settings")

_KEEP_ON = ("-p", "qgate.plugin.closed_pipes")
_COLORS = {"always": "yes", "never": "no", "auto": "auto"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "qgate run [-h] [SUITES ...] [--gate-from REF] [options of pytest]"
    parser.allow_abbrev = False
    parser.set_defaults(takes_more=True, forwards=True)
    parser.add_argument(
        "--gate-from", metavar="REF", help="judge by the gates of this commit or branch"
    )


def run(args: argparse.Namespace) -> int:
    args.parser.refuse_misspelled(args.more)
    words = _as_pytest_spells(args.more)
    if getattr(args, "quiet", False):
        words.append("--quiet")
    if (color := getattr(args, "color", "auto")) != "auto":
        words.append(f"--color={_COLORS[color]}")
    if args.gate_from is not None:
        return _base_gates.run_gates_from(args.gate_from, words, Path.cwd())
    suites = [] if _names_tests(args.more) else project_suites(Path.cwd())
    with receipts.requested() as receipt:
        command = [sys.executable, "-m", "pytest", *_KEEP_ON, *suites, *words]
        status = _finished(command, {**os.environ, receipts.RECEIPT: str(receipt)})
        return receipts.settled_status(status, receipt, words)


def _as_pytest_spells(words: Sequence[str]) -> list[str]:
    """Return words with the value of `--color` as pytest calls it."""
    spelled: list[str] = []
    for word in words:
        name, _, value = word.rpartition("=")
        if name == "--color" or (not name and spelled[-1:] == ["--color"]):
            word = word.replace(value, _COLORS.get(value, value))
        spelled.append(word)
    return spelled


def _names_tests(words: Sequence[str]) -> bool:
    """Tell if words say which suites to run: at the start, or by a file's name anywhere.

    A word after an option of another plugin may be its value, and so names no folder to run.
    """
    if words and not words[0].startswith("-"):
        return True
    for before, word in itertools.pairwise(words):
        path = Path(word.partition("::")[0])
        is_value = before.startswith("--") and "=" not in before
        if path.suffix == ".py" and not is_value and path.is_file():
            return True
    return False


def project_suites(here: Path) -> list[str]:
    """Return the suites of the project that a folder is in, as they are typed there."""
    project = settings.settings_above(here)
    suites = project.suite_folders
    missing = [suite for suite in suites if not Path(suite).exists()]
    if missing:
        if project.suites:
            raise QgateError(
                f"{project.source} names the suites {missing[0]!r}, which do not exist: correct "
                "`suites` there, or give the suites, `qgate run PATH`."
            )
        raise QgateError(
            f"{missing[0]!r} does not exist: give the suites, `qgate run PATH`, or write some with "
            "`qgate init`."
        )
    return [os.path.relpath(suite, here) for suite in suites]


def _finished(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the exit status of a program that the user may interrupt."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            while True:
                try:
                    status = process.wait()
                except KeyboardInterrupt:  # the program has it too, and says how far it came
                    continue
                return status if status >= 0 else 128 - status
        finally:
            if process.poll() is None:
                process.terminate()
