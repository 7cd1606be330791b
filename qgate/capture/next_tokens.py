"""Prediction of next tokens: the token ids of a sample, and if a model predicts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qgate.models.model import Model
from qgate.models.rows import real_tokens, token_ids

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
    fits = output.is_floating_point() and output.shape[:-1] == ids.shape
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
    sample = model.inputs[0]
    ids = token_ids(sample)
    if ids is None or ids.shape[-1] < 2 or any(token_ids(x) is None for x in model.inputs):
        return False
    if isinstance(sample, Tensor):
        ids = ids[..., :_TOKENS]
    half = ids.shape[-1] // 2
    others = ids.clone()
    others[..., half:] = (ids[..., half:] == 0).to(ids.dtype)
    with torch.no_grad():
        first = model(_with_ids(sample, ids))
        if not are_logits(first, ids):
            return False
        second = model(_with_ids(sample, others))
    return not look_ahead(first[..., :half, :], second[..., :half, :])


def _with_ids(sample: Any, ids: Tensor) -> Any:
    if isinstance(sample, Mapping):
        return {**sample, "input_ids": ids}
    return (ids, *sample[1:]) if isinstance(sample, tuple) else ids
