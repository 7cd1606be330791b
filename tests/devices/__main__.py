"""Run all that a device has to show, and write one JSON file and one page.

  python -m tests.devices cuda
  python -m tests.devices cuda:1 --minutes 12 --out results
  python -m tests.devices cuda --only kernels,speed
  python -m tests.devices cuda --faults
  python -m tests.devices cuda --only table --match 'nvfp4 .* axis=0'
  python -m tests.devices cuda --record recorded --match scaled_mm

It needs what the library needs, and nothing of the tests. Each part is processes of its own: one
that hangs or dies is a row of the page, and the others go on. Exit status: 0 if all parts ran and
none is red, 1 if not, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tests.devices.lanes import ROOT, Lane
from tests.devices.record import (
    JSON_NAME,
    PAGE_NAME,
    DeviceReport,
    PartReport,
    Row,
    counted,
    red_lines,
    write_report,
)

if TYPE_CHECKING:
    from tests.devices.parts import Part

# Where CI is set, runs of pytest behave otherwise.
_NOT_OURS = (
    "CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS",
    "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
_REFRESH_S, _POLL_S = 5, 0.1


def main() -> int:
    args = _arguments()
    if args.record:
        return importlib.import_module("tests.arithmetics.recorder").record(
            args.device, args.record, args.match, args.minutes
        )
    parts = importlib.import_module(args.parts).PARTS
    names = args.only.split(",") if args.only else list(parts)
    if unknown := [name for name in names if name not in parts]:
        print(f"there is no part {', '.join(unknown)}. Parts: {', '.join(parts)}", file=sys.stderr)
        return 2
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _end_by_signals()
    run = _Run(args, folder)
    run.do([parts[name] for name in parts if name in names])
    for line in red_lines(run.report):
        print(line)
    print(f"{folder / PAGE_NAME}\n{folder / JSON_NAME}")
    return int(run.report.red)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.devices", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("device", type=_device, help="cuda, cuda:N, cpu, or sim (a simulated device)")
    add("--minutes", type=_minutes, default=7, metavar="N", help="end within these (default 7)")
    add("--out", type=Path, default=Path("qgate-out/devices"), metavar="FOLDER",
        help="where results go (default qgate-out/devices)")  # fmt: skip
    add("--only", metavar="PART,…", help="some parts (default: all)")
    add("--faults", dest="only", action="store_const", const="faults",
        help="kill, hang, fill and lose the device under gates, and nothing else")  # fmt: skip
    add(
        "--match", type=_pattern, default="", metavar="REGEX", help="cases with this in their names"
    )
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    add(
        "--jobs",
        type=int,
        default=jobs,
        metavar="N",
        help="processes of a part (default %(default)s)",
    )
    add("--record", type=Path, metavar="FOLDER",
        help="write what matrix kernels of the device return, and run no part")  # fmt: skip
    add("--parts", default="tests.devices.parts", help=argparse.SUPPRESS)
    return parser.parse_args()


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|(cuda|sim)(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cuda, cuda:N, cpu or sim")
    return text


def _pattern(text: str) -> str:
    try:
        return re.compile(text).pattern
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < 1e4:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes: above 0")
    return minutes


def _end_by_signals() -> None:
    """Let a signal end the run as an exception does: processes are killed, results stay."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, end)


class _Run:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.began = time.monotonic()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self.report = DeviceReport(
            1, "qgate device report", args.device, started, args.minutes, 0, False, []
        )

    def do(self, parts: Sequence[Part]) -> None:
        """Run one part after the other, each for its share of what is left of the time."""
        parts = [part for part in parts if part.fits(self.args.device)]
        end = self.began + self.args.minutes * 60 - 1
        for index, part in enumerate(parts):
            seconds_left = end - time.monotonic()
            if seconds_left < part.least_s:
                row = Row(
                    part.name,
                    "not run",
                    f"no time left: {seconds_left:.0f} s, at least {part.least_s:g}",
                )
                self.report.parts.append(PartReport(part.name, "not run", rows=[row]))
            else:
                weights = sum(other.weight for other in parts[index:])
                share = min(seconds_left, max(part.least_s, seconds_left * part.weight / weights))
                self._run_part(part, share)
            last = self.report.parts[-1]
            self._say(f"{last.name}: {last.status}, {counted(last.rows)}")
        self.report.complete = True
        self._write()

    def _run_part(self, part: Part, share: float) -> None:
        began = time.monotonic()
        folder = self.folder / "parts" / part.name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.jsonl"):
            old.unlink()
        report = PartReport(
            part.name, "under way", share_s=round(share, 1), log=f"parts/{part.name}/*.txt",
            judged=part.judged,
        )  # fmt: skip
        self.report.parts.append(report)
        self._say(f"{part.name}: at most {share:.0f} s")
        number = self.args.jobs if part.divided else 1
        lanes: list[Lane] = []
        written = 0.0
        try:
            for lane_number in range(number):
                lanes.append(self._lane(part, folder, lane_number, number))
            while any(lane.running for lane in lanes):
                for lane in lanes:
                    if lane.running:
                        lane.watch(began + share)
                report.seconds = round(time.monotonic() - began, 1)
                report.rows = [row for lane in lanes for row in lane.rows()]
                if time.monotonic() - written > _REFRESH_S:
                    self._write()
                    written = time.monotonic()
                time.sleep(_POLL_S)
        finally:
            for lane in lanes:
                if lane.running:
                    lane.stop("when the run was ended")
            report.rows = [row for lane in lanes for row in lane.rows()]
            missing = any(row.status == "not run" for row in report.rows)
            report.status = "incomplete" if missing else "done"
            self._write()

    def _lane(self, part: Part, folder: Path, place: int, number: int) -> Lane:
        name = f"{part.name}-{place + 1}"
        command = [
            sys.executable, "-X", "faulthandler", "-m", "tests.devices.child", self.args.parts,
            part.name, self.args.device, str(self.args.jobs), str(folder), name, f"{place}/{number}", self.args.match,
        ]  # fmt: skip
        return Lane(name, command, self._environment(part, number), folder, part.case_s)

    def _environment(self, part: Part, number: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
        threads = str(max(1, (os.cpu_count() or 1) // number)) if number > 1 else None
        ours = {"OMP_WAIT_POLICY": "PASSIVE"} | ({"OMP_NUM_THREADS": threads} if threads else {})
        paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
        path = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        return ours | inherited | path | part.environment(self.args.device)

    def _write(self) -> None:
        self.report.seconds = round(time.monotonic() - self.began, 1)
        write_report(self.report, self.folder)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
