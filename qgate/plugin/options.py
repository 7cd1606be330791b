"""The options, as `--qgate-NAME` and, where nobody else has it, `--NAME`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from qgate.errors import QgateError
from qgate.plugin.hooks import listed
from qgate.plugin.settings import Kind, Settings, read_settings
from qgate.storage.places import names_folder, place_of, shown_below

if TYPE_CHECKING:
    from qgate.gate.updating import Which
    from qgate.pipeline.setups import ModelSetup
    from qgate.storage.places import Place

_LIST = {"action": "append"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "mode": {
        "metavar": "MODES",
        **_LIST,
        "help": "modes: names, patterns such as '2-*', groups all, quant_only, fp_only, essential "
        "(default); separated by commas, repeatable",
    },
    "model": {
        "metavar": "NAME",
        **_LIST,
        "help": "tiny-mamba (default), tiny-llama, mamba:PATH, hf:PATH or package.module:build; "
        "repeatable",
    },
    "format": {
        "metavar": "NAMES",
        **_LIST,
        "help": "formats for the per-format suites, separated by commas; repeatable (default: all)",
    },
    "layers": {"metavar": "LAYERS", "help": "all (default), first,last, or a regular expression"},
    "dump": {
        "metavar": "DIR",
        "help": "tensors collected from a run, for the suites on dumps; left out without it",
    },
    "dump-name": {
        "metavar": "NAME",
        "help": "what the accepted record of that dump is called (default: dump- and its model)",
    },
    "reference": {
        "metavar": "MODE",
        "help": "what modes are compared with: fp32 (default) or any mode of the same basis",
    },
    "baselines": {
        "metavar": "DIR",
        "help": "where baselines are, a folder or a URL such as s3://bucket/baselines (default: "
        "baselines/)",
    },
    "device": {"metavar": "D", "help": "auto (default), cpu, cuda or cuda:N"},
    "samples": {"metavar": "N", "type": int, "help": "texts evaluated (10)"},
    "seqlen": {"metavar": "N", "type": int, "help": "tokens of each (512)"},
    "calib-samples": {"metavar": "N", "type": int, "help": "calibrated on (64)"},
    "calib-seqlen": {"metavar": "N", "type": int, "help": "tokens of each (512)"},
    "percentile-alpha": {
        "metavar": "A",
        "type": float,
        "help": "of calibrated percentiles (0.9995)",
    },
    "calibration": {"metavar": "FILE", "help": "static scales to use, or to make and keep"},
    "plots": {
        "choices": ("failed", "worst", "all", "none"),
        "help": "what the report draws: failed gates, these and the worst that passed (worst, the "
        "default), all, or none, which also leaves nothing to draw later",
    },
    "no-report": {
        "action": "store_true",
        "default": None,
        "help": "leave no qgate-out/report.html; `qgate report` makes it of the records",
    },
    "shard": {
        "metavar": "I/N",
        "help": "run the I-th of N parts of the tests, as in 2/8; `qgate results merge` puts the "
        "results together",
    },
    "watch-underflow": {
        "action": "store_true",
        "default": None,
        "help": "list at the end where quantization lost values below the smallest normal number "
        "of the format (slows the run)",
    },
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
DEFAULTS: dict[str, Any] = {
    "mode": ["essential"], "model": ["tiny-mamba"], "format": None, "layers": "all",
    "dump": None, "dump-name": None,
    "reference": "fp32", "baselines": None, "device": "auto", "samples": 10, "seqlen": 512,
    "calib-samples": 64, "calib-seqlen": 512, "percentile-alpha": 0.9995, "calibration": None,
    "shard": None,
    "plots": "worst", "no-report": False, "watch-underflow": False,
}  # fmt: skip
_PATHS = ("baselines", "calibration", "dump")
# What a failure says by itself, of the subject it is about.
_OF_SUBJECTS = ("mode", "model", "format", "dump", "dump-name")
# What moves no number: nothing to type again.
_OF_REPORTS = ("plots", "no-report", "watch-underflow")
_SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
_SPELLED: pytest.StashKey[dict[str, str]] = pytest.StashKey()


def add_options(parser: pytest.Parser) -> None:
    about = "qgate: accuracy of quantization (each also as --qgate-…)"
    hooks = "\n".join(f"  {line}" for line in listed())
    group = parser.getgroup("qgate", f"{about}; hooks for conftest.py:\n{hooks}")
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


def settings_of(config: pytest.Config) -> Settings:
    """What the project's file says, read once."""
    if _SETTINGS not in config.stash:
        kinds = {
            name.replace("-", "_"): _kind(name, kwargs)
            for name, kwargs in _OPTIONS.items()
            if name in DEFAULTS
        }
        config.stash[_SETTINGS] = read_settings(config, kinds)
    return config.stash[_SETTINGS]


