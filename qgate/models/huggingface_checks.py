"""Checks of a folder that transformers is to load, and their errors."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

import torch
from torch import nn

from qgate.errors import QgateError
from qgate.models.mamba.checkpoint_files import open_shards, read_json
from qgate.storage.foreign import read_foreign

OWN_CALLABLE = "write a callable that returns a qgate.Model and give package.module:build"


class LoadingReport(TypedDict):
    """The names of weights that transformers did not load as they are stored."""

    missing_keys: Collection[str]
    unexpected_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]


Reader = Callable[..., tuple[nn.Module, LoadingReport]]


def loading_error(folder: Path, error: Exception, read: Reader | None = None) -> QgateError:
    """Return the error for a folder that transformers did not load; `read` reads it once more."""
    text, where = str(error), f"{str(folder)!r} cannot be loaded by transformers"
    if "trust_remote_code" in text:
        return needs_code(folder)
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


def needs_code(folder: Path) -> QgateError:
    """Return the error for a checkpoint that brings its own classes."""
    return QgateError(
        f"{str(folder)!r} wants Python code that comes with the checkpoint to run (auto_map). That "
        f"is refused; to gate it, {OWN_CALLABLE}. `qgate activations` lets it run with "
        "--trust-remote-code: only for code that you have read."
    )


def check_one_part(kind: Any, config: Any, folder: Path) -> None:
    """Refuse a class whose decoder wants inputs of its own; an encoder alone is fed."""
    if not getattr(config, "is_encoder_decoder", False):
        return
    forward = getattr(kind, "forward", None)
    if forward is None or "decoder_input_ids" in inspect.signature(forward).parameters:
        raise QgateError(
            f"the model in {str(folder)!r} ({config.model_type}) has an encoder and a decoder, and "
            "one input is not enough for it; save its encoder alone (get_encoder()), or to gate "
            f"the whole, {OWN_CALLABLE}."
        )


def _other_shapes(folder: Path, read: Reader) -> QgateError:
    """Name the shapes that differ, from a second reading: the first one does not report them."""
    with contextlib.suppress(Exception):
        _, report = read(ignore_mismatched_sizes=True)
        name, stored, expected = min(report["mismatched_keys"])
        return QgateError(
            f"tensor {name!r} in {str(folder)!r} has shape {tuple(stored)}, but config.json asks "
            f"for {tuple(expected)}; {len(report['mismatched_keys'])} tensors differ. Copy the "
            "config.json that belongs to the weights."
        )
    return QgateError(f"{str(folder)!r} has weights of other shapes than its config.json asks for.")


def _model_type(folder: Path) -> str:
    kind = read_settings(folder / "config.json").get("model_type")
    if kind is None:
        return "its config.json says no model_type"
    return f"it does not know model_type {kind!r}"


def read_settings(path: Path) -> dict[str, object]:
    """Read a mapping in JSON; empty where there is none."""
    try:
        settings = json.loads(read_foreign(path, "checkpoints"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def cause(error: Exception) -> str:
    """Return the first lines of an error of another library."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".:")[:240] or type(error).__name__


_LAYERS = re.compile(r"num_.*layers|n_layers?|num_.*blocks|depth")
# A model has more parameters than are stored where it shares some, or leaves some out.
_TIMES, _MORE = 4, 1 << 22


def check_shards(folder: Path) -> None:
    """Refuse an index that names files outside of the folder: transformers would read them."""
    for index in sorted(folder.glob("*.index.json")):
        named = read_json(index).get("weight_map")
        for file in sorted(
            {str(name) for name in named.values()} if isinstance(named, dict) else ()
        ):
            path = PurePosixPath(file.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or "\0" in file:
                raise QgateError(
                    f"{str(index)!r} names the shard {file!r}, which is not in the folder: it is "
                    "refused. Copy the shards next to it."
                )


def check_sizes(kind: Any, config: Any, folder: Path) -> None:
    """Refuse a config that describes other sizes than the weights have, where both are known."""
    try:
        shapes = [shape for shard in open_shards(folder) for shape in shard.shapes.values()]
    except QgateError:
        return
    most = max(_layers(config.to_dict()), default=0)
    if most > max(1000, len(shapes)):
        raise QgateError(
            f"the config.json in {str(folder)!r} says {most} layers, but its weights are "
            f"{len(shapes)} tensors in all. Copy the config.json that belongs to them."
        )
    stored = sum(map(math.prod, shapes))
    described = _parameters(kind, config)
    if described > _TIMES * stored + _MORE:
        raise QgateError(
            f"the config.json in {str(folder)!r} describes {described} parameters, and the weights "
            f"have {stored}. Copy config.json and weights of one and the same model."
        )


def _layers(settings: Mapping[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _layers(value)
        elif type(value) is int and _LAYERS.fullmatch(str(name)):
            yield value


def _parameters(kind: Any, config: Any) -> int:
    """Count the parameters of the network without memory for them; 0 if it cannot be built so."""
    make = getattr(kind, "_from_config", None) or getattr(kind, "from_config", None)
    with contextlib.suppress(Exception), torch.device("meta"):
        return sum(parameter.numel() for parameter in make(config).parameters())  # type: ignore[misc]
    return 0
