"""Draw the tensors of a dump: overflow, distributions, formats, gradients, ranks.

  qgate dumps draw DIR --output-dir draw
  qgate dumps draw RUN_A RUN_B --compare hifp8,mxfp8 --jobs 2
  qgate dumps draw DIR --format fp8_e4m3,mxfp4 --where 'layer=3,name=grad_*'
  qgate dumps draw DIR --quick                        one picture, in seconds

DIR is a dump that `qgate collect` wrote, or a folder of megatron-tensor-saver, as a path or URL;
several are drawn as one. Open index.html in the output folder. The numbers are in tensor_stats.txt
and statistics/*.csv; `qgate dumps draw draw/analysis.json` draws them again without the dump.
--quick reads the first rows of large tensors, and at most 500 tensors.
Exit status: 0, also where tensors are bad; `pytest suites --dump DIR` is the gate.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, print_json
from qgate.cli._dump_selection import add_selection, selected_fields
from qgate.cli._progress import progress
from qgate.cli._workers import add_workers, from_one, workers_from
from qgate.errors import QgateError
from qgate.storage.locations import location_of
from qgate.text.printing import print_line

if TYPE_CHECKING:
    from qgate.drawing.compute import DrawingRequest
    from qgate.drawing.findings import DumpFindings
    from qgate.summaries.record import DumpAnalysis


_QUICK_ELEMENTS, _QUICK_TENSORS = 2**14, 500


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="dumps, by path or URL")
    add("--output-dir", default="draw", metavar="OUT", help="a folder or URL (default: draw)")
    add("--format", action="append", metavar="F", help="formats whose losses to measure: F,F")
    add(
        "--compare",
        metavar="A,B",
        help="draw two quant types of the dump, or two formats, side by side",
    )
    add("--rows", type=from_one, default=2**16, metavar="N", help="elements of each tensor that "
        "block formats are measured on (default 65536)")  # fmt: skip
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed that chooses these elements (default 0)",
    )
    add_workers(parser)
    add_json(parser)
    extent = parser.add_mutually_exclusive_group().add_argument
    extent("--no-plots", action="store_true", help="write texts, tables and data only")
    extent(
        "--quick",
        action="store_true",
        help="write quick_analysis.png and tensor_stats.txt only, of a part of the values",
    )
    add_selection(parser)


def _request(args: argparse.Namespace) -> DrawingRequest:
    from qgate.drawing.tensor_pass import FORMATS, DrawingRequest

    formats = tuple(name for names in args.format or () for name in names.split(",") if name)
    compare = None
    if args.compare is not None:
        first, _, second = map(str.strip, args.compare.partition(","))
        if not (first and second) or "," in second:
            raise QgateError(f"--compare {args.compare!r}: give two names, as in hifp8,mxfp8.")
        compare = first, second
    return DrawingRequest(
        formats=formats if args.format else FORMATS, compare=compare, fields=selected_fields(args),
        rows=args.rows, most=_QUICK_ELEMENTS if args.quick else None,
        tensors=_QUICK_TENSORS if args.quick else None, seed=args.seed, workers=workers_from(args),
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from qgate.drawing.files import OTHER_NAMES, check_folder, draw_analysis
    from qgate.drawing.findings import findings_of
    from qgate.drawing.texts import finding_lines, skipped_lines

    folder = location_of(args.output_dir)
    check_folder(folder)
    analysis = _analysis(args)
    findings = findings_of(analysis)
    if args.quick:
        return _draw_quickly(args, analysis, findings)
    with progress("pictures") as step:
        written = draw_analysis(
            analysis, folder, workers_from(args), not args.no_plots, step, findings=findings
        )
    if args.json:
        print_json(
            {
                "tensors": len(analysis["tensors"]),
                "findings": [finding._asdict() for finding in findings.findings],
                "skipped": list(skipped_lines(analysis, written, plots=not args.no_plots)),
                "page": str(folder / "index.html"),
            }
        )
        return 0
    for line in finding_lines(findings):
        print_line(line)
    for line in skipped_lines(analysis, written, plots=not args.no_plots):
        print_line(f"skipped {line}")
    copies = OTHER_NAMES.values()
    pictures = sum(path.suffix == ".png" and path.parent.name not in copies for path in written)
    print_line(f"{len(analysis['tensors'])} tensors, {pictures} pictures: "
          f"{folder / 'index.html'}")  # fmt: skip
    return 0


def _draw_quickly(args: argparse.Namespace, analysis: DumpAnalysis, findings: DumpFindings) -> int:
    from qgate.drawing.files import draw_overview
    from qgate.drawing.texts import finding_lines

    picture = draw_overview(analysis, args.output_dir, findings)
    if args.json:
        print_json(
            {
                "tensors": len(analysis["tensors"]),
                "findings": [finding._asdict() for finding in findings.findings],
                "notes": analysis["notes"],
                "picture": str(picture),
            }
        )
        return 0
    for line in finding_lines(findings):
        print_line(line)
    for note in analysis["notes"]:
        print_line(f"note    {note}")
    print_line(f"{len(analysis['tensors'])} tensors: {picture}")
    return 0


def _analysis(args: argparse.Namespace) -> DumpAnalysis:
    """Analyze the dumps in the arguments, or read the record of an earlier analysis."""
    first = location_of(args.folders[0])
    if len(args.folders) == 1 and first.suffix == ".json" and first.is_file():
        from qgate.drawing.reading import read_analysis

        return read_analysis(first)
    from qgate.drawing.compute import analyze_dump

    request = _request(args)
    with progress("tensors") as step:
        return analyze_dump(*args.folders, request=request, step=step)
