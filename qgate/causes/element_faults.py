"""Wrong operators on elements: other activations, left out, done twice, in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qgate.causes.operator_calls import Call, CallFault
from qgate.expected.intermediates import HALVES, rounded
from qgate.stats.bits import short_name

_aten = torch.ops.aten
STEP = 2.0**-17
"""Half of the distance of two values whose difference gives a slope."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": torch.relu,
    "squared relu": lambda x: torch.relu(x).square(),
    "hard swish": functional.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "hard tanh": functional.hardtanh,
    "hard sigmoid": functional.hardsigmoid,
    "the identity": torch.clone,
}
BASES = (1e4, 5e5, 1e6)
"""Bases of rotary positions that published models have."""
COARSE = (torch.float8_e4m3fn, torch.float8_e5m2, *HALVES)
STEPS_OF_ONE = (127, 128, 255, 256)
"""Steps from 0 to 1 that probabilities are rounded to in 8 bits."""
_ROUNDED = frozenset({
    "mul", "silu", "gelu", "relu", "sigmoid", "tanh", "exp", "_softmax", "mm", "bmm", "rsqrt",
})  # fmt: skip
_UNARY = frozenset({
    "tanh", "sigmoid", "exp", "exp2", "log", "log2", "softplus", "clamp", "clamp_min", "clamp_max",
    "erf", "abs", "reciprocal", "softmax",
})  # fmt: skip
_ACTIVATED = frozenset({"silu", "gelu", "relu", "tanh", "sigmoid", "softplus"})
_PUT = frozenset({"index_put", "_index_put_impl", "_unsafe_index_put"})
_MOVED_PAST = frozenset({"gelu", "silu", "relu", "sigmoid", "tanh", "exp", "_softmax"})


def element_faults(call: Call) -> Iterator[CallFault]:
    """List other activations, other rotations, and gradients of other activations."""
    name, args, kwargs = call.name, call.args, call.kwargs
    if name in _ACTIVATED:
        own = "gelu by tanh" if kwargs.get("approximate") == "tanh" else name
        if name in _UNARY:  # first: within its bounds a hard tanh is none
            yield _left_out(name)
        for other, activation in ACTIVATIONS.items():
            if other != own and not (name in _UNARY and other == "the identity"):
                yield CallFault(
                    f"{other} is computed in the place of {own}",
                    result=lambda a, _, activation=activation: activation(a[0]),  # type: ignore[misc]
                )
    elif name in ("silu_backward", "gelu_backward"):
        own = "gelu by tanh" if kwargs.get("approximate") == "tanh" else name.split("_")[0]
        for other, activation in ACTIVATIONS.items():
            if other != own:
                yield CallFault(
                    f"the gradient is that of {other}, not of {own}",
                    result=lambda a, _, activation=activation: _slope(a, activation),  # type: ignore[misc]
                )
        if name == "silu_backward":
            yield CallFault(
                "the gradient of silu is sigmoid(x) alone: the slope of the sigmoid is left out",
                result=lambda a, _: a[0] * torch.sigmoid(a[1]),
            )
    elif name == "sin":
        yield CallFault(
            "sin has the opposite sign, so positions turn the other way",
            result=lambda _, own: -own,
        )
    elif name == "pow" and isinstance(args[0], int | float):
        yield from _of_powers(float(args[0]))
    elif name == "topk":
        yield from _of_topk(call)
    elif name in _PUT and len(args) > 3 and args[3]:
        yield CallFault(
            "repeated indices overwrite each other, where they should be added up",
            result=lambda a, _: _overwritten(a[0], a[1], a[2]),
        )
    elif name == "embedding_dense_backward":
        yield CallFault(
            "repeated indices overwrite each other, where they should be added up",
            result=lambda a, own: _overwritten(torch.zeros_like(own), (a[1],), a[0]),
        )


def _of_powers(base: float) -> Iterator[CallFault]:
    """List other bases of powers, such as the frequencies of a rotation are made of."""
    bases = (base * 0.5, base * 2, base * 0.1, base * 10, base**0.5, base**2, *BASES)
    for other in dict.fromkeys(bases):
        if other != base:
            yield CallFault(
                f"the base of the powers is {other:,.6g}, not {base:,.6g}",
                arguments=lambda a, other=other: (other, *a[1:]),  # type: ignore[misc]
            )
    for share, words in ((2, "half"), (4, "quarter")):
        yield CallFault(
            f"the powers beyond the first {words} are zero: so much of each head is turned",
            result=lambda _, own, share=share: _leading(own, share),  # type: ignore[misc]
        )


