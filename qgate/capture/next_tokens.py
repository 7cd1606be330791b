"""Prediction of next tokens: if the outputs of a model are logits of the tokens to come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgate.models.model import Model
from qgate.models.rows import cut_sample, map_tensors, real_tokens, token_ids

_TOKENS = 128
# Earlier logits of a model that does not look ahead differ by the order of summation at most.
_SAME = 1e-6
PADDING = -1
"""The token id of padding."""


def masked_ids(ids: Tensor, sample: Any) -> Tensor:
    """Return token ids with `PADDING` where the mask of their sample marks padding."""
    real = real_tokens(sample)
    if real is None or real.shape != ids.shape:
        return ids
    return ids.masked_fill(~real.to(ids.device), PADDING)


def are_logits(output: Tensor, ids: Tensor) -> bool:
    """Tell if there is one number per token and vocabulary entry."""
    fits = output.is_floating_point() and output.shape[:-1] == ids.shape and ids.shape[-1] >= 2
    return fits and int(ids.max()) < output.shape[-1]


def look_ahead(first: Tensor, second: Tensor) -> bool:
    """Tell if outputs of tokens differ, where only tokens that come later are other ones."""
    first, second = first.double(), second.double()
    return not bool((first - second).abs().max() <= _SAME * first.abs().max())


def predicts_next_tokens(model: Model) -> bool:
    """Tell if a model makes logits of each token, and none that depends on tokens after it.

    One that reads in both directions knows the token that it would predict. The beginning of the
    first sample is run twice, the second time with other tokens in its second half.
    """
    if any(token_ids(sample) is None for sample in model.inputs):
        return False
    sample = cut_sample(model.inputs[0], slice(None), _TOKENS)
    ids = token_ids(sample)
    if ids is None or ids.shape[-1] < 2:
        return False
    half = ids.shape[-1] // 2
    changed_ids = ids.clone()
    changed_ids[:, half:] = (ids[:, half:] == 0).to(ids.dtype)
    with torch.no_grad():
        first = model(sample)
        if not are_logits(first, ids):
            return False
        second = model(map_tensors(sample, lambda tensor: changed_ids if tensor is ids else tensor))
    return not look_ahead(first[:, :half], second[:, :half])
