"""Options for a model, its inputs and its calibration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._loading import LateModule
from qgate.cli._project import find_project_modules, model_here, project_here

if TYPE_CHECKING:
    from qgate import models, modes
    from qgate.modes import setups
else:
    models, modes = LateModule("qgate.models"), LateModule("qgate.modes")
    setups = LateModule("qgate.modes.setups")


# What these options are where neither the command line nor the project's settings say it.
_DEFAULTS: dict[str, str | int | float | None] = {
    "model": "tiny-mamba",
    "device": "cpu",
    "samples": 10,
    "seqlen": 512,
    "text": None,
    "tokens": None,
    "calib_samples": 64,
    "calib_seqlen": 512,
    "calib_text": None,
    "percentile_alpha": 0.9995,
    "calibration": None,
}
_PATHS = ("text", "tokens", "calib_text", "calibration")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and the other options that `setup_of` reads."""
    about = "defaults are those of qgate.toml, if it has any"
    add = parser.add_argument_group("model", about).add_argument
    add("--model", metavar="NAME", help="tiny-mamba, tiny-llama, mamba:PATH, "
        "hf:PATH or package.module:build; hf:PATH=NAME and mamba:PATH=NAME are called NAME "
        "(default tiny-mamba)")  # fmt: skip
    add("--device", metavar="D", help="auto, cpu, cuda or cuda:N (default cpu)")
    add("--samples", type=int, metavar="N", help="number of texts to run (default 10)")
    add("--seqlen", type=int, metavar="N", help="tokens of each text (default 512)")
    add("--seed", type=int, default=0, metavar="N", help="seed that chooses the texts (default 0)")
    add("--text", type=Path, metavar="FILE", help="text to run on (default: a built-in one)")
    add("--tokens", type=Path, metavar="FILE", help="token ids (.npy) instead of text")
    add = parser.add_argument_group("calibration").add_argument
    add("--calib-samples", type=int, metavar="N", help="number of calibration texts (default 64)")
    add("--calib-seqlen", type=int, metavar="N", help="tokens of each (default 512)")
    add("--calib-text", type=Path, metavar="FILE", help="calibration text (default: another "
        "built-in)")  # fmt: skip
    add(
        "--percentile-alpha",
        type=float,
        metavar="A",
        help="percentile of magnitudes that scales are made from, as a share (default 0.9995)",
    )
    add("--arithmetic", default="fp32", choices=("fp32", "fp16"), help="precision in which "
        "scales and codes are computed (default fp32; fp16 is that of Quamba-SE)")  # fmt: skip
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="file of scales (.json); measured and written if it is missing",
    )


def fill_from_project(args: argparse.Namespace) -> None:
    """Set options that were not typed to those of the project's settings, else to defaults."""
    find_project_modules()
    in_project = dict(project_here().options)
    if args.model is None:
        in_project["model"] = model_here()
    for name, default in _DEFAULTS.items():
        if getattr(args, name) is None:
            value = in_project.get(name.replace("_", "-"))
            value = default if value is None else value
            setattr(args, name, Path(str(value)) if value and name in _PATHS else value)


def setup_of(args: argparse.Namespace) -> setups.ModelSetup:
    """Return the model setup of the options and the project's settings, not loaded yet."""
    fill_from_project(args)
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
