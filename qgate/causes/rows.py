"""Patterns of an error beside that of quantization: samples, tokens and channels that stand out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qgate.causes.places import place_words

OUTSTANDING = 30.0
"""Times the median error from which a token or channel is a fault; of right code it is below 10."""
OUTSTANDING_SAMPLE = 4.0
EXPLAINED = 0.1
"""Share of an error that is left where one factor or one missing summand explains it."""


def describe_rows(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Name samples, tokens or channels with far more error than the others; empty without any."""
    if len({tensor.shape for tensor in actual}) != 1 or actual[0].dim() < 2:
        return ""
    a, r = (torch.cat(list(tensors)).double() for tensors in (actual, expected))
    a, r = (tensor.reshape(len(tensor), -1, tensor.shape[-1]) for tensor in (a, r))
    error, energy = (a - r).square(), r.square()
    floor = energy.mean() * 1e-6
    tokens = error.sum(2) / energy.sum(2).clamp_min(floor)
    for part, ratios, factor in (
        ("sample", tokens.median(1).values, OUTSTANDING_SAMPLE),
        ("token", tokens.median(0).values, OUTSTANDING),
        ("channel", error.sum((0, 1)) / energy.sum((0, 1)).clamp_min(floor), OUTSTANDING),
    ):
        if words := _outstanding(part, ratios, factor):
            return words
    worst = int(tokens.argmax())
    if float(tokens.max()) > OUTSTANDING**2 * float(tokens.median()):
        sample, token = divmod(worst, tokens.shape[1])
        return f"is wrong at token {token} of sample {sample}"
    return ""


def _outstanding(part: str, ratios: Tensor, factor: float) -> str:
    """Name the few places whose error is `factor` times the median; at most a third of them."""
    if len(ratios) < 3:
        return ""
    bad = (ratios > factor * ratios.median()).nonzero().reshape(-1).tolist()
    if not bad or len(bad) > len(ratios) / 3:
        return ""
    return f"is wrong at {place_words(bad, len(ratios), part)}"


def describe_block(actual: Tensor, expected: Tensor, source: Tensor) -> str:
    """Say which summand or factor a block's output lacks; `source` is the block's input."""
    a, r, h = (tensor.double() for tensor in (actual, expected, source))
    error = float((a - r).square().sum())
    if not error or a.shape != h.shape:
        return ""
    for words, changed in (
        ("has lost its residual: the block's input is not added", a + h),
        ("adds the block's input twice", a - h),
    ):
        if float((changed - r).square().sum()) < EXPLAINED * error:
            return words
    if float((a - h).square().sum()) < EXPLAINED**4 * float((r - h).square().sum()):
        return "is its input: the block adds nothing"
    return describe_factor(a, r)


def describe_factor(actual: Tensor, expected: Tensor) -> str:
    """Say which factor, or turned sign, makes up for most of an error; empty if none does."""
    a, r = actual.double(), expected.double()
    factor = float((a * r).sum() / r.square().sum())
    if not float((a - factor * r).square().sum()) < EXPLAINED * float((a - r).square().sum()):
        return ""
    if abs(factor + 1) < 0.1:
        return "has the opposite sign"
    return f"is {factor:.4g} times the expected: a scale or factor is off"
