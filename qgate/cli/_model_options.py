"""Options for a model, its inputs and its calibration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._loading import LateModule

if TYPE_CHECKING:
    from qgate import models, modes
    from qgate.modes import setups
else:
    models, modes = LateModule("qgate.models"), LateModule("qgate.modes")
    setups = LateModule("qgate.modes.setups")


def add_model_options(parser: argparse.ArgumentParser, model: str = "tiny-mamba") -> None:
    """Add `--model` and the other options that `setup_of` reads."""
    add = parser.add_argument_group("model").add_argument
    add("--model", default=model, metavar="NAME", help="tiny-mamba, tiny-llama, mamba:PATH, "
        "hf:PATH or package.module:build; hf:PATH=NAME and mamba:PATH=NAME are called NAME "
        f"(default {model})")  # fmt: skip
    add("--device", default="cpu", metavar="D", help="auto, cpu, cuda or cuda:N (default cpu)")
    add("--samples", type=int, default=10, metavar="N", help="texts evaluated (default 10)")
    add("--seqlen", type=int, default=512, metavar="N", help="tokens of each (default 512)")
    add("--seed", type=int, default=0, metavar="N", help="which texts are drawn (default 0)")
    add("--text", type=Path, metavar="FILE", help="text to run on (default: a built-in one)")
    add("--tokens", type=Path, metavar="FILE", help="token ids (.npy) in place of text")
    add = parser.add_argument_group("calibration").add_argument
    add("--calib-samples", type=int, default=64, metavar="N", help="calibration texts (64)")
    add("--calib-seqlen", type=int, default=512, metavar="N", help="tokens of each (512)")
    add("--calib-text", type=Path, metavar="FILE", help="calibration text (default: another "
        "built-in)")  # fmt: skip
    add("--percentile-alpha", type=float, default=0.9995, metavar="A", help="(default 0.9995)")
    add("--arithmetic", default="fp32", choices=("fp32", "fp16"), help="for weights and scales; "
        "fp16 gives the codes of Quamba-SE")  # fmt: skip
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="scales (.json), measured and written if missing",
    )


def setup_of(args: argparse.Namespace) -> setups.ModelSetup:
    """Return the model setup of the options, not loaded yet."""
    sampling = models.Sampling(
        samples=args.samples,
        seqlen=args.seqlen,
        calib_samples=args.calib_samples,
        calib_seqlen=args.calib_seqlen,
        seed=args.seed,
        text=args.text,
        calib_text=args.calib_text,
    )
    settings = modes.CalibrationSettings(args.percentile_alpha, args.arithmetic)
    return setups.ModelSetup(
        args.model, args.device, sampling, args.tokens, args.calibration, settings
    )
