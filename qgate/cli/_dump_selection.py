"""The option `--where` that says which records of a dump are meant, the same for every command."""

from __future__ import annotations

import argparse
from typing import Any

from qgate.cli._moved import add_moved
from qgate.errors import unknown

_NUMBERS = ("layer", "rank", "iteration", "sample", "micro_batch")
_TEXTS = ("layer_type", "operation", "phase", "component", "module", "name", "quant_type")


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        type=_conditions,
        metavar="FIELD=VALUE,...",
        help="only tensors with these fields, as in layer=3,name=grad_*; a value may be a pattern, "
        f"and values of one field are alternatives; repeatable. Fields: "
        f"{', '.join((*_TEXTS, *_NUMBERS))}",
    )
    add_moved(
        parser,
        {
            f"--{name.replace('_', '-')}": f"--where {name}={'N' if name in _NUMBERS else 'NAME'}"
            for name in (*_TEXTS, *_NUMBERS)
        },
    )


def _conditions(text: str) -> list[tuple[str, str | int]]:
    """Read fields and values of `layer=3,name=grad_*`."""
    conditions: list[tuple[str, str | int]] = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not value:
            raise argparse.ArgumentTypeError(f"{part!r}: write FIELD=VALUE, as in layer=3")
        if name not in (*_TEXTS, *_NUMBERS):
            raise argparse.ArgumentTypeError(str(unknown("field", name, (*_TEXTS, *_NUMBERS))))
        if name not in _NUMBERS:
            conditions.append((name, value))
            continue
        if not value.strip().isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r}: {name} is a whole number from 0")
        conditions.append((name, int(value)))
    return conditions


def selected_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that `--where` names, with their values."""
    fields: dict[str, list[str | int]] = {}
    for name, value in (condition for group in args.where for condition in group):
        fields.setdefault(name, []).append(value)
    return fields
