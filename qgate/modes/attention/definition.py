"""The readable definition of attention over a quantized cache, in plain numpy and float64.

No code under test runs here: formats are those of `qgate.formats.definition`, and a query's context
is written out from what it may see. Arrays are (batch, heads, tokens, width).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qgate.formats import Quantizer
from qgate.formats.definition import quantize
from qgate.formats.options import Floats
from qgate.modes.attention.choices import AttentionChoices, TensorChoice


def stored(
    source: Floats,
    choice: TensorChoice | None,
    ranges: Sequence[float] = (),
    *,
    rotated: bool = False,
) -> Floats:
    """Return one side of attention, quantized; `ranges` are calibrated, one or one per head."""
    if choice is None:
        return source
    batch, heads, tokens, width = source.shape
    options = dict(choice.options)
    if choice.share == "unit":
        return quantize(
            source, Quantizer(choice.format, scale=1 / _largest(choice.format), **options)
        )
    if rotated:
        power = 1
        while width % (2 * power) == 0:
            power *= 2
        options["rotation"] = [1] * power
    if choice.is_static:
        top = _largest(choice.format)
        scales = [ranges[0] / top] if choice.share == "tensor" else [r / top for r in ranges]
        if choice.share == "head":
            scales = [float(np.float32(scale)) for scale in scales]
        of_heads = [Quantizer(choice.format, scale=scales[h % len(scales)], **options)
                    for h in range(heads)]  # fmt: skip
        return np.stack([quantize(source[:, h], q) for h, q in enumerate(of_heads)], 1)
    if choice.share == "format":
        return quantize(source, Quantizer(choice.format, axis=-1, **options))
    if choice.share == "token":
        whole = Quantizer(
            choice.format, granularity="block", block=heads * width, axis=-1, **options
        )
        rows = source.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * width)
        return quantize(rows, whole).reshape(batch, tokens, heads, width).transpose(0, 2, 1, 3)
    block = width if choice.share == "token_head" else min(choice.group, width)
    q = Quantizer(choice.format, granularity="block", block=block, axis=-1, **options)
    return quantize(source, q)


def _largest(fmt: str) -> float:
    return float(Quantizer(fmt).format.element.max)


def exact_mask(choices: AttentionChoices, tokens: int) -> np.ndarray:
    """Return for each query (rows) which tokens (columns) it reads as they are."""
    exact = np.zeros((tokens, tokens), bool)
    for query in range(tokens):
        for token in range(query + 1):
            exact[query, token] = token < choices.sinks or query - token < choices.window
    return exact


def rotary(
    x: Floats,
    base: float,
    start: int = 0,
    speeds: Sequence[float] = (),
    width: int | None = None,
    factor: float = 1.0,
    *,
    in_pairs: bool = False,
) -> Floats:
    """Turn (…, tokens, channels) by position: pairs of a channel and the one half the width later.

    speeds    radians per token of each pair, where the base does not tell them
    width     of the first channels, those that turn; all where it is None
    factor    of the channels that turn
    in_pairs  True where the two channels of a pair are neighbors
    """
    tokens = x.shape[-2]
    half = (x.shape[-1] if width is None else width) // 2
    turns = np.array(speeds) if speeds else base ** (-np.arange(half) / max(half, 1))
    angles = (start + np.arange(tokens))[:, None] * turns[None, :]
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    low, high, plain = np.split(x, [half, 2 * half], -1)
    if in_pairs:
        low, high = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    first, second = low * cos - high * sin, high * cos + low * sin
    if in_pairs:
        paired = np.stack([first, second], -1).reshape(*first.shape[:-1], 2 * half)
        return np.concatenate([paired, plain], -1)
    return np.concatenate([first, second, plain], -1)


def expanded(
    rope_parts: Floats, latents: Floats, up_keys: Floats, up_values: Floats
) -> tuple[Floats, Floats]:
    """Return the keys and values of all heads that latents stand for; RoPE parts come first."""
    keys = np.stack([latents[:, 0] @ up.T for up in up_keys], 1)
    values = np.stack([latents[:, 0] @ up.T for up in up_values], 1)
    shared = np.broadcast_to(rope_parts, (*keys.shape[:-1], rope_parts.shape[-1]))
    return np.concatenate([shared, keys], -1), values


def scores(
    queries: Floats,
    keys: Floats,
    exact_keys: Floats,
    exact: np.ndarray,
    scaling: float | None = None,
    last: int = 0,
    window: int = 0,
    cap: float = 0.0,
) -> Floats:
    """Return what softmax reads, (batch, heads, queries, tokens); -inf of tokens that are not seen.

    A query sees the tokens up to its own, or `last` after it: so many as `window` says, 0 for all.
    keys are read from the cache, the exact ones where `exact` is true; all are turned. Scores
    approach `cap`, where it is not 0.
    """
    batch, heads, tokens, width = queries.shape
    shared = heads // keys.shape[1]
    scaling = width**-0.5 if scaling is None else scaling
    later = np.triu(np.ones((tokens, tokens), bool), 1 + last)
    later[0, 0] = False
    if window:
        later |= np.tril(np.ones_like(later), -window)
    result = np.empty((batch, heads, tokens, tokens))
    for head in range(heads):
        of = head // shared
        products = queries[:, head] @ keys[:, of].transpose(0, 2, 1)
        originals = queries[:, head] @ exact_keys[:, of].transpose(0, 2, 1)
        products = np.where(exact, originals, products)
        products = products * scaling
        if cap:
            products = cap * np.tanh(products / cap)
        result[:, head] = np.where(later, -np.inf, products)
    return result


def softmax(scores: Floats) -> Floats:
    """Return weights that add up to 1 along the tokens."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def context(weights: Floats, values: Floats, exact_values: Floats, exact: np.ndarray) -> Floats:
    """Return the weighed values of every query, the exact ones where it reads them."""
    batch, heads, tokens, _ = weights.shape
    shared = heads // values.shape[1]
    result = np.empty((batch, heads, tokens, values.shape[-1]))
    for head in range(heads):
        of = head // shared
        result[:, head] = np.where(exact, 0, weights[:, head]) @ values[:, of]
        result[:, head] += np.where(exact, weights[:, head], 0) @ exact_values[:, of]
    return result
