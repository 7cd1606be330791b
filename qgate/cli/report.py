"""Make a report of results: a page, Markdown for a pull request, CSV, JSON; compare runs.

  qgate report qgate-out                                 report.html of results.jsonl in there
  qgate report qgate-out --output summary.md --output gates.csv
  qgate report before=a/results.jsonl after=b/results.jsonl
  qgate report qgate-out --history history.jsonl         adds this run, and shows the trend

Several files are compared with the first; the page is that of the last. Works from results alone:
no model is run, and neither pytest nor torch is needed.
Exit status: 0 if the report was made, also that of a run that failed, which --exit-code makes a 1;
2 if files are missing, damaged or cannot be written, and then nothing is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.text import one_line

if TYPE_CHECKING:
    from qgate.page.comparisons import RunComparison
    from qgate.page.history import Point
    from qgate.page.reports import Loaded
    from qgate.page.terminal import TerminalLine

_RESULTS = "results.jsonl"
_NEARBY = 5
# Those of `qgate.results.pictures`, which every `qgate --help` would have to load.
PLOT_CHOICES = ("failed", "worst", "all", "none")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", nargs="+", metavar="RESULTS", help="a results.jsonl, a folder with one, or "
        "NAME=FILE")  # fmt: skip
    add("--output", "-o", type=Path, action="append", metavar="FILE", help="what to write, by its "
        "ending: .html (default: report.html), .md, .csv, .json; repeatable")  # fmt: skip
    add("--history", type=Path, metavar="FILE", help="add the runs to this file of JSON lines, and "
        "show the trend over all in it")  # fmt: skip
    add("--plots", choices=PLOT_CHOICES, default="worst", help="which gates are drawn: those "
        "that failed, these and the worst (default), all or none")  # fmt: skip
    add("--label", action="append", default=[], metavar="NAME", help="what the files are called, "
        "in their order; repeatable")  # fmt: skip
    add("--exit-code", action="store_true", help="exit with 1 if the run failed, of several the "
        "last one")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from qgate.page.comparisons import compare
    from qgate.page.reports import load

    outputs = args.output or [Path("report.html")]
    files = _files(args.results, args.label)
    _check_outputs(outputs, args.history, [path for _, path in files])
    loaded = [load(path, name, compared=len(files) > 1) for name, path in files]
    sides = [each.side for each in loaded if each.side is not None]
    comparison = compare(sides) if sides else None
    history = _write(outputs, args, loaded, comparison)
    # From here on all is done, also if nobody reads what is told of it.
    args.status = int(args.exit_code and not loaded[-1].run.passed)
    _print(_told(loaded, comparison))
    for output in outputs:
        print(f"wrote {one_line(output)} ({_size(output)})")
    if args.history is not None:
        count = f"{len(history)} run{'' if len(history) == 1 else 's'}"
        print(f"history of {count} in {one_line(args.history)}")
    return int(args.status)


# What was given ---------------------------------------------------------------------------------


def _files(given: Sequence[str], labels: Sequence[str]) -> list[tuple[str, Path]]:
    """Names and results files, each file and each name once."""
    if len(labels) > len(given):
        raise QgateError(f"--label was given {len(labels)} times for {len(given)} files.")
    found = [_file(each) for each in given]
    for place, (_, path) in enumerate(found):
        for _, other in found[:place]:
            if path.samefile(other):
                raise QgateError(f"{str(path)!r} was named twice: a run is compared with others.")
    names = _names([path for _, path in found])
    chosen = [
        (labels[place] if place < len(labels) else said or names[place])
        for place, (said, _) in enumerate(found)
    ]
    twice = next((name for name in chosen if chosen.count(name) > 1), None)
    if twice is not None:
        raise QgateError(f"two files are called {twice!r}: give them names with NAME=FILE.")
    return list(zip(chosen, (path for _, path in found), strict=True))


def _file(given: str) -> tuple[str, Path]:
    """The name before a `=`, if there is one, and the results file that is meant."""
    name, path = "", Path(given)
    if not path.exists() and "=" in given:
        name, _, rest = given.partition("=")
        path = Path(rest)
        if not name or not rest:
            raise QgateError(f"{given!r}: write NAME=FILE.")
    return name, results_in(path)


def results_in(path: Path) -> Path:
    """A results file, or the one in a folder."""
    if path.is_dir():
        return _inside(path)
    if not path.exists():
        raise QgateError(f"there is no file {str(path)!r}{_nearby(path)}")
    return path


def _inside(folder: Path) -> Path:
    for path in (folder / _RESULTS, folder / "qgate-out" / _RESULTS):
        if path.is_file():
            return path
    lines = sorted(path.name for path in folder.glob("*.jsonl"))
    there = f"; it has {', '.join(map(one_line, lines[:_NEARBY]))}" if lines else ""
    raise QgateError(
        f"the folder {str(folder)!r} has no {_RESULTS}{there}. `pytest suites` leaves it in "
        "qgate-out."
    )


def _nearby(path: Path) -> str:
    """Which files are there instead, of the same folder or below it."""
    import difflib

    parent = path.parent
    while not parent.is_dir():
        parent = parent.parent
    found = [each for pattern in ("*.jsonl", "*/*.jsonl") for each in parent.glob(pattern)]
    by_text = {str(each): each for each in sorted(found)}
    close = difflib.get_close_matches(str(path), by_text, n=_NEARBY, cutoff=0.3) or [*by_text]
    if not close:
        return ": run `pytest suites` first."
    return f"; there is {', '.join(map(one_line, close[:_NEARBY]))}."


def _names(paths: Sequence[Path]) -> list[str]:
    """The stem of a file, or its folder where all are called results; else the path."""
    stems = [path.stem for path in paths]
    folders = [path.resolve().parent.name or path.stem for path in paths]
    # `a/qgate-out/results.jsonl` is of a.
    above = [path.resolve().parent.parent.name for path in paths]
    for names in (stems, folders, above):
        if all(names) and len(set(names)) == len(names):
            return list(names)
    return [str(path) for path in paths]


def _check_outputs(outputs: Sequence[Path], history: Path | None, files: Sequence[Path]) -> None:
    """Before anything is read: a report that cannot be written is known at once."""
    from qgate.page.reports import ENDINGS

    taken = {path.resolve() for path in files}
    if history is not None and history.resolve() in taken:
        raise QgateError(f"--history {str(history)!r} is one of the results: name another file.")
    taken |= {history.resolve()} if history is not None else set()
    for output in outputs:
        if output.suffix.lower() not in ENDINGS:
            raise QgateError(
                f"--output {str(output)!r}: the ending says what is written, and it is one of "
                f"{', '.join(ENDINGS)}."
            )
        if output.resolve() in taken:
            raise QgateError(f"{str(output)!r} would be written over what else was named.")
        taken.add(output.resolve())
        if output.is_dir():
            raise QgateError(f"{str(output)!r} is a folder: name a file.")
        if not output.parent.is_dir():
            raise QgateError(f"there is no folder {str(output.parent)!r} for {output.name!r}.")


# What is written --------------------------------------------------------------------------------


def _write(
    outputs: Sequence[Path],
    args: argparse.Namespace,
    loaded: Sequence[Loaded],
    comparison: RunComparison | None,
) -> Sequence[Point]:
    """Every output, then the history, whose points are returned.

    All are made beside their places before the first one is moved to its own, so whatever cannot
    be written leaves the others as they were.
    """
    from qgate.page.history import adding, point_of
    from qgate.page.reports import write_report

    history: Sequence[Point] = ()
    with contextlib.ExitStack() as stack:
        # What is entered first is moved last.
        if args.history is not None:
            points = [point_of(each.run.name, each.run.header, each.tally) for each in loaded]
            history = stack.enter_context(adding(args.history, points))
        places = [(output, stack.enter_context(_placed(output))) for output in outputs]
        for output, place in places:
            # The ending says what is written.
            made = place.with_name(place.name + output.suffix)
            stack.callback(made.unlink, missing_ok=True)
            with _naming(output):
                write_report(made, loaded, plots=args.plots, comparison=comparison, history=history)
                place.write_bytes(made.read_bytes())
    return history


@contextlib.contextmanager
def _placed(output: Path) -> Iterator[Path]:
    from qgate.storage.files import replacing

    with _naming(output), replacing(output) as place:
        yield place


@contextlib.contextmanager
def _naming(output: Path) -> Iterator[None]:
    """Errors of the system name the file that was asked for, not a neighbor."""
    try:
        yield
    except OSError as error:
        if error.filename is None or f".{output.name}." in Path(error.filename).name:
            raise OSError(error.errno, error.strerror, str(output)) from error
        raise


# What is told -----------------------------------------------------------------------------------


def _told(loaded: Sequence[Loaded], comparison: RunComparison | None) -> list[TerminalLine]:
    from qgate.page.comparison_texts import comparison_lines
    from qgate.page.reports import about
    from qgate.page.terminal import TerminalLine, counts_lines, errors, plain, tables

    width = shutil.get_terminal_size((80, 24)).columns
    lines: list[TerminalLine] = []
    for each in loaded:
        lines += plain([f"{each.run.name}: {about(each.run)}"], width)
        last = each is loaded[-1]
        show = tables if last else counts_lines
        lines += show(each.tally, width, each.run.header)
        lines += errors(each.broken)
        if each.run.torn:
            lines += plain([each.run.torn], width, "yellow")
        lines.append(TerminalLine(""))
    if comparison is not None:
        lines += [*comparison_lines(comparison, width), TerminalLine("")]
    return lines


def _print(lines: Sequence[TerminalLine]) -> None:
    colors = has_colors(sys.stdout.isatty())
    for each in lines:
        print(each.painted(colors))


def has_colors(on_terminal: bool) -> bool:
    """Colors on a terminal that has them; NO_COLOR is stronger than FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return on_terminal and os.environ.get("TERM") != "dumb"


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{max(size / 1e3, 0.1):.1f} kB"
