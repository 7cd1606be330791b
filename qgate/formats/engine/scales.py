"""Scales and zero points of element formats: made from each group, or given."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.arithmetic import divided
from qgate.errors import QgateError
from qgate.formats._element import round_to_integer
from qgate.formats._work import DOUBLE, ScaledChunk, widen
from qgate.formats.engine.dtypes import FP32_MAX, INFINITY, INPUTS, NATIVE_INTEGER
from qgate.formats.floats import to_single_grid
from qgate.formats.settings import QuantizerSettings
from qgate.tensor_inputs import FLOATS, number_or_tensor

_ZERO_POINTS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *INPUTS,
)


def version_of(value: object) -> int | None:
    """Return the number of changes of an option, None where torch counts none."""
    if not isinstance(value, Tensor):
        return 0
    return None if value.is_inference() else value._version


def _is_checked(q: QuantizerSettings, name: str, double: bool) -> bool:
    """Tell if an option of this quantizer passed its check, and is as it was."""
    value, version = q.checked.get((name, double), (None, -1))
    current = getattr(q, name)
    return current is not None and value is current and version == version_of(current)


def _keep_checked(q: QuantizerSettings, name: str, double: bool, device: torch.device) -> None:
    """Keep that an option passed; on the CPU, where others may write to it, it is checked again."""
    version = version_of(getattr(q, name))
    if version is not None and device.type != "cpu":
        q.checked[name, double] = getattr(q, name), version


def of_amax(amax: Tensor, q: QuantizerSettings) -> Tensor:
    """Return amax / max as float64, NaN where amax is not finite, as `definition.amax_scales`."""
    dtype, double = amax.dtype, amax.dtype == torch.float64
    bits, infinity = amax.view(NATIVE_INTEGER[dtype]), INFINITY[dtype]
    spoilt = bits > infinity if q.inf == "saturate" else bits >= infinity
    wide = widen(amax)
    largest = torch.finfo(torch.float64).max if double else FP32_MAX
    scale = divided(wide.clamp(max=largest), q.format.max)
    if not double:
        scale = to_single_grid(scale)
    scale = scale.clamp_(min=2.0**-1022 if double else 2.0**-149)
    return scale.masked_fill_(bits == 0, 1.0).masked_fill_(spoilt, float("nan"))


def scale_from_option(q: QuantizerSettings, x: Tensor) -> Tensor:
    """Return the user's scale as float64, rounded to its dtype."""
    scale = widen(number_or_tensor(q.scale, FLOATS, "scale: ", x.device))
    if x.dtype != torch.float64:
        scale = to_single_grid(scale)
    double = x.dtype == torch.float64
    if not _is_checked(q, "scale", double) and not bool(((scale > 0) & scale.isfinite()).all()):
        bad = scale[~((scale > 0) & scale.isfinite())][0].item()
        raise QgateError(f"scale {bad!r} is not allowed; scales are finite numbers above zero.")
    _keep_checked(q, "scale", double, scale.device)
    return scale


def fit_zero_points(highest: Tensor, lowest: Tensor, q: QuantizerSettings) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of each group as float64, as `definition.fit_zero_points`.

    `highest` has the largest number of each group and `lowest` the negated smallest one, both at
    least 0 and with the bits of a NaN where the group has one.
    """
    dtype, double = highest.dtype, highest.dtype == torch.float64
    bits = [ends.view(NATIVE_INTEGER[dtype]) for ends in (highest, lowest)]
    ends = torch.maximum(*bits)
    spoilt = ends > INFINITY[dtype] if q.inf == "saturate" else ends >= INFINITY[dtype]
    largest = torch.finfo(torch.float64).max if double else FP32_MAX
    high, low = (widen(side).clamp(max=largest) for side in (highest, lowest))
    first, last = q.format.element.bounds(narrow=q.narrow)
    scale = high + low
    if not double:
        scale = scale.where(scale > FP32_MAX, to_single_grid(scale))
    scale = divided(scale, last - first)
    scale = scale if double else to_single_grid(scale)
    scale = scale.clamp_(2.0**-1022 if double else 2.0**-149, largest).masked_fill_(ends == 0, 1.0)
    below = low / scale
    below = below if double else to_single_grid(below)
    zero_point = below.round_().add_(first).clamp_(first, last).masked_fill_(spoilt, 0.0)
    return scale.masked_fill_(spoilt, float("nan")), zero_point


def zero_point_from_option(q: QuantizerSettings, device: torch.device) -> Tensor:
    """Return the user's zero points as float64."""
    first, last = q.format.element.bounds(narrow=q.narrow)
    zero_point = number_or_tensor(q.zero_point, _ZERO_POINTS, "zero_point: ", device)
    zero_point = zero_point.to(DOUBLE.dtype)
    if _is_checked(q, "zero_point", double=False):
        return zero_point
    outside = ~((zero_point >= first) & (zero_point <= last) & (zero_point == zero_point.round()))
    if bool(outside.any()):
        raise QgateError(
            f"zero point {zero_point[outside][0].item():g} is not allowed; those of "
            f"{q.format.name} are integers from {first:g} to {last:g}."
        )
    _keep_checked(q, "zero_point", False, device)
    return zero_point


def saturated(parts: ScaledChunk, q: QuantizerSettings) -> Tensor:
    """Find where x, rounded without a bound, is beyond the largest value at its scale.

    Inf is; NaN is not, nor is an element of a group whose scale is NaN or zero.
    """
    element = q.format.element
    low, high = element.bounds(narrow=q.narrow)
    if parts.zero_point is not None:
        rounded = round_to_integer(parts.ratios.clone(), DOUBLE, q.deterministic().rounding)
        codes = rounded + parts.zero_point
        return ((codes > high) | (codes < low)) & (parts.scale > 0)
    upper = parts.ratios >= element.saturates_from(q.rounding, high)
    lower = parts.ratios <= -element.saturates_from(q.rounding, -low)
    if parts.second is not None:
        mask, limit = parts.second
        return (parts.ratios.abs() >= limit).where(mask, upper | lower) & (parts.scale > 0)
    return (upper | lower) & (parts.scale > 0)
