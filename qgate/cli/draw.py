"""Draw what a dump of tensors shows: overflow, distributions, formats, gradients, ranks.

  qgate draw DIR --output-dir draw
  qgate draw RUN_A RUN_B --compare hifp8,mxfp8 --jobs 2
  qgate draw DIR --format fp8_e4m3,mxfp4 --layer 3 --name 'grad_*'

DIR is what `qgate.collect` wrote, or a folder of the known collector as it is, by its path or URL;
several are drawn as one. Open index.html in the output folder; tensor_stats.txt and
statistics/*.csv have the numbers, analysis.json all of it: `qgate draw draw/analysis.json` draws it
again, without the dump. OUT may be a URL, too.
Exit status: 0, also where tensors are bad; `pytest suites --dump DIR` is the gate.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from qgate.cli._dump_selection import add_selection, wanted_of
from qgate.cli._numbers import from_one
from qgate.cli._progress import progress
from qgate.cli._workers import add_workers, workers_from
from qgate.errors import QgateError
from qgate.storage.places import place_of

if TYPE_CHECKING:
    from qgate.drawing.compute import DrawingRequest
    from qgate.summaries.record import DumpAnalysis


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR")
    add("--output-dir", default="draw", metavar="OUT", help="a folder or URL (default: draw)")
    add_analysis(parser)
    add("--no-plots", action="store_true", help="texts, tables and data only")
    add_selection(parser)


def add_analysis(parser: argparse.ArgumentParser) -> None:
    """The options of an analysis, for every command that makes one."""
    add = parser.add_argument
    add("--format", action="append", metavar="F", help="formats whose losses are measured: F,F")
    add("--compare", metavar="A,B", help="two quant types of the dump, or two formats")
    add("--rows", type=from_one, default=2**16, metavar="N", help="elements of each tensor that "
        "block formats are measured on (default 65536)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="chooses them (default 0)")
    add_workers(parser)


def asked_of(args: argparse.Namespace, most: int | None, tensors: int | None) -> DrawingRequest:
    """The options as an analysis takes them."""
    from qgate.drawing.compute import DrawingRequest

    told: dict[str, Any] = {}
    if args.format:
        told["formats"] = tuple(name for given in args.format for name in given.split(",") if name)
    if args.compare is not None:
        names = tuple(part.strip() for part in args.compare.split(","))
        if len(names) != 2 or not all(names):
            raise QgateError(f"--compare {args.compare!r}: give two names, as in hifp8,mxfp8.")
        told["compare"] = names
    return DrawingRequest(
        rows=args.rows,
        seed=args.seed,
        workers=workers_from(args),
        most=most,
        tensors=tensors,
        wanted=wanted_of(args),
        **told,
    )


def run(args: argparse.Namespace) -> int:
    from qgate.drawing.files import check_folder, draw_analysis
    from qgate.drawing.skipping import skipped
    from qgate.drawing.texts import findings, said_of

    folder = place_of(args.output_dir)
    check_folder(folder)
    analysis = analysis_of(args)
    said = said_of(analysis)
    with progress("pictures") as step:
        written = draw_analysis(
            analysis, folder, workers_from(args), not args.no_plots, step, said=said
        )
    for line in findings(said):
        print(line)
    for line in skipped(analysis, written, plots=not args.no_plots):
        print(f"skipped {line}")
    pictures = sum(path.suffix == ".png" for path in written)
    print(f"{len(analysis['tensors'])} tensors, {pictures} pictures: "
          f"{folder / 'index.html'}")  # fmt: skip
    return 0


def analysis_of(
    args: argparse.Namespace, most: int | None = None, tensors: int | None = None
) -> DumpAnalysis:
    """Of the dumps that were named, or of a record that was kept."""
    first = place_of(args.folders[0])
    if len(args.folders) == 1 and first.suffix == ".json" and first.is_file():
        from qgate.drawing.reading import read_analysis

        return read_analysis(first)
    from qgate.drawing.compute import analyze_dump

    asked = asked_of(args, most, tensors)
    with progress("tensors") as step:
        return analyze_dump(*args.folders, asked=asked, step=step)
