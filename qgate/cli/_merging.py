"""`qgate report --merge DIR`: merge the results of several jobs into one file and one page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._console import print_json
from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.text.printing import print_line

if TYPE_CHECKING:
    from qgate import results
    from qgate.page import reports, runs
    from qgate.results import extent as extents
else:
    results, extents = LateModule("qgate.results"), LateModule("qgate.results.extent")
    reports, runs = LateModule("qgate.page.reports"), LateModule("qgate.page.runs")


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
