"""Say which format and which scale suit tensors from files.

  qgate sweep act.pt                                       formats with scale and SQNR, best first
  qgate sweep act.pt --elem-format fp4_e2m1                what the scale of this format costs
  qgate sweep 'dumps/**/*.safetensors' --elem-format fp8_e4m3,fp4_e2m1 --no-plots
  qgate sweep w.safetensors:layer.0 --granularity block --output-dir sweeps
  qgate sweep act.pt --verbose                             every level and metric, as in the logs

A sweep quantizes a tensor with many scales, and reports the error at each. It reads .pt (weights
only), .safetensors, .npy and .npz files, also by URL: s3://bucket/w.safetensors:NAME is one tensor.
Results go to draw/scaling_analysis/NAME/, and draw/scaling_analysis/index.html shows them side by
side, with those of earlier commands. If a sweep is interrupted, the same command continues with the
files that were not finished.
Exit status: 0 if every tensor was swept and has no NaN or Inf, 1 if not, 2 if there is no file to
sweep.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, is_quiet, print_json
from qgate.cli._progress import progress
from qgate.cli._settings import setting
from qgate.cli._workers import add_workers, workers_from
from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.settings import add_options, typed_values
from qgate.storage.locations import check_writable, location_of
from qgate.sweeps.settings import SweepSettings
from qgate.text.printing import print_line

if TYPE_CHECKING:
    from qgate import dumps
    from qgate.dumps import tensor_files
    from qgate.sweeps import formats as sweep_formats
    from qgate.sweeps import running, shares, texts
else:
    tensor_files = LateModule("qgate.dumps.tensor_files")
    dumps, sweep_formats = LateModule("qgate.dumps"), LateModule("qgate.sweeps.formats")
    running = LateModule("qgate.sweeps.running")
    texts, shares = LateModule("qgate.sweeps.texts"), LateModule("qgate.sweeps.shares")

_SETTINGS = ("sweep-alignment", "sweep-scale-bits", "sweep-block", "sweep-axis")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "tensors",
        nargs="+",
        metavar="FILE",
        help="files or patterns of files; FILE:NAME for one tensor",
    )
    add(
        "--output-dir",
        metavar="DIR",
        help="write results to DIR/NAME; a folder or a URL (default draw/scaling_analysis)",
    )
    add_options(parser, SweepSettings)
    add("--no-plots", action="store_true", help="write texts and data only")
    add("--verbose", "-v", action="store_true", help="print every level and metric, too, and the "
        "reasons of the advice: what the logs have")  # fmt: skip
    add_json(parser)
    add_workers(parser, *_SETTINGS, **{name[6:].replace("-", "_"): name for name in _SETTINGS})


def run(args: argparse.Namespace) -> int:
    request, workers = _request(args), workers_from(args)
    specs = dumps.expand(args.tensors)
    _check_files(specs)
    root = location_of(args.output_dir or Path("draw") / "scaling_analysis")
    check_writable(root)
    say = (lambda *_lines: None) if args.json else _say
    width = shutil.get_terminal_size().columns
    run = running.SweepRun(request, root, say, verbose=args.verbose, width=width)
    with progress("files") as step:
        outcome = run.sweep(specs, workers, step)
    if args.json:
        print_json(
            {
                "passed": outcome.passed,
                "tensors": [{"tensor": name, "failed": why} for name, why in outcome.results],
                "sweeps": outcome.entries,
                "page": outcome.page and str(outcome.page),
            }
        )
    failures = [f"FAILED {name}: {reason}" for name, reason in outcome.results if reason]
    for line in filter(None, [*failures, outcome.trouble] if is_quiet() else ()):
        print_line(line, file=sys.stderr)
    return 0 if outcome.passed else 1


def _check_files(specs: Sequence[str]) -> None:
    """Refuse a sweep without any file of tensors; one that lacks some says so at its end."""
    problems = []
    for spec in specs:
        try:
            tensor_files.check_file(spec)
        except QgateError as error:
            problems.append(str(error))
        else:
            return
    none = f"none of the {len(specs)} inputs can be read: " if len(specs) > 1 else ""
    raise QgateError(f"{none}{problems[0]}")


def _request(args: argparse.Namespace) -> SweepSettings:
    only_blocks = args.granularity == "block"
    names = ",".join(args.formats or SweepSettings.formats).split(",")
    formats = [name for name in names if shares.is_trained(name)]
    for name in [name for name in names if name not in formats]:
        fmt = sweep_formats.sweepable(name, block=only_blocks)
        if sweep_formats.with_shares(fmt) is None:
            sweep_formats.mx_of(fmt) if only_blocks else sweep_formats.element_of(fmt)
        formats.append(fmt.name)
    high, low = args.max_exp, args.min_exp
    if high is not None and low is not None and high < low:
        raise QgateError(
            f"--max-scale-exp {high:g} is below --min-scale-exp {low:g}; a sweep runs from the "
            "larger exponent to the smaller one."
        )
    for end, value in (("max", high), ("min", low)) if only_blocks else ():
        if value is not None and not float(value).is_integer():
            raise QgateError(f"--{end}-scale-exp {value:g}: a block offset is a whole number.")
    in_file = {name[6:].replace("-", "_"): setting(args, name) for name in _SETTINGS}
    typed = {**typed_values(args, SweepSettings), "formats": tuple(dict.fromkeys(formats))}
    return SweepSettings(**in_file, **typed, plots=not args.no_plots, compares=args.formats is None)


def _say(*lines: str) -> None:
    """Print lines, in ASCII where the terminal knows no more."""
    for line in lines if texts.can_encode(sys.stdout) else texts.plain(lines):
        print_line(line)
