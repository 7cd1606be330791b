"""Compare what child and parent state of the network: config.json, or the head of a GGUF file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from qgate.checkpoints.gguf.recipes import CONFIGURATION
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.stored import Checkpoint
from qgate.text import counted, one_line

LEFT_OUT = re.compile(
    r"(^|\.)(_.*|torch_dtype|dtype|transformers_version|use_cache|architectures|auto_map|"
    r"tie_word_embeddings|quantization_config|compression_config|quantization|initializer_range|"
    r".*_token_id|.*_token_index|.*dropout.*|.*_pdrop|output_attentions|output_hidden_states|"
    r"return_dict|chunk_size_feed_forward|pretraining_tp|gradient_checkpointing|torchscript|"
    r"id2label|label2id|num_labels|problem_type|attn_implementation|name_or_path)(\.|$)"
)
"""Settings that change no logits of a network, or that exporters change rightly."""
MOVED = (
    (re.compile(r"(^|\.)rope_(parameters|scaling)\.rope_theta$"), r"\1rope_theta"),
    (re.compile(r"(^|\.)rope_parameters\."), r"\1rope_scaling."),
    (re.compile(r"(^|\.)rope_scaling\.type$"), r"\1rope_scaling.rope_type"),
)
"""Settings that versions of transformers keep in another place."""
ROPE_NAMES = {"mrope": "default", "su": "longrope"}
"""Older names of kinds of rope."""
DERIVED = ("head_dim", "num_key_value_heads")
"""Settings that follow from others where the parent states none."""
NEEDED = (
    "rope_theta", "rms_norm_eps", "layer_norm_eps", "max_position_embeddings", "sliding_window",
    "factor", "original_max_position_embeddings",
)  # fmt: skip
"""Settings without which a network takes another value than the parent states."""
LLAMA_NAMES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "rope_scaling.factor",
    "rope.scaling.original_context_length": "rope_scaling.original_max_position_embeddings",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
"""Fields of GGUF after the architecture, and the settings of config.json that they hold."""
KEYS = re.compile(r"^(model\.)?layers\.\d+\.self_attn\.k_proj\.weight$")
"""Keys of decoders, of those without towers."""
SINGLE = 1e-6
"""Relative difference of numbers in single precision."""


def changed_settings(child: Checkpoint, parent: Checkpoint) -> Iterator[CheckpointFinding]:
    """Find settings of the network that are not the parent's."""
    parent_settings = _flat(parent.model_settings)
    if child.is_gguf:
        yield from _changed_fields(child, parent_settings)
        return
    own = _flat(child.model_settings)
    if not own or not parent_settings:
        return
    leaves = {_leaf(name) for name in own}
    for name, other in parent_settings.items():
        if _is_unused(name, other, parent_settings):
            continue
        if name in own and not _same(own[name], other):
            words = f"{_text(own[name])} here and {_text(other)} in the parent"
        elif other is None:
            continue
        elif _leaf(name) in NEEDED and _leaf(name) not in leaves and "hidden_size" in leaves:
            words = f"missing here and {_text(other)} in the parent"
        else:
            continue
        yield CheckpointFinding(
            f"config.json {one_line(name)}", f"it is {words}: copy the parent's value"
        )
    yield from _added_rope(own, parent_settings)
    yield from _wrong_heads(child, parent)
    yield from _lost_names(child, parent)


def _added_rope(
    own: Mapping[str, object], parent_settings: Mapping[str, object]
) -> Iterator[CheckpointFinding]:
    """Find positions that are scaled where the parent states its rope, and no scaling."""
    if any(".rope_scaling." in f".{name}" and x is not None for name, x in parent_settings.items()):
        return
    if not {"rope_theta", "rope_scaling"} & {_leaf(name) for name in parent_settings}:
        return  # The class of the network may scale by itself.
    for name, kind in own.items():
        if name.endswith("rope_scaling.rope_type") and kind not in (None, "default"):
            yield CheckpointFinding(
                f"config.json {one_line(name.removesuffix('.rope_type'))}",
                f"it is {_text(kind)} here, and the parent scales no positions: leave it out, as "
                "the parent does",
            )


