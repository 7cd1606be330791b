"""The options, as `--qgate-NAME` and, where nobody else has it, `--NAME`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

from qgate.errors import QgateError
from qgate.plugin.hooks import listed
from qgate.plugin.settings import Kind, Settings, read_settings
from qgate.storage.places import names_folder, place_of, shown_below

if TYPE_CHECKING:
    from qgate.gate.updating import Which
    from qgate.pipeline.setups import ModelSetup
    from qgate.storage.places import Place


@dataclass(frozen=True)
class Option:
    """One option: how argparse reads it, its default, and what it is about.

    Options about the run are typed again by whoever repeats a failure; those of its subject are
    in the failure anyway, and those of the report or of an update move no number.
    """

    help: str
    default: Any = None
    about: Literal["run", "subject", "report", "update"] = "run"
    metavar: str | None = None
    kind: Kind = str

    @property
    def argparse(self) -> dict[str, Any]:
        """Arguments of `add_argument`: nothing given is None, for a project's file may say it."""
        if self.kind is bool:
            return {"help": self.help, "action": "store_true", "default": None}
        if isinstance(self.kind, tuple):
            return {"help": self.help, "choices": self.kind}
        reads: dict[Any, dict[str, Any]] = {
            list: {"action": "append"},
            int: {"type": int},
            float: {"type": float},
        }
        return {"help": self.help, "metavar": self.metavar, **reads.get(self.kind, {})}


OPTIONS = {
    "mode": Option(
        "modes: names, patterns such as '2-*', groups all, quant_only, fp_only, essential "
        "(default); separated by commas, repeatable",
        ["essential"],
        "subject",
        "MODES",
        list,
    ),
    "model": Option(
        "tiny-mamba (default), tiny-llama, mamba:PATH, hf:PATH or package.module:build; repeatable",
        ["tiny-mamba"],
        "subject",
        "NAME",
        list,
    ),
    "format": Option(
        "formats for the per-format suites, separated by commas; repeatable (default: all)",
        None,
        "subject",
        "NAMES",
        list,
    ),
    "layers": Option("all (default), first,last, or a regular expression", "all", metavar="LAYERS"),
    "dump": Option(
        "tensors collected from a run, for the suites on dumps; left out without it",
        None,
        "subject",
        "DIR",
        Path,
    ),
    "dump-name": Option(
        "what the accepted record of that dump is called (default: dump- and its model)",
        None,
        "subject",
        "NAME",
    ),
    "reference": Option(
        "what modes are compared with: fp32 (default) or any mode of the same basis",
        "fp32",
        metavar="MODE",
    ),
    "baselines": Option(
        "where baselines are, a folder or a URL such as s3://bucket/baselines (default: "
        "baselines/)",
        metavar="DIR",
        kind=Path,
    ),
    "device": Option("auto (default), cpu, cuda or cuda:N", "auto", metavar="D"),
    "samples": Option("texts evaluated (10)", 10, metavar="N", kind=int),
    "seqlen": Option("tokens of each (512)", 512, metavar="N", kind=int),
    "calib-samples": Option("calibrated on (64)", 64, metavar="N", kind=int),
    "calib-seqlen": Option("tokens of each (512)", 512, metavar="N", kind=int),
    "percentile-alpha": Option(
        "of calibrated percentiles (0.9995)", 0.9995, metavar="A", kind=float
    ),
    "calibration": Option("static scales to use, or to make and keep", metavar="FILE", kind=Path),
    "plots": Option(
        "what the report draws: failed gates, these and the worst that passed (worst, the "
        "default), all, or none, which also leaves nothing to draw later",
        "worst",
        "report",
        kind=("failed", "worst", "all", "none"),
    ),
    "no-report": Option(
        "leave no qgate-out/report.html; `qgate report` makes it of the records",
        False,
        "report",
        kind=bool,
    ),
    "shard": Option(
        "run the I-th of N parts of the tests, as in 2/8; `qgate results merge` puts the "
        "results together",
        metavar="I/N",
    ),
    "watch-underflow": Option(
        "list at the end where quantization lost values below the smallest normal number "
        "of the format (slows the run)",
        False,
        "report",
        kind=bool,
    ),
    "update-baselines": Option(
        "accept what is measured: write new errors and those out of tolerance",
        False,
        "update",
        kind=bool,
    ),
    "update-which": Option(
        "what an update writes: failed and new entries (default), new ones only, or all",
        "failed",
        "update",
        kind=("failed", "new", "all"),
    ),
    "update-dry-run": Option("say what an update would write", False, "update", kind=bool),
}
_SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
_SPELLED: pytest.StashKey[dict[str, str]] = pytest.StashKey()


def add_options(parser: pytest.Parser) -> None:
    about = "qgate: accuracy of quantization (each also as --qgate-…)"
    hooks = "\n".join(f"  {line}" for line in listed())
    group = parser.getgroup("qgate", f"{about}; hooks for conftest.py:\n{hooks}")
    for name, option in OPTIONS.items():
        group.addoption(f"--qgate-{name}", dest=_dest(name), **option.argparse)


def add_short_names(parser: pytest.Parser) -> None:
    group = parser.getgroup("qgate")
    for name, option in OPTIONS.items():
        with contextlib.suppress(ValueError, argparse.ArgumentError):
            short = option.argparse | {"help": f"short for --qgate-{name}"}
            group.addoption(f"--{name}", dest=_dest(name), **short)


def _dest(name: str) -> str:
    return f"qgate_{name.replace('-', '_')}"


def settings_of(config: pytest.Config) -> Settings:
    """What the project's file says, read once."""
    if _SETTINGS not in config.stash:
        kinds = {
            name.replace("-", "_"): option.kind
            for name, option in OPTIONS.items()
            if option.about != "update"
        }
        config.stash[_SETTINGS] = read_settings(config, kinds)
    return config.stash[_SETTINGS]


def is_given(config: pytest.Config, name: str) -> bool:
    """Whether the command line or the project's file says something of an option."""
    said = config.getoption(_dest(name)) is not None
    return said or name.replace("-", "_") in settings_of(config).options


def value(config: pytest.Config, name: str) -> Any:
    """An option: from the command line, else from the project's file, else its default."""
    given = config.getoption(_dest(name))
    if given is not None:
        return given
    return settings_of(config).options.get(name.replace("-", "_"), OPTIONS[name].default)


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
    return cast("Which", config.getoption("qgate_update_which") or OPTIONS["update-which"].default)


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
    options = [
        f"{spelled(config, name)} {shlex.quote(str(given))}"
        for name, option in OPTIONS.items()
        if option.about == "run" and (given := config.getoption(_dest(name))) is not None
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
        option = OPTIONS[name]
        first = option.kind[0] if isinstance(option.kind, tuple) else "1"
        given = [f"--{name}" if option.kind is bool else f"--{name}={first}"]
        try:
            ours = vars(config._parser.parse_known_args(given)).get(_dest(name))
        except (pytest.UsageError, SystemExit):
            ours = None
        config.stash[_SPELLED][name] = f"--{name}" if ours else f"--qgate-{name}"
    return config.stash[_SPELLED][name]
