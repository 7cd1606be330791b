"""Options that say which records of a dump are meant, the same for every command."""

from __future__ import annotations

import argparse
from typing import Any

_NUMBERS = ("layer", "rank", "iteration", "sample", "micro_batch")
_TEXTS = {
    "layer_type": "linear, attention, ...",
    "operation": "forward or backward",
    "phase": "pre or post",
    "component": "linear, FA, ...",
    "module": "name of a module, as 'layers.3.*'",
    "name": "tensor of a site, as input or 'grad_*'",
    "quant_type": "label of the number format of the run, as mxfp8",
}


def add_selection(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("only these; repeatable, texts may be patterns").add_argument
    for name, about in _TEXTS.items():
        add(f"--{name.replace('_', '-')}", action="append", metavar="NAME", help=about)
    for name in _NUMBERS:
        add(f"--{name.replace('_', '-')}", action="append", type=int, metavar="N")


def selected_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that the options name, with their values."""
    return {name: getattr(args, name) for name in (*_TEXTS, *_NUMBERS) if getattr(args, name)}
