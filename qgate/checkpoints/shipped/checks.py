"""Check all that is shipped beside weights: files, settings, and what is not quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qgate.checkpoints.model_settings import changed_settings
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.rows import WeightRows
from qgate.checkpoints.shipped.declarations import declaration_findings
from qgate.checkpoints.shipped.files import ShippedFiles, differs, is_missing
from qgate.checkpoints.shipped.gguf_vocabulary import vocabulary_findings
from qgate.checkpoints.shipped.high_precision import (
    padded_sizes,
    precision_findings,
    stray_scales,
    untied_heads,
)
from qgate.checkpoints.shipped.model_card import card_findings
from qgate.checkpoints.shipped.shards import shard_findings
from qgate.checkpoints.shipped.tokenizers import tokenizer_findings
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.errors import QgateError

GENERATION, CONFIG = "generation_config.json", "config.json"
DEFAULTS: Mapping[str, object] = {
    "do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None,
    "typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "num_beams": 1,
    "max_length": 20, "min_length": 0, "early_stopping": False, "use_cache": True,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_return_sequences": 1,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "diversity_penalty": 0.0,
    "remove_invalid_values": False,
}  # fmt: skip
"""Values of settings that some versions write and others leave out."""
IDS = ("bos_token_id", "eos_token_id", "decoder_start_token_id")


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


def generation_findings(child: ShippedFiles, parent: ShippedFiles) -> Iterator[CheckpointFinding]:
    """Find defaults of generation and ids of tokens that are not the parent's."""
    own, parents = child.settings(GENERATION), parent.settings(GENERATION)
    if parent.has(GENERATION) and not child.has(GENERATION):
        yield is_missing(GENERATION, "copy it; without it engines sample and stop in another way")
    elif parent.has(GENERATION):
        for key in dict.fromkeys([*parents, *own]):
            if key.startswith("_") or key in ("transformers_version", "pad_token_id"):
                continue
            one, other = (side.get(key, DEFAULTS.get(key)) for side in (own, parents))
            if _ids_of(one) != _ids_of(other):
                advice = (
                    "" if key in parents else "remove it, as the parent leaves it at its default"
                )
                yield differs(GENERATION, key, one, other, advice)
    for key in IDS:
        one, other = (side.settings(CONFIG).get(key) for side in (child, parent))
        # Ids that are added, as of the end of a turn, stop a text no later.
        if other is not None and key in child.settings(CONFIG) and _ids_of(other) - _ids_of(one):
            yield differs(CONFIG, key, one, other)


def _ids_of(value: object) -> set[object]:
    """Return ids as a set, whether one or several are stated."""
    values = value if isinstance(value, list) else [value]
    return {repr(entry) if isinstance(entry, dict | list) else entry for entry in values}
