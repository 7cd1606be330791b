"""Words for faults of scores and weights: forgotten scales, other heads, tokens seen too early."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qgate.formats import Quantizer
from qgate.formats.options import Floats
from qgate.gate.serving.cache_checks import ExpectedTrace
from qgate.gate.serving.served_state import MARGIN, array
from qgate.modes.attention import definition

_UNEXPLAINED = 1e-3
"""The share of a difference that one factor may leave."""
_NEAR = 1e-3


def score_words(expected: ExpectedTrace) -> str:
    """Say what scores are in the place of the product of queries and keys."""
    actual, right = expected._seen(expected.actual_scores), expected._seen(expected.scores)
    if words := window_words(expected):
        return words
    if not np.isfinite(actual).all():
        return "scores are not finite"
    factors = _factors(actual, right)
    if factors is not None:
        return _factor_words(expected, factors)
    for words, keys, scaling in _other_scores(expected):
        other = expected.scores_of(keys, scaling=scaling)
        if expected.score_errors(other).max() <= MARGIN * expected.score_limit:
            return words
    exact = expected.scores_of(expected.exact_keys, queries=expected.turned)
    if expected.score_errors(exact).max() <= MARGIN * expected.score_limit:
        return "scores are those of queries and keys that are not quantized"
    return "scores are not the product of what is asked and read"


def softmax_words(expected: ExpectedTrace) -> str:
    """Say what weights are in the place of the softmax of the scores."""
    return window_words(expected) or "weights are not the softmax of the scores"


def window_words(expected: ExpectedTrace) -> str:
    """Say which other window ends what queries see; empty where it is the right one, or none."""
    window = expected.of.window
    if not window:
        return ""
    causal = np.tril(np.ones_like(expected.visible))
    finite = np.isfinite(array(expected.trace.squares["scores"])).all((0, 1)) & causal
    for step, words in ((-1, "one token short"), (1, "one token long")):
        if np.array_equal(finite, causal & ~np.tril(causal, -window - step)):
            return f"the sliding window is {words}"
    return "no sliding window ends what queries see" if np.array_equal(finite, causal) else ""


def _factors(actual: Floats, right: Floats) -> Floats | None:
    """Return the factor of each head if factors alone explain the scores; None if not."""
    products = np.square(right).sum((0, 2, 3))
    factors = np.asarray((actual * right).sum((0, 2, 3)) / np.maximum(products, 1e-300))
    remainder = actual - right * factors[None, :, None, None]
    difference = np.square(actual - right).sum()
    return factors if np.square(remainder).sum() <= _UNEXPLAINED * difference else None


def _factor_words(expected: ExpectedTrace, factors: Floats) -> str:
    width = expected.turned.shape[-1]
    scales = {side: _scales(expected, side, len(factors)) for side in ("queries", "keys")}
    listed: list[tuple[str, Floats]] = [
        ("scores are not divided by the root of the width", np.full(len(factors), width**0.5))
    ]
    for side, scale in scales.items():
        if scale is not None:
            listed.append((f"the scale of the {side} is 1, or forgotten", 1 / scale))
            listed.append((f"the scale of the {side} is applied twice", scale))
    if scales["queries"] is not None and scales["keys"] is not None:
        product = scales["queries"] * scales["keys"]
        listed.append(("the scales of queries and keys are 1, or forgotten", 1 / product))
        ratio = scales["keys"] / scales["queries"]
        listed.append(("the queries have the scale of the keys", ratio))
        listed.append(("the keys have the scale of the queries", 1 / ratio))
    for words, right in listed:
        if np.allclose(factors, right, rtol=_NEAR):
            return f"{words}: scores are {_number(factors)} times what they should be"
    return f"scores are {_number(factors)} times what they should be"


def _number(factors: Floats) -> str:
    low, high = float(factors.min()), float(factors.max())
    return f"{low:.4g}" if high - low <= _NEAR * abs(high) else f"{low:.4g} to {high:.4g}"


def _scales(expected: ExpectedTrace, side: str, heads: int) -> Floats | None:
    """Return the calibrated scale of each head of the scores; None for scales made on the way."""
    choice = expected.of.choices.chosen.get(side)
    if choice is None or not choice.is_static:
        return None
    count = expected.turned.shape[1] if side == "queries" else expected.keys.shape[1]
    ranges = np.array(expected.of.ranges(side, count))
    scales = ranges / float(Quantizer(choice.format).format.element.max)
    return np.repeat(scales, heads // len(scales))


def _other_scores(expected: ExpectedTrace) -> Iterator[tuple[str, Floats, float | None]]:
    keys = expected.read("keys")
    yield "keys are those of another head", np.roll(keys, 1, 1), None
    yield "keys are one token late", _late(keys), None
    yield "keys are not quantized", expected.exact_keys, None
    for shift in range(1, len(keys)):
        yield "keys are those of another request", np.roll(keys, shift, 0), None


def _late(side: Floats) -> Floats:
    """Return a side whose tokens stand one later, behind the first one twice."""
    return np.concatenate([side[:, :, :1], side[:, :, :-1]], 2)


def weight_words(expected: ExpectedTrace, actual: Floats) -> str:
    """Say how weights were cast in the place of their own cast."""
    choice = expected.of.choices.weights
    assert choice is not None
    source = expected._seen(np.asarray(expected.trace.squares["weights"].double().numpy()))
    if np.array_equal(actual, source):
        return "weights are not quantized"
    element = Quantizer(choice.format).format.element
    for factor, words in ((element.max, "a scale of 1"), (2.0, "twice their scale"), (0.5, "half")):
        if choice.share == "unit":
            other = expected.of.stored("weights", source / factor) * factor
            if np.allclose(expected._seen(other), actual, rtol=_NEAR, atol=0):
                return f"weights have {words}"
    return "weights are not what the definition of their cast gives"


def value_words(expected: ExpectedTrace) -> str:
    """Say what the context is in the place of the product of weights and values."""
    actual, right = expected.actual_context, expected.context
    right = right if expected.of.choices.output else expected.gated(right)
    values = expected.read("values")
    factors = _factors(actual, right)
    if factors is not None:
        scales = _scales(expected, "values", len(factors))
        number = f"the context is {_number(factors)} times what it should be"
        if scales is not None and np.allclose(factors, 1 / scales, rtol=_NEAR):
            return f"the scale of the values is 1, or forgotten: {number}"
        return number
    candidates = {
        "values are those of another head": np.roll(values, 1, 1),
        "values are one token late": _late(values),
        "values are not quantized": expected.values,
        "values are those of another request": np.roll(values, 1, 0),
        "keys are read in the place of values": expected.read("keys"),
    }
    for words, other in candidates.items():
        context = definition.context(expected.weights, other, expected.values, expected.exact)
        if expected.context_errors(context).max() <= MARGIN * expected.limit:
            return words
    plain = definition.softmax(expected.actual_scores)
    context = definition.context(plain, values, expected.values, expected.exact)
    if expected.context_errors(context).max() <= MARGIN * expected.limit:
        return "weights are read before they are quantized"
    return "the context is not the product of weights and values"
