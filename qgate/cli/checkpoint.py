"""Check a quantized checkpoint against its recipe and its parent, without running it.

  qgate checkpoint CHILD --parent PARENT     every tensor beside the one it was made from
  qgate checkpoint CHILD                     what can be known from the child alone
  qgate checkpoint CHILD --parent PARENT --jobs 8     by eight processes
  qgate checkpoint CHILD --parent PARENT --output-dir DIR     also as a page, with tables

CHILD and PARENT are folders of .safetensors shards, or single files, at paths or URLs. The recipe
is what the child's config.json declares. No code of a checkpoint is run.
Exit status: 0 if all is as declared, 1 if something is not, 2 if files cannot be read or are not a
pair.
"""

from __future__ import annotations

import argparse
import sys

from qgate.cli._progress import progress
from qgate.cli._workers import add_workers, from_one, workers_from
from qgate.storage.locations import location_of
from qgate.text import for_terminal


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("child", metavar="CHILD", help="the quantized checkpoint")
    add("--parent", metavar="PARENT", help="the checkpoint that it was made from")
    add("--json", action="store_true", help="print every weight and finding as JSON")
    add("--limit", type=from_one, default=40, metavar="N", help="findings to print (40)")
    add(
        "--output-dir",
        metavar="DIR",
        help="write a page, checkpoint.json and tables there; a folder or a URL",
    )
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    from qgate.checkpoints import compare, files, texts
    from qgate.storage.output import check_folder

    folder = None if args.output_dir is None else location_of(args.output_dir)
    if folder is not None:
        check_folder(folder)
    workers, blocks = workers_from(args), files.DRAWN if folder else 0
    with progress("weights") as report:
        record = compare(args.child, args.parent, report, workers=workers, blocks=blocks)
    if args.json:
        print(files.record_json(record), end="")
    else:
        print("\n".join(texts.result_lines(record, args.limit)))
    if folder is not None:
        page = files.write_files(folder, record)
        print(f"page: {for_terminal(str(page))}", file=sys.stderr if args.json else sys.stdout)
    return int(bool(record.findings))
