"""Check all that is shipped beside weights: files, settings, and what is not quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qgate.checkpoints.model_settings import changed_settings
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.rows import WeightRows
from qgate.checkpoints.shipped.cards import card_findings
from qgate.checkpoints.shipped.declarations import declaration_findings
from qgate.checkpoints.shipped.files import ShippedFiles
from qgate.checkpoints.shipped.generation import generation_findings
from qgate.checkpoints.shipped.gguf_vocabulary import vocabulary_findings
from qgate.checkpoints.shipped.high_precision import (
    padded_sizes,
    precision_findings,
    stray_scales,
    untied_heads,
)
from qgate.checkpoints.shipped.shards import shard_findings
from qgate.checkpoints.shipped.tokenizers import tokenizer_findings
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.errors import QgateError


def shipped_findings(
    child: Checkpoint,
    parent: Checkpoint | None,
    weights: Sequence[StoredWeight],
    matches: Mapping[str, ParentMatch],
    recipe: Recipe,
) -> Iterator[CheckpointFinding]:
    """Find what beside the weights is neither the parent's nor as the recipe says."""
    own = ShippedFiles(child)
    yield from own.broken()
    yield from stray_scales(child, weights)
    yield from declaration_findings(child, weights, recipe)
    if not child.is_gguf:
        yield from card_findings(own, _formats(child, weights, recipe))
    if parent is None:
        return
    parents = ShippedFiles(parent)
    yield from changed_settings(child, parent)
    yield from untied_heads(child, parent)
    yield from precision_findings(child, parent, matches, weights, recipe)
    yield from padded_sizes(weights, parent, matches, recipe)
    if child.is_gguf:
        yield from vocabulary_findings(child, parents)
    if child.folder is None or parent.folder is None or child.has_graph or child.is_gguf:
        return  # A graph and GGUF have their own manner of files.
    yield from tokenizer_findings(own, parents)
    yield from generation_findings(own, parents)
    yield from shard_findings(child, own, parents)


def _formats(
    child: Checkpoint, weights: Sequence[StoredWeight], recipe: Recipe
) -> list[DeclaredFormat]:
    """Return the declared formats, or those of one weight of each packing."""
    if recipe.groups:
        return [group.format for group in recipe.groups]
    first = {weight.packing.name: weight for weight in weights if weight.packing is not None}
    formats = []
    for weight in first.values():
        try:
            rows = WeightRows(child, weight, recipe)
            formats.append(DeclaredFormat(rows.element, rows.tile))
        except QgateError:  # is a finding when the weight is judged
            continue
    return formats
