"""Check what is not quantized: its dtype, its size, scales that nothing uses, tied embeddings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from qgate.checkpoints.accounting import TIED
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.text import counted
from qgate.text.wording import megabytes

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
HALVES = ("BF16", "F16")
HALF_METHODS = ("gptq", "awq", "bitsandbytes")
"""Libraries that write float16 whatever the parent has."""
EXCESS = 0.05
"""Share of the file by which tensors that are not quantized may be larger than the parent's."""
OF_INPUTS = ("input_scale", "input_global_scale", "input_zero_point")
ADAPTERS = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|adapter\w*)(\.|$)")
UNTIED = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi", "phi3",
    "granite", "olmo2", "deepseek_v3", "glm4", "gpt_oss",
)  # fmt: skip
"""Kinds of models whose heads are no embeddings where a configuration says nothing."""
PLACES = {
    "of an adapter": ADAPTERS,
    "of a tower for images or sound": re.compile(
        r"(^|\.)(vision\w*|visual|audio_tower|image_newline|multi_modal_projector|embed_vision)\."
    ),
}


def precision_findings(
    child: Checkpoint,
    parent: Checkpoint,
    matches: Mapping[str, ParentMatch],
    weights: Sequence[StoredWeight],
    recipe: Recipe,
) -> Iterator[CheckpointFinding]:
    """Find tensors whose dtype or size is neither the parent's nor as the child declares."""
    if child.has_graph or child.is_gguf or parent.has_graph or parent.is_gguf:
        return
    pairs = list(_pairs(child, parent, matches, weights))
    usual = Counter[str]()
    for entry in parent.entries.values():
        usual[entry.dtype] += math.prod(entry.shape)
    declared = _declared(child)
    changed: dict[tuple[str, str], list[str]] = {}
    for own, other in pairs:
        if own.dtype == other.dtype or other.dtype not in DTYPES.values():
            continue
        if other.dtype == "F32" != usual.most_common(1)[0][0] and own.dtype in ("F16", "BF16"):
            yield CheckpointFinding(
                own.name,
                f"its dtype is {own.dtype} here and F32 in the parent, which stores other tensors "
                "with fewer bits: store it as F32",
            )
        elif own.dtype in ("F16", "BF16") and own.dtype != declared:
            changed.setdefault((own.dtype, other.dtype), []).append(own.name)
    for (dtype, parents), names in changed.items():
        if declared is not None and not (dtype == "F16" and recipe.method in HALF_METHODS):
            yield CheckpointFinding(
                names[0],
                f"{counted(len(names), 'tensor')} that {'is' if len(names) == 1 else 'are'} not "
                f"quantized: the dtype is {dtype} here and {parents} in the parent, and "
                f"config.json declares {declared}: store {parents}, or declare {dtype}",
            )
    yield from _size_findings(child, pairs)
    dtypes = {own.dtype for own, other in pairs if own.dtype == other.dtype} & set(HALVES)
    is_free = recipe.method not in HALF_METHODS and declared in HALVES
    if is_free and len(dtypes) == 1 and dtypes == {_declared(parent)} != {declared}:
        (stored,) = dtypes
        yield CheckpointFinding(
            "config.json dtype",
            f"it declares {declared}, and tensors that are not quantized are {stored} as in the "
            f"parent: declare {stored}",
        )


def _declared(child: Checkpoint) -> str | None:
    settings = child.model_settings
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    for table in (settings, *nested):
        for key in ("dtype", "torch_dtype"):
            if str(table.get(key)) in DTYPES:
                return DTYPES[str(table[key])]
    return None


def _pairs(
    child: Checkpoint,
    parent: Checkpoint,
    matches: Mapping[str, ParentMatch],
    weights: Sequence[StoredWeight],
) -> Iterator[tuple[StoredEntry, StoredEntry]]:
    """Yield each tensor that is not quantized beside the one of the parent that it has."""
    for weight in weights:
        match = matches.get(weight.name)
        if weight.packing is None and match is not None and len(match.names) == 1:
            own, other = child.entries[weight.name], parent.entries[match.names[0]]
            if own.dtype in DTYPES.values() and math.prod(own.shape) == math.prod(other.shape):
                yield own, other


