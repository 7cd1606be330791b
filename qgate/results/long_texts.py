"""Figures of a mode along one long text: where it stops predicting, and words for summaries."""

from __future__ import annotations

import math
from collections.abc import Mapping

from qgate.results.pictures import LongTextPicture
from qgate.text import times_figure

LONG_TEXT = "long_text"
"""The site of a mode's figures along one long text."""
_NOISE_BITS = 1e-4


def predicted_tokens(picture: LongTextPicture) -> int:
    """Count the tokens before the loss leaves the interval of the reference's for good.

    It has left it in a stretch if its mean there is above the 95 % interval of the reference's
    mean, by more than float noise.
    """
    pairs = zip(picture["reference"], picture["half_95"], strict=True)
    highest = [mean + half + _NOISE_BITS for mean, half in pairs]
    within = [b <= high for b, high in zip(picture["bits"], highest, strict=True)]
    last = max((number for number, is_within in enumerate(within, 1) if is_within), default=0)
    return last * picture["stretch"]


def long_text_words(values: Mapping[str, float | None]) -> str:
    """Write how the error grows along a long text, and where the mode stops predicting it."""
    names = ("compared_tokens", "kl_divergence", "error_growth", "predicted_tokens")
    figures = [values.get(name) for name in names]
    if not all(value is not None and math.isfinite(value) for value in figures):
        return ""
    tokens, kl, growth, predicted = (float(value or 0) for value in figures)
    text = f"KL {kl:.1e} along {tokens:,.0f} tokens, {times_figure(2**growth)}x at the end"
    return text if predicted >= tokens else f"{text}, stops predicting at token {predicted:,.0f}"
