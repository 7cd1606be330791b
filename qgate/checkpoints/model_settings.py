"""Compare what config.json of child and parent state of the network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.stored import Checkpoint
from qgate.text import one_line

LEFT_OUT = re.compile(
    r"(^|\.)(_.*|torch_dtype|dtype|transformers_version|use_cache|architectures|auto_map|"
    r"tie_word_embeddings|quantization_config|compression_config|quantization|initializer_range|"
    r".*_token_id|.*_token_index|.*dropout.*|.*_pdrop|output_attentions|output_hidden_states|"
    r"return_dict|chunk_size_feed_forward|pretraining_tp|gradient_checkpointing|torchscript|"
    r"id2label|label2id|num_labels|problem_type|attn_implementation|name_or_path)(\.|$)"
)
"""Settings that change no logits of a network, or that exporters change rightly."""
MOVED = {"rope_parameters.rope_theta": "rope_theta", "rope_scaling.rope_theta": "rope_theta"}
"""Settings that versions of transformers keep in another place."""
NEEDED = ("rope_theta", "rms_norm_eps", "layer_norm_eps")
"""Settings without which a network takes another value than the parent states."""


def changed_settings(child: Checkpoint, parent: Checkpoint) -> Iterator[CheckpointFinding]:
    """Find settings of the network that are not the parent's."""
    own, parent_settings = _flat(child.model_settings), _flat(parent.model_settings)
    if not own or not parent_settings:
        return
    leaves = {_leaf(name) for name in own}
    for name, other in parent_settings.items():
        if name in own and not _same(own[name], other):
            words = f"{_text(own[name])} here and {_text(other)} in the parent"
        elif _leaf(name) in NEEDED and _leaf(name) not in leaves and "hidden_size" in leaves:
            words = f"missing here and {_text(other)} in the parent"
        else:
            continue
        yield CheckpointFinding(f"config.json {one_line(name)}", f"it is {words}")


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
            stem = next((name.removesuffix(end) + to for end, to in MOVED.items()
                         if name == end or name.endswith(f".{end}")), name)  # fmt: skip
            listed.setdefault(stem, value)
    return listed


def _same(value: object, other: object) -> bool:
    if isinstance(value, int | float) and isinstance(other, int | float):
        return float(value) == float(other)
    return value == other


def _text(value: object) -> str:
    return one_line(repr(value))
