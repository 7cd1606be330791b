"""Draw one page that shows what a dump holds and what is wrong with it, in seconds.

  qgate quick DIR
  qgate quick DIR --output overview.png --layer 3

Of large tensors only the first rows are read, and of many tensors only 500.
`qgate draw DIR` looks at all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from qgate.cli._dump_selection import add_selection
from qgate.cli.draw import add_analysis, analysis_of
from qgate.errors import QgateError

_MOST, _TENSORS = 2**14, 500


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="DIR")
    parser.add_argument(
        "--output", type=Path, default=Path("quick_analysis.png"), metavar="FILE",
        help="(default: quick_analysis.png)",
    )  # fmt: skip
    add_analysis(parser)
    add_selection(parser)


def run(args: argparse.Namespace) -> int:
    from qgate.report._escaping import one_line
    from qgate.report.dumps.texts import findings
    from qgate.report.plots.dumps.quick import draw_quick

    if args.output.is_dir():
        raise QgateError(f"--output {str(args.output)!r} is a folder; name a file.")
    analysis = analysis_of(args, _MOST, _TENSORS)
    draw_quick(args.output, analysis)
    for line in findings(analysis):
        print(line)
    for note in analysis["notes"]:
        print(f"note    {one_line(note)}")
    print(f"{len(analysis['tensors'])} tensors: {args.output}")
    return 0
