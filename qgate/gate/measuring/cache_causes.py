"""Words for faults of a quantized cache: what was cast, stored, or read by the wrong query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from qgate.formats import Quantizer
from qgate.formats.definition import quantize
from qgate.formats.options import Floats
from qgate.gate.measuring.attention_causes import value_words
from qgate.gate.measuring.cache_checks import ExpectedTrace, array, row_errors
from qgate.modes.attention import definition
from qgate.modes.attention.choices import TensorChoice
from qgate.modes.attention.planning import range_site

Candidate = tuple[str, Callable[[], Floats | None]]
_OTHER = {"keys": "values", "values": "keys", "queries": "keys"}
_MARGIN = 16.0
"""Times the noise of the definition up to which another context is called the run's."""


def source_words(expected: ExpectedTrace, side: str) -> str:
    """Say what was cast in the place of keys or values."""
    cast_tensor = expected.trace.sources.get(side)
    if cast_tensor is None:
        return f"no {side} are cast: nothing is quantized here"
    actual, of = array(cast_tensor), expected.of
    if actual.shape != expected.sources[side].shape:
        return f"{actual.shape[2]} tokens of {side} are cast, {expected.trace.length} were given"
    is_before = of.choices.before_rope
    candidates: list[Candidate] = [
        (f"{_OTHER[side]} are cast in the place of {side}", lambda: expected.sources[_OTHER[side]])
    ]
    if side == "queries":
        words = "queries are quantized before RoPE, after RoPE is meant"
        candidates.append((words, lambda: array(expected.trace.queries)))
    if side == "keys":
        meant = "before RoPE is meant" if is_before else "after RoPE is meant"
        words = f"keys are quantized {'after' if is_before else 'before'} RoPE, {meant}"
        candidates.append((words, lambda: expected.exact_keys if is_before else expected.keys))
        for shift, name in ((1, "after"), (-1, "before")):
            turned = definition.rotary(expected.keys, of.rope_base, shift)
            candidates.append((f"keys are turned by the position {name} their own",
                               lambda turned=turned: turned))  # type: ignore[misc]  # fmt: skip
    for words, make in candidates:
        other = make()
        if other is None or other.shape != actual.shape:
            continue
        if row_errors(actual, other).max() <= expected.position_noise:
            return words
    return f"the {side} that are cast are not those of the projection"


def read_words(expected: ExpectedTrace, side: str) -> str:
    """Say what the last query read in the place of keys or values, and where."""
    actual, right = array(expected.trace.read[side]), expected.read(side)
    if actual.shape != right.shape:
        return f"{side}: {_length_words(actual, right)}"
    wrong = np.asarray(expected.wrong_reads(side).any(-1))
    for words, make in _read_candidates(expected, side):
        other = make()
        if other is None or other.shape != actual.shape:
            continue
        same = row_errors(actual, other) <= expected.position_noise
        # Of a shift the first row has nothing to compare with.
        if same[wrong].mean() >= 1 - 1.5 / max(1, expected.trace.length):
            return f"{side} {words}{places(wrong)}"
    return f"{side} are not what the definition stores{places(wrong)}"


def _read_candidates(expected: ExpectedTrace, side: str) -> Iterator[Candidate]:
    of, source = expected.of, expected.cast(side)
    choice: TensorChoice | None = getattr(of.choices, side)
    heads = source.shape[1]

    def turned(stored: Floats) -> Floats:
        return of.turned(stored) if side == "keys" and of.choices.before_rope else stored

    right = expected.read(side)
    yield (
        f"and {_OTHER[side]} are swapped",
        lambda: expected.read(_OTHER[side]),
    )
    yield "are not quantized", lambda: turned(source)
    yield "are stored one token late", lambda: np.roll(right, 1, 2)
    yield "are stored one token early", lambda: np.roll(right, -1, 2)
    for shift in range(1, len(source)):
        yield "are those of another request of the batch", lambda s=shift: np.roll(right, s, 0)  # type: ignore[misc]
    yield (
        "are those of the request before, which the cache served",
        lambda: _earlier(expected, side),
    )
    if choice is None:
        return
    if of.choices.rotated and side == "keys":
        yield "are not rotated before they are quantized", lambda: definition.stored(source, choice)
    if choice.is_static:
        ranges = of.ranges(side, heads)
        for shift in range(1, len(ranges)):
            yield (
                "have the scale of another head",
                lambda s=shift: turned(  # type: ignore[misc]
                    of.stored(side, source, ranges[s:] + ranges[:s])
                ),
            )
        yield (
            f"have the scale of the {_OTHER[side]}",
            lambda: turned(of.stored(side, source, of.ranges(_OTHER[side], heads))),
        )
        top = float(Quantizer(choice.format).format.element.max)
        yield (
            "have a scale of 1, the calibrated one is forgotten",
            lambda: turned(of.stored(side, source, [top] * max(1, len(ranges)))),
        )
        for factor, words in ((2.0, "twice"), (0.5, "half")):
            yield (
                f"have {words} their scale",
                lambda f=factor: turned(  # type: ignore[misc]
                    of.stored(side, source, [r * f for r in ranges])
                ),
            )
        if len(ranges) > 1:
            whole = [of.calibrated[range_site(of.at, "values", None)]]
            per_tensor = replace(choice, share="tensor")
            yield (
                "have one scale for all heads",
                lambda: turned(
                    definition.stored(
                        source, per_tensor, [max(ranges)] if side == "keys" else whole
                    )
                ),
            )
    elif choice.share != "format":
        yield "have the scale of the first token", lambda: turned(_of_token(source, choice, 0))
        yield "have one scale for all tokens", lambda: turned(_of_token(source, choice, None))


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


