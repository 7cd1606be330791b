"""Check a quantized checkpoint against its recipe and its parent, without running it.

  qgate checkpoint CHILD --parent PARENT     every tensor beside the one it was made from
  qgate checkpoint CHILD                     what can be known from the child alone

CHILD and PARENT are folders with .safetensors, .onnx, .npz, .pt or .bin files, or single files, at
paths or URLs. The recipe is what the child's config.json declares, of .onnx what its graph does. No
code of a checkpoint is run. ONNX needs pip install 'pytest-qgate[checkpoints]'.
Exit status: 0 if all is as declared, 1 if something is not, 2 if files cannot be read or are not a
pair.
"""

from __future__ import annotations

import argparse
import json

from qgate.cli._progress import progress
from qgate.cli._workers import from_one


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("child", metavar="CHILD", help="the quantized checkpoint")
    add("--parent", metavar="PARENT", help="the checkpoint that it was made from")
    add("--json", action="store_true", help="print every weight and finding as JSON")
    add("--limit", type=from_one, default=40, metavar="N", help="findings to print (40)")


def run(args: argparse.Namespace) -> int:
    from qgate.checkpoints.comparison import compare
    from qgate.checkpoints.texts import result_lines

    with progress("weights") as report:
        record = compare(args.child, args.parent, report)
    if args.json:
        print(json.dumps(record.to_dict(), indent=1))
    else:
        print("\n".join(result_lines(record, args.limit)))
    return int(bool(record.findings))
