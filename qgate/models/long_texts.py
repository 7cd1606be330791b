"""A text that is longer than the samples of a model, as far as the model takes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qgate.hooks.module_hooks import ModuleHooks
from qgate.models.model import Model
from qgate.models.refusals import RefusedSampleError
from qgate.models.rows import token_ids

LONG = 1029
"""Tokens of the text: beyond tables of 1,024 positions."""
_BEHIND = 5
"""Tokens behind a sliding window, or the longest sample."""
_LARGEST_WINDOW = 4096
_MANY = 8
_DECLARED = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_length",
    "max_seq_len", "context_length", "block_size",
)  # fmt: skip
"""Names under which a configuration has the longest text that a model is made for."""


def long_text(model: Model) -> Tensor | None:
    """Return token ids (2, tokens), texts that begin at two places; None without token ids.

    Samples are joined and repeated to 1,029 tokens, or to a few more than a sliding window or the
    longest of many samples. Where the configuration or a table of positions ends before that, the
    text does too.
    """
    listed = [ids for sample in model.inputs if (ids := token_ids(sample)) is not None]
    if len(listed) < len(model.inputs) or not reads_ids_alone(model):
        return None
    text = torch.cat([ids.reshape(-1) for ids in listed])
    window = _declared(model.module, ("sliding_window",))
    longest = max(ids.shape[1] for ids in listed)
    beyond = [window] * (window <= _LARGEST_WINDOW)
    beyond += [longest] * (len(text) >= _MANY * longest)
    tokens = max([LONG, *(length + _BEHIND for length in beyond)])
    limits = (_declared(model.module, _DECLARED), _position_table(model))
    tokens = min([tokens, *(limit for limit in limits if limit)])
    starts = torch.tensor([[0], [len(text) // 2 + 1]])
    return text[(torch.arange(tokens) + starts) % len(text)]


@torch.no_grad()
def reads_ids_alone(model: Model) -> bool:
    """Tell if samples are token ids that a network takes by themselves, without images or so."""
    ids = token_ids(model.inputs[0])
    if ids is None or isinstance(model.inputs[0], Tensor):
        return ids is not None
    try:
        model.outputs(ids)
    except RefusedSampleError:
        return False
    return True


def _declared(module: nn.Module, names: Sequence[str]) -> int:
    """Return a number of tokens from the configuration of a model; 0 for none."""
    config = getattr(module, "config", None)
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    values = [getattr(config, name, None) for name in names]
    return min((value for value in values if isinstance(value, int) and value > 0), default=0)


@torch.no_grad()
def _position_table(model: Model) -> int:
    """Return the size of the smallest table of positions, beyond which nothing may be read."""
    sizes: list[int] = []

    def look(module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
        places = args[0] if args else None
        if isinstance(places, Tensor) and places.dim() and places.shape[-1] > 1:
            row = places.reshape(-1, places.shape[-1])[0]
            if bool((row.diff() == 1).all()):
                sizes.append(int(module.num_embeddings) - int(row[0]))  # type: ignore[arg-type]

    tables = [module for module in model.module.modules() if isinstance(module, nn.Embedding)]
    if len(tables) > 1:
        with ModuleHooks() as hooks:
            for table in tables:
                hooks.add(table, look, None)
            model.outputs(model.inputs[0])
    return min(sizes, default=0)
