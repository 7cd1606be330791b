"""Mamba-1 checkpoint folders, of Hugging Face and of state-spaces, read without transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from qgate.errors import QgateError
from qgate.models.mamba.checkpoint_config import read_config
from qgate.models.mamba.checkpoint_files import CheckpointShard, open_shards
from qgate.models.mamba.network import Mamba, MambaConfig

_EMBEDDING, _HEAD = "backbone.embeddings.weight", "lm_head.weight"


def load_checkpoint(folder: Path) -> Mamba:
    """The network of a checkpoint folder, in float32.

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
    """The network without memory for its weights."""
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
    wanted = {name: tuple(p.shape) for name, p in network.named_parameters(remove_duplicate=False)}
    where: dict[str, CheckpointShard] = {}
    for shard in shards:
        for name in shard.shapes:
            if name in where:
                raise QgateError(
                    f"tensor {name!r} is in {where[name].path.name!r} and in "
                    f"{shard.path.name!r} of {str(folder)!r}. Remove the one of another model."
                )
            where[name] = shard
    optional = {_HEAD} if config.tied else set()
    missing = [name for name in wanted if name not in where and name not in optional]
    extra = [name for name in where if name not in wanted]
    if missing or extra:
        found = [f"lacks {_first(missing)}"] if missing else []
        found += [f"has {_first(extra)}, unknown to this model"] if extra else []
        hint = " A head that shares the embedding needs tie_word_embeddings (tie_embeddings) true."
        raise QgateError(
            f"the weights in {str(folder)!r} are not those its config.json describes: the folder "
            f"{' and '.join(found)}. Copy config.json and weights of one and the same model."
            f"{hint if _HEAD in missing else ''}"
        )
    for name, shard in where.items():
        if shard.shapes[name] != wanted[name]:
            raise QgateError(
                f"tensor {name!r} in {str(shard.path)!r} has shape {shard.shapes[name]}, but "
                f"config.json asks for {wanted[name]}. Copy the config.json that belongs to it."
            )


def _compare_head(network: Mamba, shards: list[CheckpointShard], folder: Path) -> None:
    """A file may hold the shared weight twice, but not two weights."""
    for shard in shards:
        if _HEAD in shard.shapes and not torch.equal(network.lm_head.weight, shard.float32(_HEAD)):
            raise QgateError(
                f"the config.json of {str(folder)!r} ties {_HEAD} to {_EMBEDDING}, but "
                f"{shard.path.name!r} holds another {_HEAD}. Set tie_word_embeddings "
                "(state-spaces: tie_embeddings) to false if the head is one of its own."
            )


def _first(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