def _leading(powers: Tensor, share: int) -> Tensor:
    changed = powers.clone()
    changed[..., powers.shape[-1] // share :] = 0
    return changed


def _slope(args: Sequence[Any], activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of another activation; autograd is not at hand within a gradient."""
    x = args[1].double()
    difference = activation(x + STEP) - activation(x - STEP)
    slope: Tensor = args[0] * difference / (2 * STEP)
    return slope.to(args[1].dtype)


def _overwritten(values: Tensor, indices: Sequence[Tensor | None], added: Tensor) -> Tensor:
    changed = values.clone()
    flat = [index for index in indices if index is not None]
    if len(flat) != 1:
        return changed
    for number, row in zip(flat[0].reshape(-1), added.reshape(-1, *values.shape[1:]), strict=False):
        changed[number] = row
    return changed


def _of_topk(call: Call) -> Iterator[CallFault]:
    """List values in the order of their indices, and a last entry that counts nothing."""
    count = call.result[0].shape[-1]
    if count < 2:
        return

    def sorted_indices(_: Any, own: Any) -> Any:
        return own[0], own[1].sort(-1).values

    words = "the indices of topk are in another order than its values"
    yield CallFault(words, result=sorted_indices)

    def without_last(_: Any, own: Any) -> Any:
        values = own[0].clone()
        values[..., -1] = 0
        return values, own[1]

    yield CallFault(f"the last of the {count} entries of topk does not count", result=without_last)


# Left out, twice, in another order ----------------------------------------------------------------


def _left_out(own: str) -> CallFault:
    return CallFault(f"{own} is left out", result=lambda a, _: a[0].clone())


def general_faults(call: Call) -> Iterator[CallFault]:
    """List operators that are left out, done twice, or done before another one."""
    name, args = call.name, call.args
    if name in _UNARY and call.is_float and _alike(args[0], call.result):
        own = {"clamp_min": "clamp", "clamp_max": "clamp"}.get(name, name)
        if name not in _ACTIVATED:
            yield _left_out(own)
        if name in ("clamp", "clamp_max", "clamp_min"):
            yield from _other_clamps(call)
        if name == "exp":
            yield CallFault("exp(x) is computed as 1 + x", result=lambda a, _: 1 + a[0])
    elif name == "_softmax" and call.is_float:
        yield CallFault(
            "sigmoid is computed in the place of softmax", result=lambda a, _: a[0].sigmoid()
        )
    elif name in _DONE and call.is_float and len(args) > 1:
        yield from _of_two(call)
    elif name == "arange" and call.result.numel() > 1:
        yield CallFault(
            "positions are not used: all are 0", result=lambda _, value: torch.zeros_like(value)
        )
        for step in (1, -1):
            yield CallFault(
                f"positions begin at {step}, not at 0",
                result=lambda _, value, step=step: value + step,  # type: ignore[misc]
            )
    if name in _MOVED_PAST and call.is_float:
        yield from _moved_past(call)


def _alike(value: Any, other: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == other.shape


def _other_clamps(call: Call) -> Iterator[CallFault]:
    """List a bound on the other side, and one bound less."""
    low, high = _bounds(call)
    if low is not None and high is not None:
        for side, words, other_bound in (
            (low, "below", {"max": high}), (high, "above", {"min": low}),
        ):  # fmt: skip
            yield CallFault(
                f"values are not clamped to {side:g} from {words}",
                result=lambda a, _, bound=other_bound: a[0].clamp(**bound),  # type: ignore[misc]
            )
    elif low is not None:
        yield CallFault(
            f"values are clamped to {-low:g} from above, too",
            result=lambda _, own: own.clamp(max=-low),
        )
    elif high is not None:
        yield CallFault(
            f"values are clamped to {-high:g} from below, too",
            result=lambda _, own: own.clamp(min=-high),
        )


def _bounds(call: Call) -> tuple[float | None, float | None]:
    """Return the numbers that a clamp keeps values between."""
    listed: list[Any] = list(call.args[1:3])
    if call.name == "clamp_max":
        listed.insert(0, None)
    low, high = [*listed, None, None][:2]
    sides = call.kwargs.get("min", low), call.kwargs.get("max", high)
    first, second = (float(side) if isinstance(side, int | float) else None for side in sides)
    return first, second


_DONE: dict[str, Callable[[Any, Any], Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
}
_LEFT_OUT = {
    "add": "{} is not added", "sub": "{} is not subtracted",
    "mul": "the multiplication by {} is left out", "div": "the division by {} is left out",
}  # fmt: skip
_TWICE = {
    "add": "{} is added twice", "sub": "{} is subtracted twice",
    "mul": "the multiplication by {} is done twice", "div": "the division by {} is done twice",
}  # fmt: skip


def _of_two(call: Call) -> Iterator[CallFault]:
    """List operators that lack one side, have it twice, or come in another order."""
    name, makers = call.name, call.makers
    first, second = call.args[:2]
    if call.kwargs.get("alpha", 1) != 1 or len(call.args) > 2:
        return
    do = _DONE[name]
    if _alike(first, call.result):
        operand = makers.words(second)
        yield CallFault(_LEFT_OUT[name].format(operand), result=lambda a, _: a[0].clone())
        if isinstance(second, Tensor):
            yield CallFault(_TWICE[name].format(operand), result=lambda a, own: do(own, a[1]))
    if name in ("add", "mul") and _alike(second, call.result) and isinstance(first, Tensor):
        operand = makers.words(first)
        yield CallFault(_LEFT_OUT[name].format(operand), result=lambda a, _: a[1].clone())
        yield CallFault(_TWICE[name].format(operand), result=lambda a, own: do(own, a[0]))
    yield from _in_other_order(call)


_STEPS = {
    "add": "addition of", "sub": "subtraction of", "mul": "multiplication by", "div": "division by"
}  # fmt: skip


def _in_other_order(call: Call) -> Iterator[CallFault]:
    """List a sum before the product that it should follow, and the other way round."""
    maker = call.made(0)
    if maker is None or len(maker.args) != 2 or not _alike(maker.args[0], call.result):
        return
    sums, products = ("add", "sub"), ("mul", "div")
    if not (call.name in sums and maker.name in products) and not (
        call.name in products and maker.name in sums
    ):
        return
    x, other = maker.args
    words = (
        f"the {_STEPS[call.name]} {call.makers.words(call.args[1])} comes before the "
        f"{_STEPS[maker.name]} {call.makers.words(other)}, not after it"
    )
    first, last = _DONE[call.name], _DONE[maker.name]
    yield CallFault(words, result=lambda a, _: last(first(x, a[1]), other))


def _moved_past(call: Call) -> Iterator[CallFault]:
    """List operand is added or multiplied after an activation, where it should be before."""
    maker = call.made(0)
    if maker is None:
        return
    name = "the softmax" if call.name == "_softmax" else call.name
    evaluate = {
        "gelu": lambda x: _aten.gelu(x, **call.kwargs),
        "_softmax": lambda x: x.softmax(-1),
        "silu": functional.silu,
    }.get(call.name, getattr(torch, call.name, torch.clone))
    if maker.name == "addmm":
        bias = maker.args[0]
        yield CallFault(
            f"{call.makers.words(bias)} is added after {name}, not before it",
            result=lambda a, _: evaluate(a[0] - bias) + bias,
        )
    if maker.name not in ("add", "mul") or len(maker.args) != 2:
        return
    x, other = maker.args
    if _alike(x, call.args[0]):
        does, do = "added" if maker.name == "add" else "multiplied by", _DONE[maker.name]
        yield CallFault(
            f"{call.makers.words(other)} is {does} after {name}, not before it",
            result=lambda *_: do(evaluate(x), other),
        )


# Coarse values ------------------------------------------------------------------------------------


def rounded_faults(call: Call) -> Iterator[CallFault]:
    """List narrow formats that a result may be rounded to."""
    name, result = call.name, call.result
    if name not in _ROUNDED or not call.is_float or result.numel() < 2:
        return
    named = {
        "_softmax": "the probabilities of the softmax are", "mm": "a matrix product is",
        "bmm": "a matrix product is", "rsqrt": "a root is",
    }.get(name, f"{name} is")  # fmt: skip
    for dtype in COARSE:
        yield CallFault(
            f"{named} rounded to {short_name(dtype)}",
            result=lambda _, value, dtype=dtype: rounded(value, dtype),  # type: ignore[misc]
        )
    for steps in STEPS_OF_ONE if name in ("_softmax", "sigmoid") else ():
        yield CallFault(
            f"{named} rounded to steps of 1/{steps}",
            result=lambda _, value, steps=steps: (value * steps).round() / steps,  # type: ignore[misc]
        )
    yield CallFault(f"{named} rounded to int8 by row", result=lambda _, value: _int8(value))


def is_half(fault: str) -> bool:
    """Tell if a fault in words is a rounding to 16 bits, which kernels in 16 bits may have."""
    return fault.endswith(tuple(f"rounded to {short_name(dtype)}" for dtype in HALVES))


def _int8(value: Tensor) -> Tensor:
    scale = value.abs().amax(-1, keepdim=True) / torch.tensor(127.0, dtype=value.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (value / scale).round() * scale