def _size_findings(
    child: Checkpoint, pairs: Sequence[tuple[StoredEntry, StoredEntry]]
) -> Iterator[CheckpointFinding]:
    """Find tensors that are not quantized and take more bytes than in the parent."""
    larger = sorted(pairs, key=lambda pair: pair[1].size - pair[0].size)
    excess = sum(max(0, own.size - other.size) for own, other in pairs)
    total = sum(entry.size for entry in child.entries.values())
    if larger and excess > EXCESS * total and _declared(child) != larger[0][0].dtype:
        own, other = larger[0]
        yield CheckpointFinding(
            own.name,
            f"its dtype is {own.dtype} here and {other.dtype} in the parent: tensors that are not "
            f"quantized take {megabytes(excess)} of {megabytes(total)} more than there; store "
            f"{other.dtype}",
        )


# Scales without a use -----------------------------------------------------------------------------


def stray_scales(child: Checkpoint, weights: Sequence[StoredWeight]) -> Iterator[CheckpointFinding]:
    """Find scales of modules that are not quantized, and adapters that are."""
    plain = {w.name.removesuffix(".weight"): w for w in weights if w.packing is None}
    for name in child.entries:
        module, _, ending = name.rpartition(".")
        if ending in OF_INPUTS and module in plain:
            entry = child.entries[plain[module].name]
            yield CheckpointFinding(
                name,
                f"it is a scale{_place(name)}, whose weight is {entry.dtype} and not quantized: "
                "remove it, or quantize the module",
            )
    for weight in weights:
        if weight.packing is not None and ADAPTERS.search(weight.name):
            yield CheckpointFinding(
                weight.name,
                f"an adapter is stored as {weight.packing.name}: adapters stay in high precision; "
                "export it again without the adapter's modules",
            )


def _place(name: str) -> str:
    return next((f" {words}" for words, pattern in PLACES.items() if pattern.search(name)), "")


def untied_heads(child: Checkpoint, parent: Checkpoint) -> Iterator[CheckpointFinding]:
    """Find a head that is said to be no embedding, and is not there."""
    states = [side.model_settings.get("tie_word_embeddings") for side in (child, parent)]
    is_stored = any(name.endswith(f"{TIED}.weight") or f"{TIED}." in name for name in child.entries)
    is_untied = states[0] is False or (
        states[0] is None and child.model_settings.get("model_type") in UNTIED
    )
    if is_untied and states[1] is True and not is_stored:
        yield CheckpointFinding(
            "config.json tie_word_embeddings",
            f"it is {'missing' if states[0] is None else 'False'} here and True in the parent, and "
            f"no {TIED} is stored: set it to true, or store {TIED}.weight",
        )


# Sizes --------------------------------------------------------------------------------------------

SIDE_BITS = 64
"""Bits of a scale and a zero point at most."""
ROOM = 1.1
CONSTANT = 2048
"""Bytes of a weight beside codes and scales: shapes, and the code books of nested ones."""


def padded_sizes(
    weights: Sequence[StoredWeight],
    parent: Checkpoint,
    matches: Mapping[str, ParentMatch],
    recipe: Recipe,
) -> Iterator[CheckpointFinding]:
    """Find weights that take more bits than what is declared needs at most."""
    if recipe.method == "torchao":
        return  # It stores integers of few bits as bytes on purpose.
    for weight in weights:
        module = weight.name.removesuffix(".weight")
        match, declared = matches.get(weight.name), recipe.format_of(module)
        if weight.packing is None or match is None or declared is None:
            continue
        if all(entry.dtype in DTYPES.values() for entry in weight.parts.values()):
            continue  # Values that were quantized and are floats again.
        count = sum(math.prod(parent.entries[name].shape) for name in match.names)
        bits = re.search(r"\d+", declared.element)
        if not count or bits is None:
            continue
        rows, columns = declared.tile
        shape = parent.entries[match.names[0]].shape
        width = columns or shape[-1]
        needed = int(bits[0]) + SIDE_BITS / min(width * (rows or 1), count) + 32 / max(1, shape[0])
        stored = 8 * weight.size / count
        if stored > ROOM * needed + 8 * CONSTANT / count:
            yield CheckpointFinding(
                weight.name,
                f"it takes {stored:.3g} bits per weight here, and {declared} as declared takes at "
                f"most {needed:.3g}: pack the codes",
            )
