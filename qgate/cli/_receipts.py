"""Receipts of runs: the exit status that the plugin settled, in a file that a command asked for.

A process that ends early, as by `os._exit(0)`, or a hook that returns another status leaves no
receipt, or one that says otherwise. Then exit status 0 of pytest counts for nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from qgate.project.run_words import RECEIPT, runs_nothing
from qgate.storage.files import scratch_folder
from qgate.text.printing import print_line

__all__ = ["RECEIPT", "requested", "settled_status"]


@contextlib.contextmanager
def requested() -> Iterator[Path]:
    """Make room for the receipt of a run; the variable `RECEIPT` names it."""
    with scratch_folder() as folder:
        yield folder / "receipt.json"


def settled_status(status: int, receipt: Path, words: Sequence[str]) -> int:
    """Return the exit status that a run of pytest with these words counts for."""
    if status != 0 or runs_nothing(words):
        return status
    try:
        settled = json.loads(receipt.read_text(encoding="utf-8"))["exit"]
    except (OSError, ValueError, KeyError, TypeError):
        settled = None
    if settled == 0:
        return 0
    ended = "before its gates were judged" if settled is None else "otherwise than it was judged"
    print_line(
        f"pytest ended {ended}, though with exit status 0: the run is not green. Look in "
        "conftest.py, plugins and the code under test for what ends the process, changes its "
        "status or switches off qgate's plugin (addopts).",
        file=sys.stderr,
    )
    return settled if isinstance(settled, int) else 1
