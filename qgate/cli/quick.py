"""Draw one picture, in seconds, that shows what a dump holds and what is wrong with it.

  qgate quick DIR
  qgate quick DIR --output overview.png --layer 3
  qgate quick DIR --output-dir draw                   as draw/quick_analysis.png

It reads the first rows of large tensors, and at most 500 tensors. `qgate draw DIR` reads all.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, print_json
from qgate.cli._dump_selection import add_selection
from qgate.cli.draw import add_analysis, analysis_of
from qgate.errors import QgateError
from qgate.storage.access import folder_of, local_files
from qgate.storage.locations import check_writable, location_of
from qgate.storage.output import check_folder
from qgate.text.printing import print_line

if TYPE_CHECKING:
    from qgate.storage.locations import Location

_FILE = "quick_analysis.png"
_MOST, _TENSORS = 2**14, 500


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="DIR", help="dumps, by path or URL")
    parser.add_argument("--output", metavar="FILE", help=f"file or URL to write (default: {_FILE})")
    parser.add_argument(
        "--output-dir",
        metavar="OUT",
        help=f"write {_FILE} in this folder or URL, instead of --output",
    )
    add_json(parser)
    add_analysis(parser)
    add_selection(parser)


def run(args: argparse.Namespace) -> int:
    from qgate.drawing.findings import findings_of
    from qgate.drawing.plots.pictures import picture_at
    from qgate.drawing.texts import finding_lines

    output = _output(args)
    analysis = analysis_of(args, _MOST, _TENSORS)
    with local_files([output]) as (picture,):
        try:
            picture_at(_FILE).draw(picture, analysis)
        except QgateError as error:
            raise QgateError(str(error).replace(str(picture), str(output))) from None
    findings = findings_of(analysis)
    if args.json:
        print_json(
            {
                "tensors": len(analysis["tensors"]),
                "findings": [finding._asdict() for finding in findings.findings],
                "notes": analysis["notes"],
                "picture": str(output),
            }
        )
        return 0
    for line in finding_lines(findings):
        print_line(line)
    for note in analysis["notes"]:
        print_line(f"note    {note}")
    print_line(f"{len(analysis['tensors'])} tensors: {output}")
    return 0


def _output(args: argparse.Namespace) -> Location:
    """Return the file to draw, and make its folder."""
    if args.output_dir is None:
        output = location_of(args.output or _FILE)
        check_writable(output)
        if output.is_dir():
            raise QgateError(
                f"--output {args.output!r} is a folder; name a file, or give --output-dir."
            )
        return output
    if args.output is not None:
        raise QgateError(
            f"--output {args.output!r} and --output-dir {args.output_dir!r} both say where to "
            f"draw; give one of them. A folder gets {_FILE}."
        )
    from qgate.drawing.files import list_file

    folder = location_of(args.output_dir)
    check_folder(folder)
    folder_of(folder).make()
    list_file(folder, _FILE)
    return folder / _FILE
