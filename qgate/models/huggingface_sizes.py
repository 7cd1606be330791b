"""Whether a config describes a model of about the size of its weights, before any of it is made."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from qgate.errors import QgateError
from qgate.models.mamba.checkpoint_config import read_json
from qgate.models.mamba.checkpoint_files import open_shards

_LAYERS = re.compile(r"num_.*layers|n_layers?|num_.*blocks|depth")
# A model has more parameters than are stored where it shares some, or leaves some out.
_TIMES, _MORE = 4, 1 << 22


def check_shards(folder: Path) -> None:
    """Refuse an index that names files outside of the folder: transformers would read them."""
    for index in sorted(folder.glob("*.index.json")):
        named = read_json(index).get("weight_map")
        for file in sorted(
            {str(each) for each in named.values()} if isinstance(named, dict) else ()
        ):
            place = PurePosixPath(file.replace("\\", "/"))
            if place.is_absolute() or ".." in place.parts or "\0" in file:
                raise QgateError(
                    f"{str(index)!r} names the shard {file!r}, which is not in the folder: it is "
                    "refused. Copy the shards next to it."
                )


def check_sizes(kind: Any, config: Any, folder: Path) -> None:
    """Refuse a config of other sizes than the weights have; what cannot be told is not judged."""
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
    asked = _parameters(kind, config)
    if asked > _TIMES * stored + _MORE:
        raise QgateError(
            f"the config.json in {str(folder)!r} describes {asked} parameters, and the weights "
            f"have {stored}. Copy config.json and weights of one and the same model."
        )


def _layers(told: Mapping[str, Any]) -> Iterator[int]:
    for name, value in told.items():
        if isinstance(value, Mapping):
            yield from _layers(value)
        elif type(value) is int and _LAYERS.fullmatch(str(name)):
            yield value


def _parameters(kind: Any, config: Any) -> int:
    """Of the network without memory for its weights; 0 where it cannot be made so."""
    make = getattr(kind, "_from_config", None) or getattr(kind, "from_config", None)
    with contextlib.suppress(Exception), torch.device("meta"):
        return sum(each.numel() for each in make(config).parameters())  # type: ignore[misc]
    return 0
