"""Make a report of results: a page, Markdown for a pull request, CSV, JSON; compare two runs.

  qgate report qgate-out                             make report.html from the results in it
  qgate report qgate-out --output summary.md --output gates.csv
  qgate report before=a/results.jsonl after=b/results.jsonl      compare two runs
  qgate report qgate-out --format comment            print a comment for a pull request
  qgate report shard-*/qgate-out --merge qgate-out   merge the results of several jobs

Given two runs, the report compares the second with the first, and shows it in detail. It reads
results only, and needs neither the model nor pytest nor torch. --merge writes one results.jsonl,
results.csv and report.html for all shards of `pytest suites --shard I/N`, or for any runs of the
same code, models and limits.
Exit status: 0 if the report was made (with --exit-code, 1 if the run failed); 2 if files are
missing, damaged or cannot be written, and then nothing is written. With --merge where the variable
CI is set: 1 if gates were skipped or a shard is missing, unless --allow-partial is given.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, has_colors, print_json
from qgate.cli._project import project_folder
from qgate.errors import QgateError
from qgate.loading import LateModule, without_collector
from qgate.project.options import PLOTS
from qgate.storage.access import write_text
from qgate.storage.files import naming, replacing
from qgate.storage.removing import remove_files
from qgate.text import megabytes, one_line
from qgate.text.printing import print_line, print_text

if TYPE_CHECKING:
    from qgate import results
    from qgate.page import comment as comments
    from qgate.page import comparison_texts, comparisons, pages, reports, runs, terminal
    from qgate.results import coverage
else:
    comments = LateModule("qgate.page.comment")
    comparison_texts = LateModule("qgate.page.comparison_texts")
    comparisons = LateModule("qgate.page.comparisons")
    reports, terminal = (LateModule("qgate.page.reports"), LateModule("qgate.page.terminal"))
    results, coverage = (LateModule("qgate.results"), LateModule("qgate.results.coverage"))
    pages, runs = (LateModule("qgate.page.pages"), LateModule("qgate.page.runs"))

_RESULTS = "results.jsonl"
_NEARBY = 5


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", nargs="*", metavar="RESULTS", help="a results.jsonl, a folder with one, or "
        "NAME=FILE (default: qgate-out)")  # fmt: skip
    add("--output", "-o", type=Path, action="append", metavar="FILE", help="file to write; its "
        "ending chooses .html (default: report.html), .md, .csv or .json; repeatable")  # fmt: skip
    add("--format", choices=("comment",), help="comment: for a pull request, what moved, by how "
        "much and since when; printed, or written to an --output that ends in .md")  # fmt: skip
    add("--plots", choices=PLOTS, default="worst", help="gates to draw: "
        "those that failed, these and the worst that passed (default), all or none")  # fmt: skip
    add("--label", action="append", default=[], metavar="NAME", help="name of a file, in "
        "the order of the files; repeatable")  # fmt: skip
    add("--merge", type=Path, metavar="DIR", help="merge any number of results into this folder")
    add("--partial", action="store_true", help="with --merge: even if shards are missing")
    add("--allow-partial", action="store_true", help="with --merge: pass although gates were "
        "skipped, where CI is set")  # fmt: skip
    add("--exit-code", action="store_true", help="exit with 1 if the run failed; the second "
        "of two")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with without_collector():
        return _report(args) if args.merge is None else _merge(args)


def _report(args: argparse.Namespace) -> int:
    if args.partial or args.allow_partial:
        option = "--partial" if args.partial else "--allow-partial"
        raise QgateError(f"{option} goes with --merge DIR, which merges results of several jobs.")
    prints = args.format == "comment" and not args.output
    outputs = args.output or ([] if prints else [Path("report.html")])
    if args.format == "comment" and outputs and not any(map(_is_markdown, outputs)):
        raise QgateError(
            f"--format comment is Markdown, and --output {str(outputs[0])!r} is not: name a file "
            "that ends in .md, or leave it out to print the comment."
        )
    files = _files(args.results or [str(project_folder("qgate-out"))], args.label)
    _check_outputs(outputs, [path for _, path in files])
    # Only JSON names the gates of the earlier run.
    brief = not any(output.suffix.lower() == ".json" for output in outputs)
    loaded = [
        reports.load(
            path,
            name,
            compared=len(files) > 1,
            brief=brief and name != files[-1][0],
            drawn=name == files[-1][0],
        )
        for name, path in files
    ]
    compared = [run.compared for run in loaded if run.compared is not None]
    comparison = comparisons.compare(*compared) if compared else None
    _write(outputs, args, loaded, comparison)
    status = int(args.exit_code and not loaded[-1].run.passed)
    if args.json:
        last = loaded[-1].run
        print_json(
            {
                "runs": [report.run.name for report in loaded],
                "passed": last.passed,
                "failed": [gate.node for gate in last.failed],
                "gates": len(last.gates),
                "written": outputs,
            }
        )
        return status
    if prints:
        print_text(comments.comment(loaded, comparison), end="")
        return status
    colors = has_colors(sys.stdout.isatty())
    for line in _lines(loaded, comparison):
        print(line.colored(colors))
    for output in outputs:
        print_line(f"wrote {output} ({megabytes(output.stat().st_size)})")
    return status


def _merge(args: argparse.Namespace) -> int:
    if args.output or args.format or args.label:
        option = "--output" if args.output else "--format" if args.format else "--label"
        raise QgateError(
            f"{option} does not go with --merge: merge first, then `qgate report {args.merge}`."
        )
    if not args.results:
        raise QgateError("name the results to merge: qgate report shard-*/qgate-out --merge DIR.")
    return merge_results(args, [results_in(Path(text)) for text in args.results])


# Arguments ---------------------------------------------------------------------------------


def _files(arguments: Sequence[str], labels: Sequence[str]) -> list[tuple[str, Path]]:
    """Return names and results files; refuse a file or a name that is there twice."""
    if len(arguments) > 2:
        raise QgateError(
            f"{len(arguments)} results were named, and a report compares two: name the earlier run "
            "first, then the later one."
        )
    if len(labels) > len(arguments):
        raise QgateError(f"--label was given {len(labels)} times for {len(arguments)} files.")
    named = [_named_file(argument) for argument in arguments]
    paths = [path for _, path in named]
    for index, path in enumerate(paths):
        if any(path.samefile(other) for other in paths[:index]):
            raise QgateError(f"{str(path)!r} was named twice: a run is compared with others.")
    names = [own or name for (own, _), name in zip(named, _names(paths), strict=True)]
    names[: len(labels)] = labels
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise QgateError(f"two files are called {twice!r}: give them names with NAME=FILE.")
    return list(zip(names, paths, strict=True))


def _named_file(argument: str) -> tuple[str, Path]:
    """Return the name before a `=`, if any, and the results file."""
    name, path = "", Path(argument)
    if not path.exists() and "=" in argument:
        name, _, file = argument.partition("=")
        path = Path(file)
        if not name or not file:
            raise QgateError(f"{argument!r}: write NAME=FILE.")
    return name, results_in(path)


def results_in(path: Path) -> Path:
    """Return a results file, given by its path or its folder."""
    if not path.exists():
        raise QgateError(f"there is no file {str(path)!r}{_nearby(path)}")
    if not path.is_dir():
        return path
    for inside in (path / _RESULTS, path / "qgate-out" / _RESULTS):
        if inside.is_file():
            return inside
    lines = sorted(file.name for file in path.glob("*.jsonl"))
    alternatives = f"; it has {', '.join(map(one_line, lines[:_NEARBY]))}" if lines else ""
    raise QgateError(
        f"the folder {str(path)!r} has no {_RESULTS}{alternatives}. `pytest suites` leaves it in "
        "qgate-out."
    )


def _nearby(path: Path) -> str:
    """Name the nearest files in the same folder or below it."""
    parent = next(folder for folder in path.parents if folder.is_dir())
    files = sorted(
        file for pattern in ("*.jsonl", f"*/{_RESULTS}") for file in parent.glob(pattern)
    )
    texts = list(map(str, files))
    close = difflib.get_close_matches(str(path), texts, n=_NEARBY, cutoff=0.3) or texts
    if not close:
        return ": run `pytest suites` first."
    return f"; there is {', '.join(map(one_line, close[:_NEARBY]))}."


def _names(paths: Sequence[Path]) -> list[str]:
    """Name files by their stem, or by their folder where all are called results; else whole."""
    stems = [path.stem for path in paths]
    folders = [path.resolve().parent.name or path.stem for path in paths]
    # `a/qgate-out/results.jsonl` is of a.
    grandparents = [path.resolve().parent.parent.name for path in paths]
    for names in (stems, folders, grandparents):
        if all(names) and len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _check_outputs(outputs: Sequence[Path], files: Sequence[Path]) -> None:
    """Refuse a report that cannot be written, before anything is read."""
    used = {path.resolve() for path in files}
    for output in outputs:
        if output.suffix.lower() not in reports.ENDINGS:
            raise QgateError(
                f"--output {str(output)!r}: the ending says what is written, and it is one of "
                f"{', '.join(reports.ENDINGS)}."
            )
        if output.resolve() in used:
            raise QgateError(f"{str(output)!r} would be written over what else was named.")
        used.add(output.resolve())
        if output.is_dir():
            raise QgateError(f"{str(output)!r} is a folder: name a file.")
        if not output.parent.is_dir():
            raise QgateError(f"there is no folder {str(output.parent)!r} for {output.name!r}.")


# Output files --------------------------------------------------------------------------------


def _write(
    outputs: Sequence[Path],
    args: argparse.Namespace,
    loaded: Sequence[reports.LoadedRun],
    comparison: comparisons.RunComparison | None,
) -> None:
    """Write every output.

    All are made beside their places before the first one is moved to its own, so whatever cannot
    be written leaves the others as they were.
    """
    with contextlib.ExitStack() as stack:
        targets = [(output, stack.enter_context(replacing(output))) for output in outputs]
        for output, target in targets:
            # The ending says what is written.
            draft = target.with_name(target.name + output.suffix)
            stack.callback(remove_files, draft.parent, draft.name)
            with naming(output):
                if args.format == "comment" and _is_markdown(output):
                    write_text(draft, comments.comment(loaded, comparison))
                else:
                    reports.write_report(draft, loaded, plots=args.plots, comparison=comparison)
                target.write_bytes(draft.read_bytes())


def _is_markdown(output: Path) -> bool:
    return output.suffix.lower() == ".md"


# Printed lines --------------------------------------------------------------------------------


def _lines(
    loaded: Sequence[reports.LoadedRun], comparison: comparisons.RunComparison | None
) -> Iterator[terminal.TerminalLine]:
    width = shutil.get_terminal_size((80, 24)).columns
    for report in loaded:
        yield from terminal.wrapped_lines(
            [f"{report.run.name}: {reports.about(report.run)}"], width
        )
        show = terminal.tables if report is loaded[-1] else terminal.counts_lines
        yield from show(report.tally, width, report.run.header)
        yield from terminal.error_lines(report.broken)
        if report.run.torn:
            yield from terminal.wrapped_lines([report.run.torn], width, "yellow")
        yield terminal.TerminalLine("")
    if comparison is not None:
        yield from comparison_texts.comparison_lines(comparison, width)
        yield terminal.TerminalLine("")


def merge_results(args: argparse.Namespace, paths: Sequence[Path]) -> int:
    """Write results.jsonl, results.csv and report.html of all results into the folder."""
    folder: Path = args.merge
    folder.mkdir(parents=True, exist_ok=True)
    target, report = folder / "results.jsonl", folder / "report.html"
    if any(target.exists() and path.samefile(target) for path in paths):
        raise QgateError(f"{str(target)!r} is one of the files given: name another --merge.")

    def check(merged: results.MergedResults) -> None:
        if merged.missing and not args.partial:
            named = ", ".join(map(str, merged.missing))
            raise QgateError(
                f"shard {named} is missing: the gates in it are nobody's verdict. Give its results "
                "too, or put together what is there with --partial."
            )

    merged = results.merge(paths, target, check, allow_partial=args.allow_partial)
    with results.csv_table(folder / "results.csv") as add:
        whole = runs.read_run(target, each=add, trusted=True)
    pages.write_page(report, whole, plots=args.plots)
    partial = coverage.partial_text(whole.header)
    status = int(bool(partial) or (args.exit_code and not whole.passed))
    if args.json:
        print_json(
            {
                "passed": whole.passed and not partial,
                "failed": [gate.node for gate in whole.failed],
                "gates": len(whole.gates),
                "records": merged.records,
                "notes": [partial, *merged.torn] if partial else merged.torn,
                "results": target,
                "page": report,
            }
        )
        return status
    if coverage.is_partial(coverage.extent_of(whole.header)):
        print_line(partial or coverage.extent_text(whole.header))
    for text in coverage.covered_texts(whole.header):
        print_line(text)
    for text in merged.torn:
        print_line(text)
    failed = f"{len(whole.failed)} failed" if whole.failed else "none failed"
    counts = f"{merged.records} records of {len(whole.gates)} gates"
    print_line(f"{target}: {counts}, {failed}; {report}")
    return status
