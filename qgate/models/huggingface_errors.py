"""What to tell who gave a folder that transformers does not load."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from qgate.errors import QgateError
from qgate.models.mamba.checkpoint_files import open_shards

OWN_CALLABLE = "write a callable that returns a qgate.Model and give package.module:build"
Reader = Callable[..., tuple[nn.Module, dict[str, Any]]]


def refused(folder: Path, error: Exception, read: Reader | None = None) -> QgateError:
    """The error for a folder that transformers did not load; `read` reads it once more."""
    text, where = str(error), f"{str(folder)!r} cannot be loaded by transformers"
    if "trust_remote_code" in text:
        return wants_code(folder)
    if "mismatched_sizes" in text and read is not None:
        return _other_shapes(folder, read)
    if "model_type" in text or "model type" in text:
        return QgateError(
            f"{where}: {_model_type(folder)}. Install a newer transformers if there is one that "
            "does, use mamba:PATH for a state-spaces release, or " + OWN_CALLABLE + "."
        )
    if isinstance(error, ImportError):
        return QgateError(f"{where}: {cause(error)}. Install what is named there.")
    try:
        open_shards(folder)
    except QgateError as reason:
        return reason
    return QgateError(
        f"{where}: {cause(error)}. Compare its config.json and weights with where they are from."
    )


def wants_code(folder: Path) -> QgateError:
    """The error for a checkpoint that brings its own classes."""
    return QgateError(
        f"{str(folder)!r} wants Python code that comes with the checkpoint to run (auto_map). That "
        f"is refused; to gate it, {OWN_CALLABLE}. `qgate activations` lets it run with "
        "--trust-remote-code: only for code that you have read."
    )


def _other_shapes(folder: Path, read: Reader) -> QgateError:
    """The shapes that do not fit, from a second reading, because the first one keeps them quiet."""
    with contextlib.suppress(Exception):
        _, report = read(ignore_mismatched_sizes=True)
        name, stored, wanted = min(report["mismatched_keys"])
        return QgateError(
            f"tensor {name!r} in {str(folder)!r} has shape {tuple(stored)}, but config.json asks "
            f"for {tuple(wanted)}; {len(report['mismatched_keys'])} tensors differ. Copy the "
            "config.json that belongs to the weights."
        )
    return QgateError(f"{str(folder)!r} has weights of other shapes than its config.json asks for.")


def _model_type(folder: Path) -> str:
    with contextlib.suppress(ValueError, AttributeError, RecursionError, OSError):
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind is not None:
            return f"it does not know model_type {kind!r}"
    return "its config.json says no model_type"


def cause(error: Exception) -> str:
    """The first lines of what another library says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".:")[:240] or type(error).__name__
