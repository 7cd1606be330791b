"""Compare the captured layers of modes with those of a reference.

  qgate layers compare 2-1                                   layer by layer with fp32
  qgate layers compare 2-1 --reference 0 --save-comparison comparisons/2-1.json
  qgate layers compare --all                                 all captured modes, one table

This reads what `qgate layers capture` wrote, and runs no model. fp32 is the reference that fits the
mode: plain, or rotated. MSE and correlation have a grade, excellent to poor, as in `pytest suites`.
Exit status: 0 if all was compared, 1 if a value is not finite or nothing was compared, 2 if files
are missing, damaged or do not belong together. To judge errors against limits, use `pytest suites`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qgate.cli._console import add_json, print_json
from qgate.errors import QgateError
from qgate.text.printing import print_line, print_text


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("mode", nargs="?", metavar="MODE", help="a captured mode")
    add("--all", action="store_true", help="compare every captured mode; writes comparisons/*.json")
    add("--reference", default="fp32", metavar="MODE", help="mode to compare with (default fp32)")
    add(
        "--output-dir",
        type=Path,
        default=Path("layer_outputs"),
        metavar="DIR",
        help="folder that `qgate layers capture` wrote (default: layer_outputs)",
    )
    add("--save-comparison", type=Path, metavar="F.json", help="the numbers of one mode as JSON")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.all == (args.mode is not None):
        raise QgateError("name one captured MODE, or give --all.")
    if args.all and args.save_comparison is not None:
        raise QgateError("--save-comparison is for one MODE; --all writes comparisons/*.json.")
    return _all(args) if args.all else _one(args)


def _one(args: argparse.Namespace) -> int:
    from qgate.comparing.layer_comparison import comparison, is_clean, save_json
    from qgate.comparing.texts import comparison_lines

    record = comparison(args.output_dir, args.mode, args.reference)
    if args.json:
        print_json(record)
    else:
        print_text("\n".join(comparison_lines(record)))
    if args.save_comparison is not None:
        save_json(args.save_comparison, record)
        if not args.json:
            print_text(f"\nSaved to {args.save_comparison}")
    return 0 if is_clean(record) else 1


def _all(args: argparse.Namespace) -> int:
    from qgate.baselines import safe_name
    from qgate.comparing.layer_comparison import comparable_modes, comparison, is_clean, save_json
    from qgate.comparing.texts import summary_lines

    records, refused = [], []
    for mode in comparable_modes(args.output_dir, args.reference):
        try:
            record = comparison(args.output_dir, mode, args.reference)
        except QgateError as error:
            refused.append(str(error))
            continue
        name = f"{safe_name(mode)}_vs_{safe_name(record['reference'])}.json"
        save_json(args.output_dir / "comparisons" / name, record)
        records.append(record)
    if args.json:
        print_json(records)
    elif records:
        print_text("\n".join(summary_lines(records)))
        print_text(f"\nSaved to {args.output_dir / 'comparisons'}")
    if refused:
        more = f" (and {len(refused) - 1} more modes)" if len(refused) > 1 else ""
        raise QgateError(f"{refused[0]}{more}")
    if not records:
        print_line(
            f"nothing was compared: only the reference {args.reference} is in "
            f"{str(args.output_dir)!r}.",
            file=sys.stderr,
        )
    return 0 if records and all(map(is_clean, records)) else 1
