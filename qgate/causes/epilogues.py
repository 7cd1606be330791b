"""Changes of a right result before it is stored: activations, bounds, numbers that are added."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from qgate.expected.noise import Expected
from qgate.stats.bits import short_name

FEWEST = 3
"""Values beyond a bound from which on it is one."""
MANY, SHARP, SHARE = 64, 0.05, 0.9
"""Values that a dtype holds by more than chance, the share of its steps that noise may have, and of
how many values."""
STEEPEST = 1.2
"""The largest slope of an activation, by which float noise may grow."""
LEFT = 0.1
"""Share of the energy of a difference that an explanation may leave."""
APPLIED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
}


def activated(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name an activation of the expected values that gives the actual ones."""
    if not actual.dim() or not bool(wrong.any()):
        return ""
    for name, activation in APPLIED.items():
        values = activation(expected.values)
        room = half_width(expected) + values.abs() * resolution(actual)
        if bool(((actual - values).abs() <= STEEPEST * room).all()) and _explains(
            actual, expected, values
        ):
            return f"{name} is applied to the result, and should not be"
    return ""


def clamped(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name bounds that no value of a result is beyond, where expected ones are."""
    if actual.numel() < FEWEST or not bool(wrong.any()):
        return ""
    low, high = float(actual.min()), float(actual.max())
    values = expected.values.clamp(low, high)
    room = half_width(expected) + values.abs() * resolution(actual)
    if not bool(((actual - values).abs() <= room).all()) or not _explains(actual, expected, values):
        return ""
    bounds = [
        f"{way} {bound:.4g}"
        for way, bound in (("above", high), ("below", low))
        if int((actual == bound).sum()) >= FEWEST and bool(wrong[actual == bound].any())
    ]
    return f"the result saturates: no value is {' or '.join(bounds)}" if bounds else ""


def softly_capped(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name a bound that the values of a result approach by a tanh, and should not."""
    values = expected.values
    if actual.numel() < FEWEST or not bool(wrong.any()) or not bool(values.isfinite().all()):
        return ""
    largest = values.abs().argmax()
    size, capped = (abs(float(side.reshape(-1)[largest])) for side in (values, actual))
    if not 0 < capped < size:
        return ""
    low, high = capped, capped * 2.0**10
    for _ in range(60):
        bound = (low + high) / 2
        low, high = (bound, high) if bound * math.tanh(size / bound) < capped else (low, bound)
    right = bound * torch.tanh(values / bound)
    room = half_width(expected) + right.abs() * resolution(actual)
    if not bool(((actual - right).abs() <= 2 * room).all()) or not _explains(
        actual, expected, right
    ):
        return ""
    return f"the result is capped softly at {bound:.4g}, by a tanh, and should not be"


def coarse(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name a dtype of 16 bits that a result in float32 was rounded to."""
    values = expected.values.abs()
    if actual.numel() < MANY or not bool(wrong.any() and actual.isfinite().all()):
        return ""
    for dtype in (torch.bfloat16, torch.float16):
        step = torch.finfo(dtype).eps
        is_rounded = bool((actual.to(dtype).double() == actual).all())
        room = half_width(expected)
        is_clear = bool((room < SHARP * step * values).double().mean() > SHARE)
        near = (actual - expected.values).abs() <= room + step * values
        if is_rounded and is_clear and bool(near.all()):
            return f"the result is rounded to {short_name(dtype)}"
    return ""


def shifted(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name a number that is added to all values of a result."""
    if actual.numel() < FEWEST or not bool(wrong.any()):
        return ""
    difference = actual - expected.values
    number = float(difference.mean())
    room = half_width(expected) + actual.abs() * resolution(actual)
    if number == 0 or not bool(((difference - number).abs() <= room).all()):
        return ""
    if bool((room > abs(number) / 2).any()):
        return ""
    return f"{number:.4g} is added to every value of the result"


def _explains(actual: Tensor, expected: Expected, values: Tensor) -> bool:
    """Tell if values leave little of what the expected ones differ by."""
    remaining = float((actual - values).square().sum())
    return remaining < LEFT * float((actual - expected.values).square().sum())


def resolution(actual: Tensor) -> float:
    """Return the relative rounding error of the narrowest dtype that holds all values."""
    for dtype in (torch.bfloat16, torch.float16):
        if bool((actual.to(dtype).double() == actual).all()):
            return torch.finfo(dtype).eps
    return 2.0**-18


def half_width(expected: Expected) -> Tensor:
    """Return how far values may be from the expected ones."""
    return (expected.high - expected.low) / 2
