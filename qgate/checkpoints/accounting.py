"""Account for every tensor of child and parent: missing, unexpected, left out, fused."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from qgate.checkpoints.gguf.recipes import BLOCK, mix_cause
from qgate.checkpoints.pairing import FUSIONS, ParentMatch
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.text import counted

NOT_LINEAR = ("embed", "norm", "wte", "wpe", "router", "conv", "relative_attention_bias")
"""Words in the names of two-dimensional weights that a recipe's "Linear" does not mean."""
ALONE = "it is in the parent alone"
EMBEDDINGS = ("shared",)
"""Last parts of the names of embeddings."""
MANY = 8
"""Weights of one kind from which on one finding counts them."""
TIED = "lm_head"
HELPERS = (
    "input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale",
    "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight",
)  # fmt: skip
"""Endings of tensors that belong to activations, caches and rope, which a parent has not."""
DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Endings of tensors of a parent that follow from its configuration, and that exporters drop."""
TOWERS = ("vision_", "visual.", "audio_tower", "multi_modal_projector", "embed_vision")
"""Words in the names of what llama.cpp keeps in another file."""
FUSED = (FUSIONS["qkv_proj"], FUSIONS["gate_up_proj"])
"""Weights that serving engines fuse, so that they need one scale of the whole tensor."""


def account(
    record: CheckpointRecord,
    recipe: Recipe,
    parent: Checkpoint | None,
    matches: dict[str, ParentMatch],
    weights: list[StoredWeight],
) -> None:
    """Find what is missing, unexpected, or ignored in vain."""
    # An output layer that shares the embedding's weight is a module without a tensor.
    modules = [TIED, *(weight.name.removesuffix(".weight") for weight in weights)]
    if parent is not None:
        modules += [name.removesuffix(".weight") for name in parent.entries]
        used = {name for match in matches.values() for name in match.names}
        unmatched = [name for name in parent.entries if name not in used]
        unmatched = [name for name in unmatched if not name.endswith(DERIVED)]
        record.unmatched_parents = _without_towers(record, unmatched, weights)
        for name in record.unmatched_parents:
            # An output layer that shares its weight with the embedding.
            is_tied = TIED in name and parent.model_settings.get("tie_word_embeddings", False)
            if not is_tied:
                record.findings.append(CheckpointFinding(name, ALONE))
        for weight in weights:
            if weight.name not in matches and not weight.name.endswith(HELPERS):
                record.findings.append(CheckpointFinding(weight.name, "it is in the child alone"))
    for pattern in recipe.idle_patterns(modules):
        record.findings.append(CheckpointFinding(pattern, "this ignore pattern matches no module"))
    if cause := mix_cause(_types_of_layers(weights), recipe.mix):
        record.findings.append(CheckpointFinding("general.file_type", cause))
    if recipe.method:
        record.findings += _skipped(weights, recipe)


def _without_towers(
    record: CheckpointRecord, names: list[str], weights: list[StoredWeight]
) -> list[str]:
    """Leave out the parent's towers for images and sound, which llama.cpp keeps in another file."""
    if not any(weight.packing and weight.packing.name.startswith("GGUF ") for weight in weights):
        return names
    kept_names = [name for name in names if not any(word in name for word in TOWERS)]
    if len(kept_names) < len(names):
        count = counted(len(names) - len(kept_names), "tensor")
        record.notes.append(
            f"{count} of towers for images or sound left out: llama.cpp keeps them in another file"
        )
    return kept_names


def _types_of_layers(weights: list[StoredWeight]) -> Counter[str]:
    """Count the parameters in layers of each block type of GGUF."""
    types: Counter[str] = Counter()
    for weight in weights:
        if weight.name.startswith(BLOCK) and weight.packing and "weight" in weight.parts:
            entry = weight.parts["weight"]
            if weight.packing.name == f"GGUF {entry.dtype}":
                types[entry.dtype] += math.prod(entry.shape)
    return types


def _skipped(weights: list[StoredWeight], recipe: Recipe) -> Iterator[CheckpointFinding]:
    """Find weights that were left out; of many with one name but for numbers, say how many."""
    names: dict[str, list[str]] = {}
    for weight in weights:
        if is_skipped(weight, recipe):
            names.setdefault(re.sub(r"\.\d+(?=\.)", ".*", weight.name), []).append(weight.name)
    for pattern, members in names.items():
        declared = recipe.format_of(members[0].removesuffix(".weight"))
        words = f"not quantized, and the recipe declares {declared}"
        if len(members) > MANY:
            yield CheckpointFinding(pattern, f"{len(members):,} weights are {words}")
        else:
            yield from (CheckpointFinding(name, f"it is {words}") for name in members)


def is_skipped(weight: StoredWeight, recipe: Recipe) -> bool:
    """Return True for a linear layer's weight that the recipe quantizes and the child does not."""
    entry = next(iter(weight.parts.values()))
    module = weight.name.removesuffix(".weight")
    return (
        weight.packing is None
        and weight.name.endswith(".weight")
        and len(entry.shape) == 2
        and entry.dtype in ("F32", "BF16", "F16")
        and not any(word in module.lower() for word in NOT_LINEAR)
        and module.rpartition(".")[2] not in EMBEDDINGS
        and not recipe.ignores(module)
        and recipe.format_of(module) is not None
    )


def odd_scales(child: Checkpoint, weights: list[StoredWeight]) -> Iterator[CheckpointFinding]:
    """Find scales that are declared as E8M0 and are no powers of two."""
    settings = child.model_settings.get("quantization_config")
    form = settings.get("scale_fmt") if isinstance(settings, Mapping) else None
    if not isinstance(form, str) or form.lower() != "ue8m0":
        return
    for weight in weights:
        entry = weight.parts.get("weight_scale_inv")
        if weight.packing is None or entry is None:
            continue
        scales = child.read(entry.name).float()
        odd = int((scales.frexp().mantissa != 0.5).sum())
        if odd:
            yield CheckpointFinding(
                entry.name,
                f"{odd:,} of {scales.numel():,} scales are no powers of two, and config.json "
                f"declares scale_fmt {form}: quantize with such scales, or declare none",
            )


def fused_scales(child: Checkpoint, weights: list[StoredWeight]) -> Iterator[CheckpointFinding]:
    """Find parts of fused weights whose scales of the whole tensor differ."""
    names = {weight.name: weight for weight in weights if weight.packing}
    endings = ("weight_global_scale", "weight_scale_2")
    for weight in names.values():
        for parts in FUSED:
            if not weight.name.endswith(f"{parts[0]}.weight"):
                continue
            group = [names.get(weight.name.replace(parts[0], part)) for part in parts]
            scales = {
                part: float(child.read(member.parts[ending].name).float().reshape(-1)[0])
                for part, member in zip(parts, group, strict=True)
                if member is not None
                for ending in endings
                if ending in member.parts
            }
            if len(Counter(scales.values())) > 1:
                listed = ", ".join(f"{part} {scale:.4g}" for part, scale in scales.items())
                yield CheckpointFinding(
                    weight.name,
                    f"engines fuse {' and '.join(scales)}, whose scales of the whole tensor "
                    f"differ: {listed}",
                )
