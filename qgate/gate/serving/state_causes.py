"""Words for faults of recurrent states: what was stored, and what the next token read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from qgate.formats import Quantizer
from qgate.formats.definition import quantize
from qgate.formats.options import Floats
from qgate.gate.serving.served_state import MARGIN, Candidate, first_words, places
from qgate.gate.serving.state_checks import ExpectedState
from qgate.modes.attention.casting import largest_value
from qgate.modes.states import definition
from qgate.modes.states.choices import StateChoice
from qgate.text import listed

_MOST = 0.98
"""Share of the wrong values that a fault has to explain: others may be between two of its codes."""
_BF16 = Quantizer("bf16")


def stored_words(expected: ExpectedState) -> str:
    """Say what was stored in the place of what should be, and where."""
    wrong, actual = expected.wrong, expected.actual
    words = first_words(
        _stored_candidates(expected),
        lambda other: float((actual == other)[wrong].mean()) >= _MOST,
    )
    return f"the state {words or 'is not what the definition stores'}{_where(expected, wrong)}"


def _stored_candidates(expected: ExpectedState) -> Iterator[Candidate]:
    of, source, tokens = expected.of, expected.source, expected.trace.tokens
    choice, right = of.choice, expected.stored
    nearest = replace(choice, stochastic=False)
    yield "is not quantized", source
    if choice.stochastic:
        words = "is rounded to the nearest, at random is meant"
        yield words, of.stored(source, tokens, nearest)
        words = "is truncated, rounding at random is meant"
        yield words, _truncated(source, nearest, of.ranges.get(of.site))
        words = "is rounded by the random numbers of token 0"
        yield words, of.stored(source, [0] * len(tokens))
        for step, name in ((1, "after"), (-1, "before")):
            words = f"is rounded by the random numbers of the token {name} its own"
            yield words, of.stored(source, [max(0, token + step) for token in tokens])
        for site in _other_sites(expected):
            words = f"is rounded by the random numbers of {site}"
            yield words, of.stored(source, tokens, site=site)
    else:
        words = "is truncated, not rounded to the nearest"
        yield words, _truncated(source, choice, of.ranges.get(of.site))
    if choice.remainder:
        rounded = of.stored(source, tokens, replace(choice, remainder=""))
        yield "lacks its rounding error, which is to be stored as well", rounded
        yield "has its rounding error subtracted, not added", _single(2 * rounded - right)
    yield "is rounded to bf16 as well", quantize(right, _BF16)
    yield from _scale_candidates(expected)


def _scale_candidates(expected: ExpectedState) -> Iterator[Candidate]:
    of, source, tokens = expected.of, expected.source, expected.trace.tokens
    if of.choice.share == "none":
        return
    axis = 2
    if of.choice.share == "token":
        yield "has the scale of the first token", _of_first(source, of.choice)
        if source.ndim == 4:
            for words, turn in _other_channels(axis, expected.heads):
                yield words, _token_scaled(source, of.choice, turn)
            scaled = _token_scaled(source, of.choice, lambda x: x.max(axis, keepdims=True))
            yield "has one scale for all channels", scaled
        return
    ranges = of.ranges[of.site]

    def with_ranges(reaches: Floats) -> Floats:
        return of.stored(source, tokens, ranges=reaches)

    words = "has a scale of 1, the calibrated one is forgotten"
    yield words, with_ranges(np.full_like(ranges, largest_value(of.choice.format)))
    for words, turn in _other_channels(0, expected.heads):
        yield words, with_ranges(turn(ranges))
    yield "has one scale for all channels", with_ranges(np.full_like(ranges, ranges.max()))
    for site in _other_sites(expected):
        yield f"has the scale of {site}", with_ranges(of.ranges[site])
    for factor, words in ((2.0, "twice"), (0.5, "half")):
        yield f"has {words} its scale", with_ranges(ranges * factor)


def _other_channels(axis: int, heads: int) -> Iterator[tuple[str, Callable[[Floats], Floats]]]:
    def moved(channels: int) -> Callable[[Floats], Floats]:
        return lambda x: np.roll(x, channels, axis)

    def moved_heads(count: int) -> Callable[[Floats], Floats]:
        return lambda x: np.roll(x, count * x.shape[axis] // heads, axis)

    for step in (1, -1):
        yield "has the scale of another channel", moved(step)
    for step in (1, -1) if heads > 1 else ():
        yield "has the scale of another head", moved_heads(step)
    yield "has the scale of another channel", lambda x: np.flip(x, axis)


def _other_sites(expected: ExpectedState) -> list[str]:
    """List the other sites of the model, those of the same state first."""
    leaf = expected.of.site.rpartition(".")[2]
    names = [site for site in expected.of.ranges if site != expected.of.site]
    same = [site for site in names if site.endswith(f".{leaf}")]
    shape = len(expected.of.ranges[expected.of.site])
    ordered = [*same, *(site for site in names if site not in same)]
    return [site for site in ordered if len(expected.of.ranges[site]) == shape]


def _single(x: Floats) -> Floats:
    return x.astype(np.float32).astype(np.float64)


def _truncated(source: Floats, choice: StateChoice, ranges: Floats | None) -> Floats:
    scales = definition.scales_of(source, choice, ranges)
    return _single(definition.nearest(source / scales, choice.format, "zero") * scales)


def _of_first(source: Floats, choice: StateChoice) -> Floats:
    scales = definition.scales_of(source[:1], choice, None)
    return _single(definition.nearest(source / scales, choice.format) * scales)


def _token_scaled(source: Floats, choice: StateChoice, turn: Callable[[Floats], Floats]) -> Floats:
    scales = turn(definition.scales_of(source, choice, None))
    return _single(definition.nearest(source / scales, choice.format) * scales)


def _where(expected: ExpectedState, wrong: np.ndarray) -> str:
    """Name the tokens, requests and channels that are wrong, where that is not all of them."""
    channels = np.asarray(wrong.reshape(*wrong.shape[:3], -1).any(-1))
    numbers = np.array(expected.trace.tokens)[np.flatnonzero(channels.any((1, 2)))]
    words = places(np.asarray(channels.any(0))[None], ("", "request", "channel"))
    return _with_tokens(words, numbers, len(wrong))


def _with_tokens(words: str, numbers: np.ndarray, total: int) -> str:
    """Put the numbers of tokens before the other places."""
    if len(numbers) == total:
        return words
    text = f"token{'s' * (len(numbers) > 1)} {listed([*map(str, numbers)], 4)}"
    return f" ({text}, {words[2:]}" if words else f" ({text})"


# What was read ------------------------------------------------------------------------------------


def read_words(expected: ExpectedState) -> str:
    """Say what tokens read in the place of what was stored, or what the output is made of."""
    errors, limit = expected.output_errors, expected.output_limit
    if expected.of.side == "conv":
        candidates = _convolved(expected)
    elif float(expected.state_errors().max()) <= expected.state_limit:
        candidates = _outputs(expected)
    else:
        candidates, errors, limit = _before(expected), expected.state_errors, expected.state_limit
    wrong = ~(errors() <= limit)
    numbers = expected.tokens[np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))]
    requests = np.asarray(wrong.reshape(len(wrong), wrong.shape[1], -1).any((0, 2)))
    names = places(requests[None], ("", "request"))
    where = _with_tokens(names, numbers, len(wrong))
    words = first_words(
        candidates, lambda other: bool((errors(other)[wrong] <= MARGIN * limit).all())
    )
    return f"{words or 'is not what follows from the states that were stored'}{where}"


def _before(expected: ExpectedState) -> Iterator[Candidate]:
    """Yield the states that follow where tokens read something else."""
    actual, source = expected.actual, expected.source

    def after(stored: Floats, back: int = 1, begin: Floats | None = None) -> Floats:
        return expected.states_after(expected.kept(stored, back, begin))

    yield "tokens read no state: it is forgotten", after(np.zeros_like(actual))
    if expected.earlier is not None:
        words = "the first token reads the state of the request before"
        yield words, after(actual, begin=expected.earlier)
    yield "tokens read the state before it is rounded", after(source)
    words = "the state is stored after it decays, and before its token is added"
    yield words, expected.states_stored_early()
    yield "tokens read the state of two tokens ago: it is one token late", after(actual, 2)
    yield "tokens read the state rounded to bf16", after(quantize(actual, _BF16))
    if expected.of.choice.remainder:
        plain = replace(expected.of.choice, remainder="")
        rounded = expected.of.stored(source, expected.trace.tokens, plain)
        yield "tokens read the state without its rounding error", after(rounded)
        words = "tokens read the state less its rounding error, which is to be added"
        yield words, after(2 * rounded - actual)
    for shift in range(1, actual.shape[1]):
        yield "tokens read the state of another request", after(np.roll(actual, shift, 1))
    for shift in (1, -1):
        yield "tokens read the state of another channel", after(np.roll(actual, shift, 2))


def _outputs(expected: ExpectedState) -> Iterator[Candidate]:
    words = "outputs are made of the state after it is rounded"
    yield words, expected.outputs_of(expected.actual[expected.places])
    words = "outputs are made of the state before their token: one token late"
    yield words, expected.outputs_of(expected.kept(expected.actual))
    words = "outputs are made of the states in another order"
    yield words, expected.outputs_of(np.flip(expected.source[expected.places], -1))


def _convolved(expected: ExpectedState) -> Iterator[Candidate]:
    """Yield convolutions over other kept tokens."""
    actual, source, convolved = expected.actual, expected.source, expected.convolved
    words = "tokens read no earlier inputs: they are forgotten"
    yield words, convolved(np.zeros_like(actual))
    if expected.earlier is not None:
        words = "the first tokens read inputs of the request before"
        yield words, convolved(actual, begin=expected.earlier)
    yield "tokens read earlier inputs before they are rounded", convolved(source)
    yield "earlier inputs are one token late", convolved(actual, 1)
    yield "earlier inputs are read in the wrong order", convolved(actual, is_turned=True)
    words = "a token reads its own input rounded, too"
    yield words, convolved(actual, now=actual[expected.places])
    yield "earlier inputs are read rounded to bf16", convolved(quantize(actual, _BF16))
    for shift in range(1, actual.shape[1]):
        yield "earlier inputs are those of another request", convolved(np.roll(actual, shift, 1))
    for shift in (1, -1):
        yield "earlier inputs are those of another channel", convolved(np.roll(actual, shift, 2))