def _lost_names(child: Checkpoint, parent: Checkpoint) -> Iterator[CheckpointFinding]:
    """Find names of the architecture that loaders need, and that are lost."""
    for key in ("model_type", "architectures"):
        if (
            child.model_settings
            and parent.model_settings.get(key)
            and not child.model_settings.get(key)
        ):
            words = f"missing here and {_text(parent.model_settings[key])} in the parent"
            yield CheckpointFinding(f"config.json {key}", f"it is {words}: copy the parent's value")


def _wrong_heads(child: Checkpoint, parent: Checkpoint) -> Iterator[CheckpointFinding]:
    """Find heads of keys that the parent does not state, and its tensors have not."""
    own, parents = child.model_settings, parent.model_settings
    added = [key for key in DERIVED if own.get(key) is not None and parents.get(key) is None]
    rows = {entry.shape[0] for name, entry in parent.entries.items() if KEYS.search(name)}
    hidden, heads = own.get("hidden_size"), own.get("num_attention_heads")
    if not added or len(rows) != 1 or not isinstance(hidden, int) or not isinstance(heads, int):
        return
    width, count = (own.get(key) for key in DERIVED)
    width = hidden // max(1, heads) if width is None else width
    count = heads if count is None else count
    (height,) = rows
    if isinstance(count, int) and isinstance(width, int) and count * width not in (0, height):
        yield CheckpointFinding(
            f"config.json {added[0]}",
            f"it is {_text(own[added[0]])} here, with {counted(count, 'head')} of {width}, and the "
            f"parent's keys have {height} rows: leave it out, as the parent does",
        )


def _is_unused(name: str, value: object, settings: Mapping[str, object]) -> bool:
    """Return True for a setting that has no effect, or that follows from others."""
    prefix, leaf = name[: len(name) - len(_leaf(name))], _leaf(name)
    is_off = settings.get(f"{prefix}use_sliding_window") is False
    return (leaf == "sliding_window" and is_off) or (value is None and leaf in DERIVED)


def _changed_fields(
    child: Checkpoint, parent_settings: Mapping[str, object]
) -> Iterator[CheckpointFinding]:
    """Compare the head of a GGUF file with the parent's config.json."""
    fields = child.configuration.get(CONFIGURATION)
    fields = fields if isinstance(fields, Mapping) else {}
    architecture = fields.get("general.architecture")
    by_leaf = {name.removeprefix("text_config."): x for name, x in parent_settings.items()}
    for key, name in LLAMA_NAMES.items():
        field, other = f"{architecture}.{key}", by_leaf.get(name)
        value = fields.get(field)
        if not isinstance(value, int | float) or not isinstance(other, int | float):
            continue
        if key == "block_count" and by_leaf.get("num_nextn_predict_layers"):
            continue  # Layers that predict further tokens are blocks, too.
        if not math.isclose(value, other, rel_tol=SINGLE):
            yield CheckpointFinding(
                f"{field}",
                f"it is {value:.7g} here and {other:.7g} in the parent's config.json ({name}): "
                "convert it again from the parent",
            )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """List settings by dotted names, without those that change no logits."""
    listed: dict[str, object] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if LEFT_OUT.search(name):
            continue
        if isinstance(value, Mapping):
            listed |= _flat(value, f"{name}.")
        else:
            if key == "type" and "rope_type" in settings:
                continue
            for pattern, to in MOVED:
                name = pattern.sub(to, name)
            is_rope = name.endswith("rope_scaling.rope_type")
            listed.setdefault(name, ROPE_NAMES.get(str(value), value) if is_rope else value)
    return listed


def _same(value: object, other: object) -> bool:
    if isinstance(value, int | float) and isinstance(other, int | float):
        return float(value) == float(other)
    return value == other


def _text(value: object) -> str:
    return one_line(repr(value))
