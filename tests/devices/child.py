"""One process of a part: it does its cases in turn and writes each into its journal."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
import traceback
from pathlib import Path

from tests.devices.cases import Cases, Setting
from tests.devices.journal import Journal
from tests.devices.lanes import LOST, die_with_parent
from tests.devices.record import Row


def main(
    parts: str, part: str, device: str, jobs: str, folder: str, name: str, lane: str, match: str
) -> None:
    die_with_parent()
    journal = Journal(Path(folder) / f"{name}.jsonl")
    if device.startswith("sim"):
        importlib.import_module("tests.devices.plugin")
    setting = Setting(device, int(jobs), Path(folder), journal)
    cases = importlib.import_module(parts).PARTS[part].cases(setting)
    lane_number, number = map(int, lane.split("/"))
    mine = [case for case in cases if re.search(match, case)][lane_number::number]
    begun = journal.read().begun  # by a process before this one
    if not begun:
        journal.add(cases=len(mine))
    for case in mine:
        if case in begun:
            continue
        journal.add(begins=case)
        row, lost = _outcome(case, cases, setting)
        if row is not None:
            journal.add_row(row)
        journal.add(ends=case)
        if lost:
            os._exit(LOST)
    journal.add(end=True)
    sys.stdout.flush()
    os._exit(0)  # without what libraries do at the end, which may hang


def _outcome(case: str, cases: Cases, setting: Setting) -> tuple[Row | None, bool]:
    """Return the row of a case, and whether the device is lost to this process."""
    began = time.monotonic()
    lost = False
    try:
        outcome = cases[case](setting)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        outcome = f"{type(error).__name__}: {first}"
        lost = "CUDA error" in str(error) or "device-side assert" in str(error)
    if outcome is None:
        return None, lost
    row = (
        outcome if isinstance(outcome, Row) else Row(case, "wrong" if outcome else "right", outcome)
    )
    row.seconds = row.seconds or round(time.monotonic() - began, 3)
    return row, lost


if __name__ == "__main__":
    main(*sys.argv[1:])
