"""Settings that have no option of their own: `--set NAME=VALUE`, else those of the project."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from qgate.cli._moved import add_moved
from qgate.cli._project import option_here
from qgate.errors import QgateError, unknown
from qgate.project.options import OPTIONS, SETTINGS

_SETTINGS = {**OPTIONS, **SETTINGS}


def add_settings(parser: argparse.ArgumentParser, *names: str, **earlier: str) -> None:
    """Add `--set` for settings of these names, and refuse the options they were earlier.

    `earlier` are options whose name was another one, as in `scale_bits="sweep-scale-bits"`.
    """
    typed = [name.replace("-", "_") for name in names]
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=partial(_setting, typed),
        metavar="NAME=VALUE",
        help=f"set what qgate.toml has, for this command alone: {', '.join(typed)}",
    )
    options = dict(zip(names, names, strict=True)) | {
        option.replace("_", "-"): name for option, name in earlier.items()
    }
    renamed = set(earlier.values())
    add_moved(
        parser,
        {
            f"--{option}": f"--set {name.replace('-', '_')}={_SETTINGS[name].metavar or 'VALUE'}, "
            f"or {name.replace('-', '_')} in qgate.toml"
            for option, name in options.items()
            if option not in renamed
        },
    )


def _setting(names: list[str], text: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in names:
        raise argparse.ArgumentTypeError(str(unknown("setting", name, names)))
    of = _SETTINGS[name.replace("_", "-")]
    if not equals:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write {name}=VALUE, where the value is {of.allowed('strict')}"
        )
    try:
        return name, of.read(value, "typed", f"{name} = ")
    except QgateError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def setting(args: argparse.Namespace, name: str) -> Any:
    """Return a setting: as typed, else that of the project, else its default."""
    typed = dict(args.set)
    if (key := name.replace("-", "_")) in typed:
        return typed[key]
    value = option_here(name)
    return _SETTINGS[name].default if value is None else value


def path_setting(args: argparse.Namespace, name: str) -> Path | None:
    """Return a setting that is a file."""
    value = setting(args, name)
    return None if value is None else Path(value)