def places(wrong: np.ndarray, axes: Sequence[str] = ("request", "head", "token")) -> str:
    """Name the requests, heads and tokens that are wrong, where that is not all of them."""
    names = []
    for axis, name in enumerate(axes):
        other_axes = tuple(number for number in range(wrong.ndim) if number != axis)
        listed = np.flatnonzero(wrong.any(other_axes))
        if len(listed) == wrong.shape[axis]:
            continue
        first, last = int(listed[0]), int(listed[-1])
        if len(listed) == 1:
            names.append(f"{name} {first}")
        elif last - first + 1 == len(listed):
            names.append(f"{name}s {first} to {last}")
        else:
            names.append(f"{len(listed)} {name}s from {first} to {last}")
    return f" ({', '.join(names)})" if names else ""


def context_words(expected: ExpectedTrace) -> str:
    """Say what queries attend to in the place of what they should, and from which token on."""
    errors = expected.context_errors()
    if not np.isfinite(errors).all():
        return "the context has another shape, or values that are not finite"
    wrong = errors > expected.limit
    if expected.of.choices.weights is not None:
        return value_words(expected)
    for words, make in _context_candidates(expected):
        other = make()
        if other is not None and bool(
            (expected.context_errors(other)[wrong] <= _MARGIN * expected.limit).all()
        ):
            return f"{words}{places(wrong)}"
    return f"is not attention over what the cache holds{places(wrong)}"


def _context_candidates(expected: ExpectedTrace) -> Iterator[Candidate]:
    choices, length = expected.of.choices, expected.trace.length
    keys, values = expected.read("keys"), expected.read("values")

    def exact_with(**changed: int) -> Callable[[], Floats]:
        other = replace(choices, **changed)  # type: ignore[arg-type]
        return lambda: expected.context_of(keys, values, definition.exact_mask(other, length))

    if choices.window:
        for step, words in ((-1, "one token short"), (1, "one token long")):
            text = f"the window of tokens that stay as they are is {words}"
            yield text, exact_with(window=choices.window + step)
        yield "no window of tokens stays as it is", exact_with(window=0)
    if choices.sinks:
        yield "the sinks are quantized, they stay as they are", exact_with(sinks=0)
        for step, words in ((-1, "one sink is missing"), (1, "one sink too many is kept")):
            yield words, exact_with(sinks=choices.sinks + step)
    inside = np.zeros((length, length), bool)
    start = 0
    for count in expected.trace.chunks:
        inside[start : start + count, start : start + count] = True
        start += count
    yield (
        "queries read the tokens of their own chunk unquantized",
        lambda: expected.context_of(keys, values, expected.exact | inside),
    )
    yield (
        "queries read the cache unquantized",
        lambda: expected.context_of(keys, values, np.ones_like(inside)),
    )
    yield (
        "queries do not see their own token: the cache is one token late",
        lambda: _late(expected, 0),
    )
    yield "queries see the token after their own", lambda: _late(expected, 2)
    yield "keys and values are swapped", lambda: expected.context_of(values, keys, expected.exact)
    yield (
        "keys are those of another head",
        lambda: expected.context_of(np.roll(keys, 1, 1), values, expected.exact),
    )
    yield (
        "values are those of another head",
        lambda: expected.context_of(keys, np.roll(values, 1, 1), expected.exact),
    )
    for shift in range(1, len(keys)):
        yield (
            "keys and values are those of another request",
            lambda s=shift: expected.context_of(  # type: ignore[misc]
                np.roll(keys, s, 0), np.roll(values, s, 0), expected.exact
            ),
        )
    yield (
        "scores are not divided by the root of the width",
        lambda: expected.context_of(keys, values, expected.exact, scaling=1.0),
    )


def _late(expected: ExpectedTrace, seen: int) -> Floats:
    """Return the context of queries that see fewer or more tokens than their own and before."""
    sides = expected.read("keys"), expected.read("values")
    return expected.context_of(*sides, expected.exact, last=seen - 1)
