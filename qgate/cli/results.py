"""Merge the results of several jobs.

  qgate results merge shard-*/qgate-out --output qgate-out
  qgate results merge a.jsonl b.jsonl --output all --exit-code

merge writes one results.jsonl, results.csv and report.html for all shards of
`pytest suites --shard I/N`, or for any runs of the same code, models and limits.
Exit status: 0 if results were merged, even if gates failed (1 with --exit-code). Where the variable
CI is set: 1 if gates were skipped or a shard is missing, unless --allow-partial is given. 2 if a
shard is missing (unless --partial is given), damaged, or belongs to another run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, print_json
from qgate.cli.report import results_in
from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.project.options import PLOTS
from qgate.text.printing import print_line

if TYPE_CHECKING:
    from qgate import results
    from qgate.page import reports, runs
    from qgate.results import extent as extents
else:
    results, extents = LateModule("qgate.results"), LateModule("qgate.results.extent")
    reports, runs = LateModule("qgate.page.reports"), LateModule("qgate.page.runs")


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    merge = verbs.add_parser("merge", help="merge all shards into one results file and one report")
    add = merge.add_argument
    add("results", nargs="+", type=Path, metavar="RESULTS", help="a results.jsonl, or its folder")
    add(
        "--output",
        type=Path,
        default=Path("qgate-out"),
        metavar="DIR",
        help="folder to write (default qgate-out)",
    )
    add("--partial", action="store_true", help="merge what is there, even if shards are missing")
    add(
        "--allow-partial",
        action="store_true",
        help="pass although gates were skipped, where CI is set",
    )
    add("--plots", choices=PLOTS, default="worst", help="gates to draw: those that failed, "
        "these and the worst that passed (default), all or none")  # fmt: skip
    add("--exit-code", action="store_true", help="exit with 1 if the run failed")
    add_json(merge)


def run(args: argparse.Namespace) -> int:
    paths = [results_in(path) for path in args.results]
    args.output.mkdir(parents=True, exist_ok=True)
    target, report = args.output / "results.jsonl", args.output / "report.html"
    if any(target.exists() and path.samefile(target) for path in paths):
        raise QgateError(f"{str(target)!r} is one of the files given: name another --output.")

    def check(merged: results.MergedResults) -> None:
        if merged.missing and not args.partial:
            named = ", ".join(map(str, merged.missing))
            raise QgateError(
                f"shard {named} is missing: the gates in it are nobody's verdict. Give its results "
                "too, or put together what is there with --partial."
            )

    merged = results.merge(paths, target, check, allow_partial=args.allow_partial)
    results.to_csv(results.read(target)[1], args.output / "results.csv")
    whole = runs.read_run(target)
    reports.write_page(report, [whole], plots=args.plots)
    partial = extents.partial_text(whole.header)
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
    if extents.is_partial(extents.extent_of(whole.header)):
        print_line(partial or extents.extent_text(whole.header))
    for text in extents.covered_texts(whole.header):
        print_line(text)
    for text in merged.torn:
        print_line(text)
    failed = f"{len(whole.failed)} failed" if whole.failed else "none failed"
    counts = f"{merged.records} records of {len(whole.gates)} gates"
    print_line(f"{target}: {counts}, {failed}; {report}")
    return status
