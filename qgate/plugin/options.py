"""The options, as `--qgate-NAME` and, where nobody else has it, `--NAME`."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from qgate.pipeline.setups import ModelSetup

_OPTIONS: dict[str, dict[str, Any]] = {
    "mode": {
        "metavar": "MODES",
        "action": "append",
        "help": "modes: names, patterns such as '2-*', groups all, quant_only, fp_only, essential "
        "(default); separated by commas, repeatable",
    },
    "model": {
        "metavar": "NAME",
        "action": "append",
        "help": "tiny-mamba (default), tiny-llama, mamba:PATH, hf:PATH or package.module:build; "
        "repeatable",
    },
    "format": {
        "metavar": "NAMES",
        "action": "append",
        "help": "formats for the per-format suites, separated by commas; repeatable (default: all)",
    },
    "layers": {
        "metavar": "LAYERS",
        "default": "all",
        "help": "all (default), first,last, or a regular expression",
    },
    "reference": {
        "metavar": "MODE",
        "default": "fp32",
        "help": "what modes are compared with: fp32 (default) or any mode of the same basis",
    },
    "baselines": {"metavar": "DIR", "help": "where baselines are (default: baselines/)"},
    "device": {"metavar": "D", "default": "auto", "help": "auto (default), cpu, cuda or cuda:N"},
    "samples": {"metavar": "N", "type": int, "default": 10, "help": "texts evaluated (10)"},
    "seqlen": {"metavar": "N", "type": int, "default": 512, "help": "tokens of each (512)"},
    "calib-samples": {"metavar": "N", "type": int, "default": 64, "help": "calibrated on (64)"},
    "calib-seqlen": {"metavar": "N", "type": int, "default": 512, "help": "tokens of each (512)"},
    "percentile-alpha": {
        "metavar": "A",
        "type": float,
        "default": 0.9995,
        "help": "of calibrated percentiles (0.9995)",
    },
    "calibration": {"metavar": "FILE", "help": "static scales to use, or to make and keep"},
    "update-baselines": {
        "action": "store_true",
        "help": "accept what is measured: write new errors and those out of tolerance",
    },
    "update-which": {
        "choices": ("failed", "new", "all"),
        "default": "failed",
        "help": "what an update writes: failed and new entries (default), new ones only, or all",
    },
    "update-dry-run": {"action": "store_true", "help": "say what an update would write"},
}


def add_options(parser: pytest.Parser) -> None:
    about = "qgate: accuracy of quantization (each also as --qgate-…)"
    group = parser.getgroup("qgate", about)
    for name, kwargs in _OPTIONS.items():
        group.addoption(f"--qgate-{name}", dest=_dest(name), **kwargs)


def add_short_names(parser: pytest.Parser) -> None:
    group = parser.getgroup("qgate")
    for name, kwargs in _OPTIONS.items():
        with contextlib.suppress(ValueError, argparse.ArgumentError):
            short = kwargs | {"help": f"short for --qgate-{name}"}
            group.addoption(f"--{name}", dest=_dest(name), **short)


def _dest(name: str) -> str:
    return f"qgate_{name.replace('-', '_')}"


def update_choice(config: pytest.Config) -> str | None:
    """Which entries an update writes; None where baselines stay as they are."""
    if not (config.getoption("qgate_update_baselines") or config.getoption("qgate_update_dry_run")):
        return None
    dry = config.getoption("qgate_update_dry_run")
    if os.environ.get("CI") and os.environ.get("QGATE_ALLOW_CI_UPDATE") != "1" and not dry:
        raise pytest.UsageError(
            "--update-baselines is refused where CI is set: what CI accepts nobody has looked at. "
            "Update and commit on your machine, or set QGATE_ALLOW_CI_UPDATE=1 for a job that is "
            "there to refresh baselines."
        )
    return str(config.getoption("qgate_update_which"))


def models_of(config: pytest.Config) -> list[str]:
    """The models asked for, each once."""
    return list(dict.fromkeys(config.getoption("qgate_model") or ["tiny-mamba"]))


def setup_of(config: pytest.Config, model: str) -> ModelSetup:
    """The options as the setup of one model."""
    from qgate.models import Sampling
    from qgate.modes import CalibrationSettings
    from qgate.pipeline.setups import ModelSetup

    get = config.getoption
    sampling = Sampling(
        samples=get("qgate_samples"),
        seqlen=get("qgate_seqlen"),
        calib_samples=get("qgate_calib_samples"),
        calib_seqlen=get("qgate_calib_seqlen"),
    )
    calibration = get("qgate_calibration")
    return ModelSetup(
        model,
        get("qgate_device"),
        sampling,
        calibration=None if calibration is None else Path(calibration),
        settings=CalibrationSettings(get("qgate_percentile_alpha")),
    )


def baselines_of(config: pytest.Config) -> Path:
    """The folder of the baselines."""
    given = config.getoption("qgate_baselines")
    return config.rootpath / "baselines" if given is None else Path(given)
