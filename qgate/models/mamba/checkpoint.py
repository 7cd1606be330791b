"""Mamba-1 checkpoint folders, of Hugging Face and of state-spaces, read without transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qgate.errors import QgateError
from qgate.models.mamba.checkpoint_files import CheckpointShard, open_shards, read_json
from qgate.models.mamba.network import Mamba, MambaConfig
from qgate.text import listed

_EMBEDDING, _HEAD = "backbone.embeddings.weight", "lm_head.weight"


def load_checkpoint(folder: Path) -> Mamba:
    """Load the network of a checkpoint folder in float32.

    Names and shapes are compared before a weight is read. Then every tensor goes from its file
    into its parameter, so that the memory holds the model once.
    """
    config = read_config(folder)
    shards = open_shards(folder)
    network = _skeleton(config, folder, sum(len(shard.shapes) for shard in shards))
    _compare(network, shards, folder, config)
    for shard in shards:
        for name in shard.shapes:
            if not (config.tied and name == _HEAD):
                owner, _, leaf = name.rpartition(".")
                setattr(network.get_submodule(owner), leaf, nn.Parameter(shard.float32(name)))
    if config.tied:
        network.lm_head.weight = network.backbone.embeddings.weight
        _compare_head(network, shards, folder)
    return network.eval()


def _skeleton(config: MambaConfig, folder: Path, tensors: int) -> Mamba:
    """Build the network without memory for its weights."""
    if config.n_layer > tensors:
        raise QgateError(
            f"the config.json of {str(folder)!r} says {config.n_layer} layers, but its weights are "
            f"{tensors} tensors in all. Copy the config.json that belongs to them."
        )
    try:
        with torch.device("meta"):
            return Mamba(config)
    except (RuntimeError, TypeError, OverflowError):
        raise QgateError(
            f"the sizes in the config.json of {str(folder)!r} are larger than any memory: "
            f"{config}. Copy the config.json that belongs to the weights."
        ) from None


def _compare(
    network: Mamba, shards: list[CheckpointShard], folder: Path, config: MambaConfig
) -> None:
    expected = {
        name: tuple(p.shape) for name, p in network.named_parameters(remove_duplicate=False)
    }
    shard_of: dict[str, CheckpointShard] = {}
    for shard in shards:
        for name in shard.shapes:
            if name in shard_of:
                raise QgateError(
                    f"tensor {name!r} is in {shard_of[name].path.name!r} and in "
                    f"{shard.path.name!r} of {str(folder)!r}. Remove the one of another model."
                )
            shard_of[name] = shard
    optional = {_HEAD} if config.tied else set()
    missing = [name for name in expected if name not in shard_of and name not in optional]
    extra = [name for name in shard_of if name not in expected]
    if missing or extra:
        problems = [f"lacks {listed(missing, 6)}"] if missing else []
        problems += [f"has {listed(extra, 6)}, unknown to this model"] if extra else []
        hint = " A head that shares the embedding needs tie_word_embeddings (tie_embeddings) true."
        raise QgateError(
            f"the weights in {str(folder)!r} are not those its config.json describes: the folder "
            f"{' and '.join(problems)}. Copy config.json and weights of one and the same model."
            f"{hint if _HEAD in missing else ''}"
        )
    for name, shard in shard_of.items():
        if shard.shapes[name] != expected[name]:
            raise QgateError(
                f"tensor {name!r} in {str(shard.path)!r} has shape {shard.shapes[name]}, but "
                f"config.json asks for {expected[name]}. Copy the config.json that belongs to it."
            )


def _compare_head(network: Mamba, shards: list[CheckpointShard], folder: Path) -> None:
    """Refuse a second head: a file may hold the shared weight twice, but not two weights."""
    for shard in shards:
        if _HEAD in shard.shapes and not torch.equal(network.lm_head.weight, shard.float32(_HEAD)):
            raise QgateError(
                f"the config.json of {str(folder)!r} ties {_HEAD} to {_EMBEDDING}, but "
                f"{shard.path.name!r} holds another {_HEAD}. Set tie_word_embeddings "
                "(state-spaces: tie_embeddings) to false if the head is one of its own."
            )


_ELSEWHERE = "Other kinds of model are loaded as hf:PATH."


def read_config(folder: Path) -> MambaConfig:
    """Read the sizes in config.json, in either of the two spellings."""
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("quantization_config"):
        raise QgateError(
            f"{str(path)!r} is of a quantized checkpoint (quantization_config); a reference is not "
            "quantized. Give the folder of the original weights."
        )
    if "model_type" in raw or "architectures" in raw:
        return _of_hugging_face(raw, path)
    if "d_model" in raw:
        return _of_state_spaces(raw, path)
    raise QgateError(
        f"{str(path)!r} is not the config of a Mamba-1 model: it has neither model_type (Hugging "
        f"Face) nor d_model (state-spaces). {_ELSEWHERE}"
    )


def _of_hugging_face(raw: Mapping[str, Any], path: Path) -> MambaConfig:
    kind, classes = raw.get("model_type"), raw.get("architectures")
    if kind != "mamba":
        raise QgateError(
            f"{str(path)!r} is of model_type {kind!r}; mamba:PATH loads Mamba-1 only, model_type "
            f"'mamba'. {_ELSEWHERE}"
        )
    if classes and "MambaForCausalLM" not in classes:
        raise QgateError(
            f"{str(path)!r} is of {classes}; mamba:PATH loads MambaForCausalLM. Save it as that, "
            "with its head, or use hf:PATH."
        )
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise QgateError(
            f"{str(path)!r} has hidden_act {act!r}; mamba:PATH computes silu (or swish). Use "
            "hf:PATH for other activations."
        )
    width = _size(raw, "hidden_size", path)
    inner = width * _size(raw, "expand", path, 2)
    return MambaConfig(
        vocab_size=_size(raw, "vocab_size", path),
        d_model=width,
        n_layer=_size(raw, "num_hidden_layers", path),
        d_inner=_size(raw, "intermediate_size", path, inner),
        d_state=_size(raw, "state_size", path, 16),
        d_conv=_size(raw, "conv_kernel", path, 4),
        dt_rank=_rank(raw, "time_step_rank", path, width),
        eps=_epsilon(raw, path),
        conv_bias=_flag(raw, "use_conv_bias", path, True),
        bias=_flag(raw, "use_bias", path, False),
        tied=_flag(raw, "tie_word_embeddings", path, True),
    )


def _of_state_spaces(raw: Mapping[str, Any], path: Path) -> MambaConfig:
    inside = raw.get("ssm_cfg") or {}
    if not isinstance(inside, dict):
        raise QgateError(
            f"{str(path)!r} has ssm_cfg {inside!r}; it is an object with sizes. Correct it."
        )
    other = {
        "ssm_cfg.layer": inside.get("layer", "Mamba1") != "Mamba1" and inside["layer"],
        "attn_layer_idx": raw.get("attn_layer_idx"),
        "d_intermediate": raw.get("d_intermediate"),
    }
    for name, value in other.items():
        if value:
            raise QgateError(
                f"{str(path)!r} has {name} {value!r}; mamba:PATH loads Mamba-1 only, every layer a "
                "Mamba-1 block and nothing else. Convert it to transformers' layout for hf:PATH."
            )
    if not _flag(raw, "rms_norm", path, True):
        raise QgateError(
            f"{str(path)!r} has rms_norm false, a model with LayerNorm; mamba:PATH computes "
            "RMSNorm, rms_norm true. Convert it to transformers' layout for hf:PATH."
        )
    width = _size(raw, "d_model", path)
    multiple = _size(raw, "pad_vocab_size_multiple", path, 8)
    return MambaConfig(
        vocab_size=math.ceil(_size(raw, "vocab_size", path) / multiple) * multiple,
        d_model=width,
        n_layer=_size(raw, "n_layer", path),
        d_inner=width * _size(inside, "expand", path, 2),
        d_state=_size(inside, "d_state", path, 16),
        d_conv=_size(inside, "d_conv", path, 4),
        dt_rank=_rank(inside, "dt_rank", path, width),
        conv_bias=_flag(inside, "conv_bias", path, True),
        bias=_flag(inside, "bias", path, False),
        tied=_flag(raw, "tie_embeddings", path, True),
    )


def _size(
    raw: Mapping[str, Any], name: str, path: Path, default: int | None = None, or_else: str = ""
) -> int:
    value = raw.get(name, default)
    if value is None:
        raise QgateError(f"{str(path)!r} does not say {name}; give it, a whole number above zero.")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise QgateError(
            f"{str(path)!r} has {name} {value!r}; it must be a whole number above zero{or_else}. "
            "Correct it."
        )
    return value


def _rank(raw: Mapping[str, Any], name: str, path: Path, width: int) -> int:
    if raw.get(name, "auto") == "auto":
        return math.ceil(width / 16)
    return _size(raw, name, path, or_else=" or 'auto'")


def _flag(raw: Mapping[str, Any], name: str, path: Path, default: bool) -> bool:
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise QgateError(
            f"{str(path)!r} has {name} {value!r}; it must be true or false. Correct it."
        )
    return value


def _epsilon(raw: Mapping[str, Any], path: Path) -> float:
    value = raw.get("layer_norm_epsilon", 1e-5)
    if not isinstance(value, int | float) or not 0 < value < 1:
        raise QgateError(
            f"{str(path)!r} has layer_norm_epsilon {value!r}; it must be a number between 0 and 1. "
            "Correct it."
        )
    return float(value)
