"""Run a model in modes and keep the outputs of its layers in files.

  qgate layers capture --mode 2-1,2-4
  qgate layers capture --mode all --layers all --output-dir layer_outputs
  qgate layers capture --mode quant_only --model tiny-llama --samples 4 --seqlen 256

Each mode gets files mode_2-1_layer_0.npy … (float32, tokens by width) and mode_2-1_stats.json. The
fp32 reference is mode_fp32; modes that rotate activations have a rotated reference,
mode_fp32-rotated, and "reference" in the stats of a mode names the one it has.
`qgate layers compare` reads these files. The files of a mode appear once all of it is computed. One
folder holds one model with one set of weights, inputs and layers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._console import is_quiet, shows_progress
from qgate.cli._model_options import add_model_options, setup_of
from qgate.cli._project import option_here
from qgate.errors import QgateError
from qgate.text.printing import print_line

if TYPE_CHECKING:
    from qgate.comparing.layer_files import LayerCapture


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--mode",
        metavar="MODES",
        help="names, patterns or groups, separated by commas: fp_only, quant_only, essential, all "
        "(default: those of qgate.toml)",
    )
    add(
        "--output-dir",
        type=Path,
        default=Path("layer_outputs"),
        metavar="DIR",
        help="folder of the files (default: layer_outputs)",
    )
    add(
        "--layers",
        default="first,last",
        metavar="WHICH",
        help="first,last (default), all, numbers from 0 or a regular expression",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace captures of another model, other inputs or other layers",
    )
    add_model_options(parser, "calibration")


def run(args: argparse.Namespace) -> int:
    from qgate.gate.measuring.layer_captures import capture_modes

    mode = ",".join(option_here("mode") or ()) if args.mode is None else args.mode
    if not mode:
        raise QgateError("say in which modes, such as --mode 2-1; `qgate show modes` lists them.")
    dumps = capture_modes(
        setup_of(args),
        mode,
        args.output_dir,
        args.layers,
        overwrite=args.overwrite,
        say=_say,
        step=_step,
    )
    for dump in dumps:
        print_line(_line(dump, args.output_dir), flush=True)
    return 0


def _say(text: str) -> None:
    if not is_quiet():
        print_line(text, file=sys.stderr, flush=True)


def _step(done: int, total: int) -> None:
    """Write a line over the last one, on terminals only."""
    if shows_progress(sys.stderr):
        end = "\r\x1b[K" if done == total else ""
        print(f"\r  sample {done} of {total}{end}", end="", file=sys.stderr, flush=True)


def _line(dump: LayerCapture, folder: Path) -> str:
    from qgate.comparing.layer_files import stats_path

    first = next(iter(dump.layers.values()))
    tokens, width = first.shape
    bad = {name: layer.reason for name, layer in dump.layers.items() if layer.reason}
    odd = "".join(f"; {name}: {reason}" for name, reason in bad.items())
    stem = dump.of.reference
    partner = "" if stem is None else f"; its reference is mode_{stem}_layer_*.npy"
    return (
        f"{dump.of.mode} ({dump.of.basis}): {', '.join(dump.layers)}, {tokens} tokens x {width} "
        f"-> {stats_path(folder, dump.of.stem)}{partner}{odd}"
    )
