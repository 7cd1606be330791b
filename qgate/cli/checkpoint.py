"""Check a quantized checkpoint against its recipe and its parent, without running it.

  qgate checkpoint CHILD --parent PARENT     compare every tensor with the one it was made from
  qgate checkpoint CHILD                     check what the child alone can show
  qgate checkpoint CHILD --parent PARENT --jobs 8     in eight processes
  qgate checkpoint CHILD --parent PARENT --output-dir DIR     write a page and tables, too
  qgate checkpoint CHILD --recipe R.yaml     check against a recipe that the child does not declare
  qgate checkpoint CHILD --parent PARENT --layout L.toml     read a format of your own
  qgate checkpoint CHILD --calibration DUMP  hold static scales beside collected activations
  qgate checkpoint A B --same                compare two exports of one recipe

CHILD and PARENT are folders with .safetensors, .gguf, .onnx or .pt files, or single files (any part
of a GGUF split), at paths or URLs. The recipe is what the child's config.json, GGUF head or ONNX
graph declares. No code of a checkpoint is run. GGUF and ONNX need the extra `checkpoints`:
pip install 'pytest-qgate[checkpoints]'.
A rule of limits in qgate.toml that allows findings, and says why, holds here as in the gates.
Exit status: 0 if all is as declared, 1 if something is not, 2 if files cannot be read or are not a
pair.
"""

from __future__ import annotations

import argparse
import json
import sys

from qgate.cli._progress import progress
from qgate.cli._workers import add_limit, add_workers, workers_from
from qgate.records.plain_data import json_text
from qgate.storage.locations import local_folder, location_of
from qgate.text.printing import print_json, print_line, print_text


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("child", metavar="CHILD", help="the quantized checkpoint")
    add("other", metavar="B", nargs="?", help="with --same: the other export")
    add("--same", action="store_true", help="compare two exports of one recipe")
    add("--parent", metavar="PARENT", help="the checkpoint that CHILD was made from")
    add("--recipe", metavar="FILE", help="the intended recipe: a .yaml, .toml or .json file")
    add(
        "--layout",
        metavar="FILE",
        help="describes the weights of CHILD, if their names or packing are your own: a .toml or "
        ".py file",
    )
    add(
        "--calibration",
        metavar="DUMP",
        help="collected inputs of modules (qgate collect): static scales of CHILD are held beside "
        "what these need",
    )
    add("--json", action="store_true", help="print every weight and finding as JSON")
    add_limit(parser, 40, "findings")
    add(
        "--output-dir",
        metavar="DIR",
        help="write a page, checkpoint.json and tables there; a folder or a URL",
    )
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    from qgate.checkpoints import calibrated_scales, compare, files, texts
    from qgate.checkpoints.gate import allow_findings
    from qgate.cli._project import project_here
    from qgate.errors import QgateError
    from qgate.gate.policy import Policy
    from qgate.project.gate_kinds import named_after
    from qgate.project.settings import limits_title
    from qgate.storage.output import check_folder

    if args.same:
        return _compare_exports(args)
    if args.other is not None:
        raise QgateError(
            f"{args.other!r} is a second checkpoint: give --same to compare two exports, or name "
            "the one that the first was made from with --parent."
        )
    project = project_here()
    policy = Policy.from_table(project.limits, limits_title(project.source))
    folder = None if args.output_dir is None else location_of(args.output_dir)
    if folder is not None:
        check_folder(folder)
    workers, blocks = workers_from(args), files.DRAWN if folder else 0
    unfinished = None if folder is None else local_folder(folder)
    calibration = args.calibration and calibrated_scales.open_calibration(args.calibration)
    with progress("weights") as report:
        record = compare(
            args.child,
            args.parent,
            report,
            args.recipe,
            layout_file=args.layout,
            workers=workers,
            unfinished=unfinished,
            blocks=blocks,
            calibration=calibration,
        )
    named = project.options.get("checkpoint_name") or named_after(args.child)
    allow_findings(record, policy.for_model(str(named)))
    if args.json:
        print_json(json_text(record), end="")
    else:
        print_text("\n".join(texts.result_lines(record, args.limit)))
    if folder is not None:
        page = files.write_files(folder, record)
        print_line(f"page: {page}", file=sys.stderr if args.json else sys.stdout)
    return int(bool(record.findings))


def _compare_exports(args: argparse.Namespace) -> int:
    from qgate.checkpoints.agreement import agreement_lines, compare_exports
    from qgate.errors import QgateError

    if args.other is None or args.parent is not None or args.output_dir is not None:
        raise QgateError(
            "--same takes two exports, and no --parent and no --output-dir: qgate checkpoint A B "
            "--same."
        )
    with progress("tensors") as report:
        record = compare_exports(args.child, args.other, report, args.recipe, args.layout)
    if args.json:
        print_json(json.dumps(record.to_dict(), indent=1))
    else:
        for line in agreement_lines(record, args.limit):
            print_line(line)
    return int(bool(record.differences))
