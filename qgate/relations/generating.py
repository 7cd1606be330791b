"""Calls of a model as `generate()` of transformers makes them, with positions and masks of its own.

What follows each prompt is given, token by token: the calls are those of greedy decoding, and what
they compute is what one pass over the same text gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.hooks import ModuleHooks
from qgate.models.rows import MASK, map_tensors
from qgate.relations.caches import TextCalls


def generates(calls: TextCalls) -> bool:
    """Tell if a model has a `generate()` that calls it with its cache."""
    has_settings = hasattr(calls.network, "generation_config")
    return bool(calls.past) and has_settings and callable(getattr(calls.network, "generate", None))


CallKwargs = Mapping[str, Any]


@torch.no_grad()
def generated_calls(
    calls: TextCalls, ids: Tensor, mask: Tensor, following: Tensor
) -> list[CallKwargs]:
    """Return the arguments of each call that generate() makes, without the cache.

    following   the tokens (rows, steps) behind the prompts, whatever the model chooses
    """
    listed: list[CallKwargs] = []
    network: Any = calls.network
    device = next((p.device for p in network.parameters()), ids.device)

    def take(_module: nn.Module, _args: Any, kwargs: CallKwargs) -> None:
        values = {name: kwargs[name] for name in calls.names if name in kwargs}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        listed.append(map_tensors(tensors, torch.clone) | {"use_cache": True})

    def next_token(row: int, seen: Tensor) -> list[int]:
        return [int(following[row, len(seen) - ids.shape[1]])]

    with ModuleHooks() as hooks, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooks.add(network, take)
        try:
            settings = type(network.generation_config)(
                max_new_tokens=following.shape[1], do_sample=False, use_cache=True, pad_token_id=0
            )
            network.generate(
                **{calls.names[0]: ids.to(device), MASK: mask.long().to(device)},
                generation_config=settings, prefix_allowed_tokens_fn=next_token,
            )  # fmt: skip
        except Exception as error:  # of code that the user may have replaced
            raise QgateError(f"generate() does not run: {type(error).__name__}") from error
    if len(listed) != following.shape[1]:
        raise QgateError(f"generate() makes {len(listed)} calls for {following.shape[1]} tokens")
    # Of logits that are not finite none is chosen.
    name, steps = calls.names[0], following.split(1, 1)
    for step, arguments in enumerate(listed[1:]):
        if arguments[name].shape == steps[step].shape:
            listed[step + 1] = {**arguments, name: steps[step]}
    return listed
