"""The check of a cast: is this tensor in a format, bit for bit, and if not, what is it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.causes.casts import describe_values, wrong_casts
from qgate.causes.layouts import layout_faults
from qgate.causes.outputs import describe, describe_ruin, scattered
from qgate.errors import QgateError
from qgate.expected.conventions import MSE, Convention
from qgate.expected.distances import distance_to_multiple, relative_error
from qgate.expected.noise import Expected
from qgate.expected.searched_scales import search_allowance, searched_error
from qgate.formats import Encoded, Quantizer
from qgate.formats.options import Floats, Options
from qgate.kernel_checks.declared import Quantization, declare, from_array, to_array
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.stats.bits import short_name
from qgate.tensor_inputs import FLOATS, plain_tensor, usual_arithmetic

SEARCH_BAND = (0.8, 1.25)
"""Squared error of searched scales, as a share of that of our own search."""
WORTH_A_SEARCH = 1.05
"""Times the squared error of searched scales from which a search would have been felt."""
STEPS = 2.0**-22
"""Relative error of one multiplication of a code by its scale in float32, and some room."""


@usual_arithmetic()
def check_cast(
    actual: Tensor | Encoded,
    source: Tensor,
    declared: Any,
    *,
    convention: str | None = None,
    unpack: Callable[[Any], Tensor] | None = None,
    options: Options,
) -> CheckReport:
    """Hold quantized values against the conventions of their format."""
    values = _values(unpack(actual) if unpack else actual)
    if not isinstance(source, Tensor) or not source.is_floating_point():
        kind = source.dtype if isinstance(source, Tensor) else type(source).__name__
        raise ValueError(
            f"the source is {kind}; give the floating-point tensor that was quantized."
        )
    source = _plain(source, "source")
    if isinstance(declared, str) and options:
        try:
            declared = Quantizer(declared, **options)
        except (QgateError, TypeError) as error:
            raise ValueError(f"format {declared!r}: {error}") from None
    elif options:
        raise ValueError(
            f"{', '.join(options)} came with {declared!r}; options go with a format's name only."
        )
    quantization = declare(declared, "format", source.dtype, convention)
    report = CheckReport(quantization.name)
    if values.shape != source.shape:
        shapes = [tuple(tensor.shape) for tensor in (values, source)]
        raise CheckFailure(
            f"the {quantization.name} tensor has shape {shapes[0]}, its source {shapes[1]}",
            report,
        )
    x = to_array(source)
    report.error = _finite_error(to_array(values), x)
    report.format_error = _finite_error(quantization.choices[0](x), x)
    if convention == MSE:
        _check_searched(values, x, quantization, report)
        return report
    for choice, count in _matches(values, x, quantization):
        exactly = "bit for bit"
        if count:
            exactly = f"but for {count:,} codes at rounding boundaries, within float32 noise"
        report.conventions["values"] = f"{_named(choice, x, quantization)}, {exactly}"
        report.held.append("the tensor")
        return report
    raise _failure(values, x, quantization, report)


def _named(choice: Convention, x: Floats, quantization: Quantization) -> str:
    """Return the name of a convention, with what becomes of numbers beyond the largest, if any."""
    if choice.with_overflow == choice.name:
        return choice.name
    values = choice(x)
    differ = (other(x) for other in quantization.choices if other.overflow != choice.overflow)
    is_told = any(not np.array_equal(values, other, equal_nan=True) for other in differ)
    return choice.with_overflow if is_told else choice.name


def _values(actual: Any) -> Tensor:
    if isinstance(actual, Encoded):
        return actual.decode(torch.float32)
    if not isinstance(actual, Tensor):
        raise ValueError(
            f"a {type(actual).__name__} was given to check; give a tensor of dequantized values, a "
            "qgate.Encoded, or unpack= with a function that makes values of it."
        )
    if not actual.is_floating_point():
        raise ValueError(
            f"a tensor of {actual.dtype} was given to check; give dequantized values (codes times "
            "scales), or unpack= with a function that makes them."
        )
    return _plain(actual, "actual")


def _plain(x: Tensor, whose: str) -> Tensor:
    try:
        return plain_tensor(x, "check", FLOATS, f"{whose}: ").detach()
    except TypeError as error:
        raise ValueError(str(error)) from None


def _matches(
    actual: Tensor, x: Floats, quantization: Quantization
) -> Iterator[tuple[Convention, int]]:
    """List conventions that explain the values, with the number of codes that noise decided."""
    for choice in quantization.choices:
        if _same(actual, from_array(choice(x), actual)):
            yield choice, 0
    for choice in quantization.choices:
        ideal = from_array(choice(x), actual)
        near = _near(actual, ideal)
        exact = int(near.sum())
        for values in choice.alternatives(x):
            near |= _near(actual, from_array(values, actual))
        if bool(near.all()):
            yield choice, actual.numel() - exact


def _same(actual: Tensor, ideal: Tensor) -> bool:
    return bool(_equal(actual, ideal).all())


def _equal(actual: Tensor, ideal: Tensor) -> Tensor:
    rounded = ideal.to(actual.dtype)
    return (actual == rounded) | (actual.isnan() & rounded.isnan())


def _near(actual: Tensor, ideal: Tensor) -> Tensor:
    """Return where values are equal but for the rounding of a product in float32."""
    close = (actual.double() - ideal).abs() <= ideal.abs() * STEPS
    return close | _equal(actual, ideal)


def _failure(
    actual: Tensor, x: Floats, quantization: Quantization, report: CheckReport
) -> CheckFailure:
    """Find the nearest convention and the cause of the difference."""
    ideals = [from_array(choice(x), actual) for choice in quantization.choices]
    number = min(range(len(ideals)), key=lambda index: distance_to_multiple(actual, ideals[index]))
    ideal, nearest = ideals[number], quantization.choices[number]
    wrong = ~_near(actual, ideal)
    details = [_first_difference(actual, ideal, x, wrong), *_differences(actual, ideal, wrong)]
    if len(quantization.choices) > 1:
        details.append(
            f"nearest of {len(quantization.choices)} conventions: {nearest.name} "
            f"({int(wrong.sum()):,} of {actual.numel():,} values differ)"
        )
    return CheckFailure(_cause(actual, x, ideal, wrong, quantization), report, *details)


def _cause(
    actual: Tensor, x: Floats, ideal: Tensor, wrong: Tensor, quantization: Quantization
) -> str:
    count = f"{int(wrong.sum()):,} of {wrong.numel():,} values differ"
    name = f"the {quantization.name} tensor"
    expected = Expected(ideal, ideal, ideal)
    words = describe_ruin(actual, expected, wrong)
    if words:
        return f"{words.replace('the result', name, 1)} ({count})"
    if quantization.quantizer is not None:
        for cast in wrong_casts(quantization.quantizer):
            values = cast.apply(x)
            if values is not None and bool(_near(actual, from_array(values, actual)).all()):
                return f"{name} {cast.words} ({count})"
        words = _wrong_groups(actual, x, quantization)
        if words:
            return f"{name} {words} ({count})"
        words = describe_values(to_array(actual), x, quantization.quantizer, ideal=to_array(ideal))
        if words:
            return f"{name} {words} ({count})"
    words = describe(actual, expected, wrong) or scattered(wrong)
    return (
        f"{words.replace('the result', name, 1)} ({count})"
        if "result" in words
        else (f"{name} is wrong: {words}")
    )


def _wrong_groups(actual: Tensor, x: Floats, quantization: Quantization) -> str:
    """Name other groups than those that were declared, under any convention; empty if none are."""
    q = quantization.quantizer
    if q is None or q.groups is None:
        return ""
    dtype = short_name(actual.dtype)
    for cast in wrong_casts(q):
        if cast.is_same_kind and cast.alternatives is not None:
            for convention in cast.alternatives(dtype):
                if bool(_near(actual, from_array(convention(x), actual)).all()):
                    return cast.words
    definition = quantization.choices[0](x)
    codes = [choice(x) for choice in quantization.choices]
    for cast in layout_faults(q, quantization.choices[0]):
        if (values := cast.apply(x)) is None:
            continue
        ratio = np.divide(values, definition, out=np.ones_like(x), where=definition != 0)
        if any(bool(_near(actual, from_array(side * ratio, actual)).all()) for side in codes):
            return cast.words
    return ""


def _first_difference(actual: Tensor, ideal: Tensor, x: Floats, wrong: Tensor) -> str:
    index = tuple(int(i) for i in wrong.reshape(actual.shape).nonzero()[0])
    position = ", ".join(map(str, index))
    return (
        f"first difference at [{position}]: {float(actual[index]):.9g} where "
        f"{float(ideal[index]):.9g} is right for {float(x[index]):.9g}"
    )


def _differences(actual: Tensor, ideal: Tensor, wrong: Tensor) -> Iterator[str]:
    """Write how many elements differ and by how much, as `torch.testing.assert_close` does."""
    count, size = int(wrong.sum()), wrong.numel()
    yield f"Mismatched elements: {count} / {size} ({100 * count / size:.1f}%)"
    absolute = torch.where(wrong, (actual.double() - ideal).abs(), 0.0)
    for name, sides in (("absolute", absolute), ("relative", absolute / ideal.abs())):
        flat = int(torch.where(wrong, sides, 0.0).nan_to_num(nan=torch.inf).argmax())
        index = tuple(int(i) for i in np.unravel_index(flat, actual.shape))
        yield f"Greatest {name} difference: {float(sides.reshape(-1)[flat]):.6g} at index {index}"


def _finite_error(values: Floats, x: Floats) -> float:
    finite = np.isfinite(values) & np.isfinite(x)
    return relative_error(values[finite], x[finite])


def _check_searched(
    actual: Tensor, x: Floats, quantization: Quantization, report: CheckReport
) -> None:
    """Hold the error of searched scales against that of a search of our own."""
    if quantization.quantizer is None:
        raise ValueError(
            f"convention 'mse' needs a format or a quantizer, not {quantization.name}."
        )
    best = searched_error(x, quantization.quantizer)
    share = report.error / best if best else 1.0
    report.conventions["values"] = f"searched scales: {share:.3f} times the error of our search"
    errors = f"relative error {report.error:.4g}, of our search {best:.4g}"
    words = describe_values(to_array(actual), x, quantization.quantizer, any_scale=True)
    if words:
        raise CheckFailure(f"the {quantization.name} tensor {words}", report)
    match = next(_matches(actual, x, quantization), None) if share > WORTH_A_SEARCH else None
    if match is not None:
        raise CheckFailure(
            f"the {quantization.name} tensor has no searched scales: {match[0].name} explains all "
            "values",
            report,
            errors,
        )
    low, high = SEARCH_BAND
    high *= search_allowance(quantization.quantizer)
    if not low <= share <= high:
        raise CheckFailure(
            f"the {quantization.name} tensor has {share:.3f} times the squared error of searched "
            f"scales, {low} to {high:.3g} is allowed",
            report,
            errors,
        )
    report.held.append("the tensor")
