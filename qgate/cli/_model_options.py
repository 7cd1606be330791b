"""Options for a model, its inputs and its calibration."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._project import find_project_modules, model_here, project_here
from qgate.loading import LateModule
from qgate.project.options import OPTIONS

if TYPE_CHECKING:
    from qgate import models, modes
    from qgate.modes import setups
else:
    models, modes = LateModule("qgate.models"), LateModule("qgate.modes")
    setups = LateModule("qgate.modes.setups")


# Options of a run of gates that these commands take, too.
_MODEL = ("samples", "seqlen", "text", "tokens")
_CALIBRATION = ("calib-samples", "calib-seqlen", "calib-text", "percentile-alpha", "calibration")
# What options are where neither the command line nor the project's settings say it.
_DEFAULTS: dict[str, object] = {
    "model": "tiny-mamba",
    "device": "cpu",
    **{name: OPTIONS[name].default for name in (*_MODEL, *_CALIBRATION)},
}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and the other options that `setup_of` reads."""
    about = "defaults are those of qgate.toml, if it has any"
    add = parser.add_argument_group("model", about).add_argument
    add("--model", metavar="NAME", help="tiny-mamba, tiny-llama, tiny-moe, mamba:PATH, "
        "hf:PATH or package.module:build; hf:PATH=NAME and mamba:PATH=NAME are called NAME "
        "(default tiny-mamba)")  # fmt: skip
    add("--device", metavar="D", help="auto, cpu, cuda or cuda:N (default cpu)")
    add("--seed", type=int, default=0, metavar="N", help="seed that chooses the texts (default 0)")
    _add_shared(add, _MODEL)
    add = parser.add_argument_group("calibration").add_argument
    _add_shared(add, _CALIBRATION)
    add("--arithmetic", default="fp32", choices=("fp32", "fp16"), help="precision in which "
        "scales and codes are computed (default fp32; fp16 is that of Quamba-SE)")  # fmt: skip


def _add_shared(add: Callable[..., object], names: Sequence[str]) -> None:
    for name in names:
        add(f"--{name}", **OPTIONS[name].argparse)


def fill_from_project(args: argparse.Namespace) -> None:
    """Set options that were not typed to those of the project's settings, else to defaults."""
    find_project_modules()
    in_project = dict(project_here().options)
    in_project["model"] = model_here() if args.model is None else None
    for name, default in _DEFAULTS.items():
        attribute = name.replace("-", "_")
        values = getattr(args, attribute), in_project.get(name), default
        value = next((value for value in values if value is not None), None)
        is_path = value is not None and OPTIONS[name].kind is Path
        setattr(args, attribute, Path(str(value)) if is_path else value)


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
