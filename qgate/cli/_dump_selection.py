"""Options that say which records of a dump are meant, the same for every command."""

from __future__ import annotations

import argparse
from typing import Any

_NUMBERS = ("layer", "rank", "iteration", "sample", "micro_batch")
_TEXTS = ("layer_type", "operation", "phase", "component", "module", "name", "quant_type")


def add_selection(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("only these; repeatable, texts may be patterns").add_argument
    for name in _TEXTS:
        add(f"--{name.replace('_', '-')}", action="append", metavar="NAME")
    for name in _NUMBERS:
        add(f"--{name.replace('_', '-')}", action="append", type=int, metavar="N")


def wanted_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given, with their values."""
    return {name: getattr(args, name) for name in (*_TEXTS, *_NUMBERS) if getattr(args, name)}
