"""Words for faults of a quantized cache: what was cast, stored, or read by the wrong query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from qgate.formats import Quantizer
from qgate.formats.definition import quantize
from qgate.formats.options import Floats
from qgate.gate.serving.cache_checks import ExpectedTrace
from qgate.gate.serving.score_causes import value_words
from qgate.gate.serving.served_state import (
    MARGIN,
    Candidate,
    array,
    first_words,
    places,
    row_errors,
)
from qgate.modes.attention import definition
from qgate.modes.attention.choices import TensorChoice
from qgate.modes.attention.planning import range_site

_OTHER = {"keys": "values", "values": "keys", "queries": "keys"}


def source_words(expected: ExpectedTrace, side: str) -> str:
    """Say what was cast in the place of keys or values."""
    cast_tensor = expected.trace.sources.get(side)
    noun = expected.of.noun(side)
    if cast_tensor is None:
        return f"no {noun} are cast: nothing is quantized here"
    actual = array(cast_tensor)
    if actual.shape != expected.sources[side].shape:
        if expected.of.ups is not None and actual.shape[1] > 1:
            return f"{noun} are quantized after their up-projection, before it is meant"
        return f"{actual.shape[2]} tokens of {noun} are cast, {expected.trace.length} were given"
    words = first_words(
        _source_candidates(expected, side),
        lambda other: (
            other.shape == actual.shape
            and bool(row_errors(actual, other).max() <= expected.position_noise)
        ),
    )
    return words or f"the {noun} that are cast are not those of the projection"


def _source_candidates(expected: ExpectedTrace, side: str) -> Iterator[Candidate]:
    is_before = expected.of.choices.before_rope
    noun, other = expected.of.noun(side), expected.of.noun(_OTHER[side])
    yield f"{other} are cast in the place of {noun}", expected.sources[_OTHER[side]]
    if side == "queries":
        words = "queries are quantized before RoPE, after RoPE is meant"
        yield words, array(expected.trace.queries)
    if side == "keys":
        meant = "before RoPE is meant" if is_before else "after RoPE is meant"
        words = f"{noun} are quantized {'after' if is_before else 'before'} RoPE, {meant}"
        yield words, expected.exact_keys if is_before else expected.keys
        for shift, name in ((1, "after"), (-1, "before")):
            turned = expected.of.turned(expected.keys, shift)
            yield f"{noun} are turned by the position {name} their own", turned


def read_words(expected: ExpectedTrace, side: str) -> str:
    """Say what the last query read in the place of keys or values, and where."""
    actual, right = array(expected.trace.read[side]), expected.read(side)
    noun = expected.of.noun(side)
    if actual.shape != right.shape:
        return f"{noun}: {_length_words(actual, right)}"
    wrong = np.asarray(expected.wrong_reads(side).any(-1))
    # Of a shift the first row has nothing to compare with.
    least = 1 - 1.5 / max(1, expected.trace.length)
    words = first_words(
        _read_candidates(expected, side),
        lambda other: (
            other.shape == actual.shape
            and (row_errors(actual, other) <= expected.position_noise)[wrong].mean() >= least
        ),
    )
    return f"{noun} {words or 'are not what the definition stores'}{places(wrong)}"


def _read_candidates(expected: ExpectedTrace, side: str) -> Iterator[Candidate]:
    of, source = expected.of, expected.cast(side)
    choice: TensorChoice | None = getattr(of.choices, side)
    heads = source.shape[1]

    def turned(stored: Floats) -> Floats:
        return of.turned(stored) if side == "keys" and of.choices.before_rope else stored

    right = expected.read(side)
    other = of.noun(_OTHER[side])
    yield f"and {other} are swapped", expected.read(_OTHER[side])
    yield "are not quantized", turned(source)
    yield "are stored one token late", np.roll(right, 1, 2)
    yield "are stored one token early", np.roll(right, -1, 2)
    for shift in range(1, len(source)):
        yield "are those of another request of the batch", np.roll(right, shift, 0)
    yield "are those of the request before, which the cache served", _earlier(expected, side)
    if choice is None:
        return
    if of.choices.rotates(side):
        yield "are not rotated before they are quantized", definition.stored(source, choice)
    if choice.is_static:
        ranges = of.ranges(side, heads)

        def with_ranges(reaches: list[float]) -> Floats:
            return turned(of.stored(side, source, reaches))

        for shift in range(1, len(ranges)):
            yield "have the scale of another head", with_ranges(ranges[shift:] + ranges[:shift])
        yield f"have the scale of the {other}", with_ranges(of.ranges(_OTHER[side], heads))
        top = float(Quantizer(choice.format).format.element.max)
        words = "have a scale of 1, the calibrated one is forgotten"
        yield words, with_ranges([top] * max(1, len(ranges)))
        for factor, words in ((2.0, "twice"), (0.5, "half")):
            yield f"have {words} their scale", with_ranges([reach * factor for reach in ranges])
        if len(ranges) > 1:
            whole = of.calibrated[range_site(of.at, "values", None)]
            reaches = [max(ranges) if side == "keys" else whole]
            per_tensor = definition.stored(source, replace(choice, share="tensor"), reaches)
            yield "have one scale for all heads", turned(per_tensor)
    elif choice.share != "format":
        yield "have the scale of the first token", turned(_of_token(source, choice, 0))
        yield "have one scale for all tokens", turned(_of_token(source, choice, None))


def _earlier(expected: ExpectedTrace, side: str) -> Floats | None:
    """Return what the cache stored of the request that it served before."""
    if expected.trace.earlier is None:
        return None
    keys, values = (array(tensor) for tensor in expected.trace.earlier)
    if side == "keys":
        source = keys if expected.of.choices.before_rope else expected.of.turned(keys)
    else:
        source = values
    stored = expected.of.stored(side, source.astype(np.float32).astype(np.float64))
    is_before = side == "keys" and expected.of.choices.before_rope
    return expected.of.turned(stored) if is_before else stored


def _of_token(source: Floats, choice: TensorChoice, token: int | None) -> Floats:
    """Quantize all tokens with the scales of one, or of the largest of all."""
    batch, heads, tokens, width = source.shape
    block = width if choice.share == "token_head" else min(choice.group, width)
    if choice.share == "token":
        groups = source.transpose(0, 2, 1, 3).reshape(batch, tokens, 1, heads * width)
    else:
        groups = source.reshape(batch, heads, tokens, -1, block)
        groups = groups.transpose(0, 1, 3, 2, 4).reshape(-1, tokens, 1, block)
    result = np.empty_like(groups)
    for number, group in enumerate(groups):
        largest = np.abs(group if token is None else group[token]).max()
        scale = float(np.float32(largest / Quantizer(choice.format).format.element.max)) or 1.0
        result[number] = quantize(group, Quantizer(choice.format, scale=scale))
    if choice.share == "token":
        return result.reshape(batch, tokens, heads, width).transpose(0, 2, 1, 3)
    shaped = result.reshape(batch, heads, -1, tokens, block).transpose(0, 1, 3, 2, 4)
    return shaped.reshape(source.shape)


def _length_words(actual: Floats, right: Floats) -> str:
    count, length = actual.shape[2], right.shape[2]
    words = f"a query reads {count} tokens where {length} were written"
    if count <= length or actual.shape[:2] != right.shape[:2]:
        return words
    same = (actual[:, :, :length] == right).all((0, 1, 3))
    first = length if same.all() else int(np.argmin(same))
    if first and np.array_equal(actual[:, :, first], right[:, :, first - 1]):
        words += f": token {first - 1} twice"
    return words


def context_words(expected: ExpectedTrace) -> str:
    """Say what queries attend to in the place of what they should, and from which token on."""
    errors = expected.context_errors()
    if not np.isfinite(errors).all():
        return "the context has another shape, or values that are not finite"
    wrong = errors > expected.limit
    if expected.of.choices.weights is not None:
        return value_words(expected)
    words = first_words(
        _context_candidates(expected),
        lambda other: bool(
            (expected.context_errors(other)[wrong] <= MARGIN * expected.limit).all()
        ),
    )
    return f"{words or 'is not attention over what the cache holds'}{places(wrong)}"


def _context_candidates(expected: ExpectedTrace) -> Iterator[Candidate]:
    choices, length = expected.of.choices, expected.trace.length
    keys, values = expected.read("keys"), expected.read("values")

    exact = expected.exact

    def exact_with(**changed: int) -> Floats:
        other = replace(choices, **changed)  # type: ignore[arg-type]
        return expected.context_of(keys, values, definition.exact_mask(other, length))

    if choices.window:
        for step, words in ((-1, "one token short"), (1, "one token long")):
            text = f"the window of tokens that stay as they are is {words}"
            yield text, exact_with(window=choices.window + step)
        yield "no window of tokens stays as it is", exact_with(window=0)
    if choices.sinks:
        yield "the sinks are quantized, they stay as they are", exact_with(sinks=0)
        for step, words in ((-1, "one sink is missing"), (1, "one sink too many is kept")):
            yield words, exact_with(sinks=choices.sinks + step)
    if window := expected.of.window:
        for step, words in ((-1, "one token short"), (1, "one token long")):
            seen = expected.context_of(keys, values, exact, window=window + step)
            yield f"the sliding window is {words}", seen
        yield (
            "no sliding window ends what queries see",
            expected.context_of(keys, values, exact, window=length),
        )
    inside = np.zeros((length, length), bool)
    start = 0
    for count in expected.trace.chunks:
        inside[start : start + count, start : start + count] = True
        start += count
    words = "queries read the tokens of their own chunk unquantized"
    yield words, expected.context_of(keys, values, exact | inside)
    everything = np.ones_like(inside)
    yield "queries read the cache unquantized", expected.context_of(keys, values, everything)
    if expected.of.ups is not None:
        yield "latents are read unquantized", expected.context_of(keys, expected.values, exact)
    words = "queries do not see their own token: the cache is one token late"
    yield words, expected.context_of(keys, values, exact, last=-1)
    words = "queries see the token after their own"
    yield words, expected.context_of(keys, values, exact, last=1)
    yield "are zero: a head is dropped", np.zeros_like(expected.context)
    if expected.trace.gate is not None:
        ungated = expected.context / np.maximum(array(expected.trace.gate), np.finfo(float).tiny)
        yield "the context is not gated", ungated
    if expected.of.cap:
        yield "scores are not capped", expected.context_of(keys, values, exact, cap=0.0)
    if expected.of.ups is None:
        yield "keys and values are swapped", expected.context_of(values, keys, exact)
    turned_keys, turned_values = np.roll(keys, 1, 1), np.roll(values, 1, 1)
    yield "keys are those of another head", expected.context_of(turned_keys, values, exact)
    yield "values are those of another head", expected.context_of(keys, turned_values, exact)
    for shift in range(1, len(keys)):
        sides = np.roll(keys, shift, 0), np.roll(values, shift, 0)
        yield "keys and values are those of another request", expected.context_of(*sides, exact)
    words = "scores are not divided by the root of the width"
    yield words, expected.context_of(keys, values, exact, scaling=1.0)
    if expected.of.scaling is not None:
        words = "scores have the factor of their width, and not that of the layer"
        usual = expected.turned.shape[-1] ** -0.5
        yield words, expected.context_of(keys, values, exact, scaling=usual)