def _kind(name: str, kwargs: dict[str, Any]) -> Kind:
    """What an option is in a project's file."""
    if kwargs.get("action") == "append":
        return list
    if kwargs.get("action") == "store_true":
        return bool
    return Path if name in _PATHS else kwargs.get("choices") or kwargs.get("type", str)


def is_given(config: pytest.Config, name: str) -> bool:
    """Whether the command line or the project's file says something of an option."""
    said = config.getoption(_dest(name)) is not None
    return said or name.replace("-", "_") in settings_of(config).options


def value(config: pytest.Config, name: str) -> Any:
    """An option: from the command line, else from the project's file, else its default."""
    given = config.getoption(_dest(name))
    if given is not None:
        return given
    return settings_of(config).options.get(name.replace("-", "_"), DEFAULTS[name])


def update_choice(config: pytest.Config) -> Which | None:
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
    return cast("Which", config.getoption("qgate_update_which"))


def models_of(config: pytest.Config) -> list[str]:
    """The models asked for, each once."""
    return list(dict.fromkeys(value(config, "model")))


def setup_of(config: pytest.Config, model: str) -> ModelSetup:
    """The options as the setup of one model."""
    from qgate.models import Sampling
    from qgate.modes import CalibrationSettings
    from qgate.pipeline.setups import ModelSetup

    builders = {k: v for found in config.hook.pytest_qgate_models(config=config) for k, v in found.items()}  # fmt: skip  # noqa: E501
    modes = [mode for found in config.hook.pytest_qgate_modes(config=config) for mode in found]
    _check_new([mode.name for mode in modes])
    names = ("samples", "seqlen", "calib-samples", "calib-seqlen")
    calibration = value(config, "calibration")
    return ModelSetup(
        model,
        value(config, "device"),
        Sampling(**{name.replace("-", "_"): value(config, name) for name in names}),
        calibration=None if calibration is None else Path(calibration),
        settings=CalibrationSettings(value(config, "percentile-alpha")),
        build=builders.get(model),
        modes={mode.name: mode for mode in modes},
    )


def _check_new(names: list[str]) -> None:
    """Refuse modes of a conftest that would stand in for others without a word."""
    from qgate import modes

    for name in names:
        if names.count(name) > 1 or name in (*modes.names(), *modes.GROUPS):
            raise QgateError(
                f"pytest_qgate_modes brings mode {name!r}, and there is another one of that name: "
                "give it a name of its own."
            )


def home_of(config: pytest.Config) -> Path:
    """The folder of the project: baselines and results are in it."""
    return settings_of(config).home


def baselines_of(config: pytest.Config) -> Place:
    """The folder of the baselines."""
    given = value(config, "baselines")
    return home_of(config) / "baselines" if given is None else place_of(given)


def shown_baselines(config: pytest.Config) -> str:
    """That folder as people are shown it: below the project without the way there."""
    home = home_of(config)
    folder = str(value(config, "baselines") or home / "baselines")
    shown = shown_below(home, folder)
    return shown if names_folder(folder) else f"{shown} (none yet)"


def command_of(config: pytest.Config, paths: Sequence[str] = ()) -> str:
    """How to run the same tests again, or those of some files, but for what is measured."""
    again = [name for name in DEFAULTS if name not in (*_OF_SUBJECTS, *_OF_REPORTS)]
    said = {name: config.getoption(_dest(name)) for name in again}
    options = [
        f"{spelled(config, name)} {shlex.quote(str(v))}"
        for name, v in said.items()
        if v is not None
    ]
    asked = paths or [arg.partition("::")[0] for arg in config.args]
    near = [shlex.quote(_near(config, path)) for path in asked]
    return " ".join(["pytest", *dict.fromkeys(near), *options])


def _near(config: pytest.Config, path: str) -> str:
    """A path as people would type it where the run was started."""
    here = config.invocation_params.dir
    whole = here / path
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else path


def spelled(config: pytest.Config, name: str) -> str:
    """How an option is written in this project: by its short name, unless another one has that."""
    if name not in config.stash.setdefault(_SPELLED, {}):
        whole = {"action": "store_true"}.items() <= _OPTIONS[name].items()
        given = [f"--{name}"] if whole else [f"--{name}={_OPTIONS[name].get('choices', '1')[0]}"]
        try:
            ours = vars(config._parser.parse_known_args(given)).get(_dest(name))
        except (pytest.UsageError, SystemExit):
            ours = None
        config.stash[_SPELLED][name] = f"--{name}" if ours else f"--qgate-{name}"
    return config.stash[_SPELLED][name]
