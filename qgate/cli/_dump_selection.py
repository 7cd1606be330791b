"""Options that say which records of a dump are meant, the same for every command."""

from __future__ import annotations

import argparse
from typing import Any

_NUMBERS = {
    "layer": "number of a layer, from 0",
    "rank": "number of a rank, from 0",
    "iteration": "number of a training iteration",
    "sample": "number of a sample",
    "micro_batch": "number of a micro-batch",
}
_TEXTS = {
    "layer_type": "type of a layer: linear, attention, ...",
    "operation": "pass: forward or backward",
    "phase": "before or after the layer: pre or post",
    "component": "part as megatron-tensor-saver names it: linear, FA, ...",
    "module": "name of a module, such as 'layers.3.*'",
    "name": "name of a tensor, such as input or 'grad_*'",
    "quant_type": "label of the number format of the run, such as mxfp8",
}


def add_selection(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "select tensors (repeatable; names may be patterns)"
    ).add_argument
    for name, about in _TEXTS.items():
        add(f"--{name.replace('_', '-')}", action="append", metavar="NAME", help=about)
    for name, about in _NUMBERS.items():
        add(f"--{name.replace('_', '-')}", action="append", type=int, metavar="N", help=about)


def selected_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that the options name, with their values."""
    return {name: getattr(args, name) for name in (*_TEXTS, *_NUMBERS) if getattr(args, name)}
