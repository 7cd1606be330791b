"""The tensors around a weight: those of its layer, in child and parent."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.pairing import ParentMatch, match_by_name
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight

LAYER = re.compile(r"(?:.*?\.)?\d+\.")
EMBEDDINGS = ("embed", "wte")
"""Words in the names of the weights that write what all layers read."""


NEIGHBORS, SPANS = 16, 16
"""Rows of an embedding that are read together, and how often."""
UNIT_OFFSET = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next")
"""Kinds of models whose norms multiply by one more than their weight."""


@dataclass(frozen=True)
class Surroundings:
    """Child and parent around one weight."""

    child: Checkpoint
    parent: Checkpoint
    name: str
    recipe: Recipe

    def norms(self, length: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """List vectors of the weight's layer that differ from the parent's: name, own, parent's.

        Of networks whose norms multiply by one more than their weight, one is added.
        """
        own = _layer(self.name)
        offset = self._norm_offset()
        for name, source in _vectors(self.child, self.parent):
            if _layer(name) != own or self.child.entries[name].shape != (length,):
                continue
            vector, before = self.child.read(name).float(), self.parent.read(source).float()
            if vector.shape == before.shape and not bool((vector == before).all()):
                yield name, vector + offset, before + offset

    def _norm_offset(self) -> float:
        for checkpoint in (self.child, self.parent):
            if checkpoint.model_settings.get("model_type") in UNIT_OFFSET:
                return 1.0
        return 0.0

    def embedding(self, length: int) -> tuple[str, Tensor, Tensor] | None:
        """Return some rows of the embedding of so many columns that differs from the parent's."""
        for name, entry in self.child.entries.items():
            is_float = entry.dtype in ("F32", "BF16", "F16")
            if not (is_float and len(entry.shape) == 2 and entry.shape[1] == length):
                continue
            if not any(word in name for word in EMBEDDINGS) or name == self.name:
                continue
            match = match_by_name([name], self.parent.entries).get(name)
            if match is not None and self.parent.entries[match.names[0]].shape == entry.shape:
                own, source = _some_rows(self.child, name), _some_rows(self.parent, match.names[0])
                return None if bool((own == source).all()) else (name, own, source)
        return None


def _some_rows(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read rows from all over a matrix, some that are neighbors at a time."""
    rows, columns = checkpoint.entries[name].shape
    step = max(NEIGHBORS, -(-rows // SPANS))
    parts = [
        checkpoint.read_span(name, start * columns, min(start + NEIGHBORS, rows) * columns)
        for start in range(0, rows, step)
    ]
    return torch.cat(parts).reshape(-1, columns).float()


@dataclass(frozen=True)
class WeightPair:
    """A weight of the child, and the tensors of the parent that it was made from.

    match  None without a parent, and where none of its tensors fits
    """

    child: Checkpoint
    weight: StoredWeight
    parent: Checkpoint | None
    match: ParentMatch | None
    recipe: Recipe

    @property
    def surroundings(self) -> Surroundings | None:
        if self.parent is None:
            return None
        return Surroundings(self.child, self.parent, self.weight.name, self.recipe)


class FilesByLayer:
    """The files of a checkpoint that a weight is judged by: its layer's, and the embedding's."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._of_all: set[str] = set()
        self._by_layer: dict[str, set[str]] = {}
        for name, entry in checkpoint.entries.items():
            self._by_layer.setdefault(_layer(name), set()).add(entry.file)
            if any(word in name for word in EMBEDDINGS):
                self._of_all.add(entry.file)

    def around(self, name: str) -> set[str]:
        """Return the files around a weight."""
        return self._of_all | self._by_layer.get(_layer(name), set())


def _layer(name: str) -> str:
    """Return the part of a name up to the number of its layer, empty outside of layers."""
    match = LAYER.match(name)
    return match[0] if match else ""


@functools.lru_cache(maxsize=2)
def _vectors(child: Checkpoint, parent: Checkpoint) -> tuple[tuple[str, str], ...]:
    """List the vectors that both checkpoints have, with the parent's names."""
    names = [
        name
        for name, entry in child.entries.items()
        if len(entry.shape) == 1 and entry.dtype in ("F32", "BF16", "F16")
    ]
    matches = match_by_name(names, parent.entries)
    return tuple((name, match.names[0]) for name, match in matches.items())
