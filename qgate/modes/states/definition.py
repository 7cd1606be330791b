"""The readable definition of a mixer with quantized states, in plain numpy and float64.

No code under test runs here: formats are those of `qgate.formats.definition`, random numbers are
made of Python's integers, and a token's state is written out from the one that was stored before.
Arrays are (tokens, batch, channels), and (tokens, batch, channels, states) of a scan's states.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from qgate.formats import Quantizer
from qgate.formats.definition import round_by_list
from qgate.formats.options import Floats, Rounding
from qgate.modes.states.choices import StateChoice


def stored(
    source: Floats,
    choice: StateChoice,
    ranges: Floats | None,
    draws: Floats | None = None,
) -> Floats:
    """Return states as float32 numbers, as they are stored after each token.

    `ranges` are the largest calibrated magnitudes of the channels; `draws` has the random numbers
    of every element.
    """
    scales = scales_of(source, choice, ranges)
    if choice.stochastic:
        assert draws is not None
        return _single(_up_or_down(source / scales, choice.format, draws) * scales)
    result = _single(nearest(source / scales, choice.format) * scales)
    if not choice.remainder:
        return result
    lost = _single(source - result)
    steps = _token_scales(lost, choice.remainder)
    return _single(result + _single(nearest(lost / steps, choice.remainder) * steps))


def scales_of(source: Floats, choice: StateChoice, ranges: Floats | None) -> Floats:
    """Return the scales of states, shaped to divide them."""
    if choice.share == "none":
        return np.ones(())
    if choice.share == "token":
        return _token_scales(source, choice.format)
    assert ranges is not None
    reaches = ranges.max(keepdims=True) if choice.share == "tensor" else ranges
    top = Quantizer(choice.format).format.element.max
    scales = _single(reaches / top)
    return scales[:, None] if _is_scan(source) else scales


def _token_scales(source: Floats, fmt: str) -> Floats:
    """Return amax / max of the states of a channel, or of the channels of a token."""
    largest = np.abs(source).max(-1, keepdims=True)
    scales = _single(largest / Quantizer(fmt).format.element.max)
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    return np.where(largest == 0, 1.0, np.maximum(scales, smallest))


def _is_scan(source: Floats) -> bool:
    return source.ndim == 4


def _single(x: Floats) -> Floats:
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def nearest(x: Floats, fmt: str, rounding: Rounding | None = None) -> Floats:
    """Return the values of a format that are nearest, or by another rounding; all saturate."""
    return round_by_list(x, Quantizer(fmt).format.element, rounding=rounding)


def _up_or_down(x: Floats, fmt: str, draws: Floats) -> Floats:
    """Take the value below or above a magnitude: above where the draw is below its share."""
    element = Quantizer(fmt).format.element
    values = element.magnitudes()
    size = np.minimum(np.abs(x), element.max)
    below = np.minimum(values.searchsorted(size, side="right") - 1, len(values) - 2)
    low, high = values[below], values[below + 1]
    return np.copysign(np.where(draws < (size - low) / (high - low), high, low), x)


def draw(site: str, seed: int, token: int, element: int) -> float:
    """Return the random number of one element of a site after one token.

    The elements of a scan's state are counted channel by channel.
    """
    key = zlib.crc32(site.encode(), seed)
    of_element = _mix(element * 0x9E3779B9 + key)
    return (_mix(of_element ^ _mix(token + 0x85EBCA6B)) >> 8) / 2**24


def _mix(x: int) -> int:
    x %= 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def draws(site: str, seed: int, tokens: Sequence[int], shape: Sequence[int]) -> Floats:
    """Return `draw` of all elements, (tokens, 1, *shape), in wide integers of numpy."""
    mask = np.uint64(2**32 - 1)

    def mix(x: np.ndarray) -> np.ndarray:
        x = x & mask
        x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
        x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & mask
        return x ^ (x >> np.uint64(16))

    elements = np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(0x9E3779B9)
    of_elements = mix(elements + np.uint64(zlib.crc32(site.encode(), seed)))
    of_tokens = mix(np.array(tokens, dtype=np.uint64) + np.uint64(0x85EBCA6B))
    numbers = mix(of_elements ^ of_tokens[:, None]) >> np.uint64(8)
    return (numbers / 2.0**24).reshape(len(tokens), 1, *shape)


def next_states(before: Floats, delta: Floats, A: Floats, B: Floats, u: Floats) -> Floats:
    """Return the states after each token, given what was stored before it.

    before (tokens, batch, channels, states); delta, u (tokens, batch, channels); A (channels,
    states); B (tokens, batch, states), or of each channel.
    """
    decay = np.exp(delta[..., None] * A)
    return decay * before + (delta * u)[..., None] * _per_channel(B)


def _per_channel(x: Floats) -> Floats:
    return x if x.ndim == 4 else x[:, :, None, :]


def next_by_delta_rule(before: Floats, g: Floats, beta: Floats, k: Floats, v: Floats) -> Floats:
    """Return the states after each token: what they have for its key changes towards its value.

    before, g, k (tokens, batch, channels, keys); beta, v (tokens, batch, channels).
    """
    decayed = np.exp(g) * before
    change = beta * (v - (decayed * k).sum(-1))
    return np.asarray(decayed + change[..., None] * k)


def read(states: Floats, C: Floats) -> Floats:
    """Return what each channel gives for a query; C (tokens, batch, states), or of each channel."""
    return np.asarray((states * _per_channel(C)).sum(-1))


def read_and_skip(states: Floats, C: Floats, D: Floats, u: Floats) -> Floats:
    """Return `read` and the part of each input that goes around the state."""
    return read(states, C) + D * u


def outputs(states: Floats, C: Floats, D: Floats, u: Floats, z: Floats) -> Floats:
    """Return what the scan gives for each token, made of its state before that is stored."""
    return np.asarray(read_and_skip(states, C, D, u) * z / (1 + np.exp(-z)))


def unit(x: Floats) -> Floats:
    """Return the vectors of queries or keys divided by their length."""
    return np.asarray(x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6))


def step_sizes(dt: Floats, bias: Floats | None) -> Floats:
    """Return softplus of the projected steps."""
    x = dt if bias is None else dt + bias
    return np.logaddexp(0, x)


def convolved(read: Sequence[Floats], weight: Floats, bias: Floats | None) -> Floats:
    """Return the convolution of what each token reads, the oldest first and its own input last.

    weight (channels, width).
    """
    y = sum(x * weight[:, number] for number, x in enumerate(read))
    return np.asarray(y if bias is None else y + bias)
