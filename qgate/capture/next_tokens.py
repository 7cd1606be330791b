"""Prediction of next tokens: the token ids of a sample, and if a model predicts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qgate.models.model import Model

_TOKENS = 128
# Earlier logits of a model that does not look ahead differ by the order of summation at most.
_SAME = 1e-6


def token_ids(sample: Any) -> Tensor | None:
    """Return the rows of token ids of a sample: itself, its `input_ids`, or the first of a tuple.

    None for samples of another kind.
    """
    if isinstance(sample, Mapping):
        sample = sample.get("input_ids")
    elif isinstance(sample, tuple):
        sample = next(iter(sample), None)
    if not isinstance(sample, Tensor) or sample.is_floating_point() or sample.dtype == torch.bool:
        return None
    return sample if sample.dim() in (1, 2) and sample.shape[-1] >= 2 else None


def without_padding(ids: Tensor, sample: Any) -> Tensor:
    """Return token ids with -1 where the mask of their sample marks padding."""
    mask = sample.get("attention_mask") if isinstance(sample, Mapping) else None
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return ids
    return ids.masked_fill(mask == 0, -1)


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
    if ids is None or any(token_ids(other) is None for other in model.inputs):
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
