"""Element formats in the ordinary case: no subnormal result, no extreme scale."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.formats._element import ElementFormat, round_to_integer
from qgate.formats._scratch import buffer, tracing
from qgate.formats._work import DOUBLE, SINGLE, CastContext
from qgate.formats.engine.dtypes import narrow
from qgate.formats.floats import FloatFormat
from qgate.formats.integers import IntFormat

_ORDINARY = 2.0**100
_INFINITY = 0x7F800000


def shortcut(fmt: ElementFormat, x: Tensor, out: Tensor, context: CastContext) -> bool:
    """Write the quantized chunk to `out`, or return False."""
    q, scale = context.q, context.state
    if scale is None and _is_cut_float32(fmt) and x.dtype == out.dtype == torch.float32:
        return q.rounding == "even" and _round_bits(fmt, x, out, saturates=q.saturate)
    fits = fmt.min_subnormal >= 1 / _ORDINARY and fmt.max <= _ORDINARY
    if context.double or q.rounding == "stochastic" or not fits:
        return False
    if scale is None:
        single = buffer("single", x.shape, SINGLE.dtype, x.device).copy_(x)
        y = fmt.cast(single, SINGLE, rounding=q.rounding, saturate=q.saturate, narrow=q.narrow)
        out.copy_(y)
        return True
    if not q.saturate or context.zero_point is not None or not _ordinary(scale):
        return False
    # Quotients and products of 24-bit numbers in float64: `CastContext.divide` says why.
    t = buffer("double", x.shape, DOUBLE.dtype, x.device).copy_(x).div_(scale)
    t.clamp_(*fmt.bounds(narrow=q.narrow))
    if isinstance(fmt, IntFormat) and fmt.step == 1.0:
        t = round_to_integer(t, DOUBLE, q.rounding)
    else:
        t = fmt.to_grid(t, DOUBLE, q.rounding)
    if fmt.negative_zero is None:
        t = t.add_(0.0)
    t = t.mul_(scale)
    if out.dtype == torch.float32:
        out.copy_(t)
        return True
    single = buffer("single", x.shape, SINGLE.dtype, x.device).copy_(t)
    if out.dtype == torch.bfloat16 and not _halfway(single):
        out.copy_(single)
    else:
        out.copy_(narrow(t, out.dtype))
    return True


def _is_cut_float32(fmt: ElementFormat) -> bool:
    """Tell if values have the bits of float32 but for the last ones, as those of bf16."""
    return (
        isinstance(fmt, FloatFormat)
        and (fmt.exponent_bits, fmt.bias, fmt.specials) == (8, 127, "ieee")
        and (fmt.signed, fmt.subnormals) == (True, True)
    )


def _round_bits(fmt: ElementFormat, x: Tensor, out: Tensor, *, saturates: bool) -> bool:
    """Round float32 as integers, which no thread flushes; NaN and what saturates go elsewhere."""
    if x.device.type != "cpu" or tracing():
        return False
    bits, cut = x.view(torch.int32), 23 - fmt.mantissa
    t = buffer("size", x.shape, torch.int32, x.device)
    largest = int(torch.bitwise_and(bits, 0x7FFFFFFF, out=t).max())
    if largest > _INFINITY - (1 << cut if saturates else 0):
        return False
    torch.bitwise_right_shift(bits, cut, out=t).bitwise_and_(1).add_((1 << cut - 1) - 1).add_(bits)
    out.view(torch.int32).copy_(t.bitwise_and_(-1 << cut))
    return True


def _ordinary(scale: Tensor) -> bool:
    if scale.numel() == 1:
        return 1 / _ORDINARY < scale.item() < _ORDINARY
    return bool(((scale > 1 / _ORDINARY) & (scale < _ORDINARY)).all())


def _halfway(x: Tensor) -> bool:
    """Tell whether a float32 lies midway between bf16 numbers, as double rounding may leave it."""
    low = buffer("size", x.shape, torch.int32, x.device)
    low = torch.bitwise_and(x.view(torch.int32), 0xFFFF, out=low)
    return bool((low == 0x8000).any())
