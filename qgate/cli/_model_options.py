"""Options for a model, its inputs and its calibration."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._project import find_project_modules, model_here, project_here
from qgate.cli._settings import add_settings, path_setting, setting
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
_CALIBRATION = (
    "calib-samples", "calib-seqlen", "calib-text", "percentile-alpha", "calib-arithmetic",
)  # fmt: skip
# What options are where neither the command line nor the project's settings say it.
_DEFAULTS: dict[str, object] = {
    "model": "tiny-mamba",
    "device": "cpu",
    **{name: OPTIONS[name].default for name in _MODEL},
}


def add_model_options(parser: argparse.ArgumentParser, *settings: str) -> None:
    """Add `--model`, the other options that `setup_of` reads, and `--set`."""
    about = "defaults are those of qgate.toml, if it has any"
    add: Callable[..., object] = parser.add_argument_group("model", about).add_argument
    add("--model", metavar="NAME", help="tiny-mamba, tiny-llama, tiny-moe, mamba:PATH, "
        "hf:PATH or package.module:build; hf:PATH=NAME and mamba:PATH=NAME are called NAME "
        "(default tiny-mamba)")  # fmt: skip
    add("--device", metavar="D", help="auto, cpu, cuda or cuda:N (default cpu)")
    add("--seed", type=int, default=0, metavar="N", help="seed that chooses the texts (default 0)")
    for name in _MODEL:
        add(f"--{name}", **OPTIONS[name].argparse)
    add_settings(parser, *_CALIBRATION, *settings, arithmetic="calib-arithmetic")


def fill_from_project(args: argparse.Namespace) -> None:
    """Set options that were not typed to those of the project's settings, else to defaults."""
    find_project_modules()
    in_project = dict(project_here().options)
    in_project["model"] = model_here() if args.model is None else None
    for name, default in _DEFAULTS.items():
        attribute = name.replace("-", "_")
        values = getattr(args, attribute), in_project.get(name), default
        value = next((value for value in values if value is not None), None)
        is_path = value is not None and OPTIONS[name].is_path
        setattr(args, attribute, Path(str(value)) if is_path else value)


def setup_of(args: argparse.Namespace, calibration: Path | None = None) -> setups.ModelSetup:
    """Return the model setup of the options and the project's settings, not loaded yet.

    `calibration` is the file of its static scales, by default that of the settings.
    """
    fill_from_project(args)
    sampling = models.Sampling(
        samples=args.samples,
        seqlen=args.seqlen,
        calib_samples=setting(args, "calib-samples"),
        calib_seqlen=setting(args, "calib-seqlen"),
        seed=args.seed,
        text=args.text,
        calib_text=path_setting(args, "calib-text"),
    )
    file = calibration or path_setting(args, "calibration")
    settings = modes.CalibrationSettings(
        setting(args, "percentile-alpha"), setting(args, "calib-arithmetic")
    )
    return setups.ModelSetup(args.model, args.device, sampling, args.tokens, file, settings)
