"""The bits of torch's dtypes, and the final cast of a result to them."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.formats._literals import BF16, FP16
from qgate.formats._scratch import BoundedCache, buffer, whole
from qgate.formats._work import DOUBLE, CastContext, any_set
from qgate.formats.floats import FP32

INPUTS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NATIVE_INTEGER = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
# The bits of +Inf as an integer: magnitudes above are NaN.
INFINITY = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0x7F800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
}
_NARROW = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}
_masks = BoundedCache(4)
FP32_MAX = torch.finfo(torch.float32).max
_TINY32 = 2.0**-126
_UNIT32 = 2.0**-149


def magnitude_bits(x: Tensor) -> Tensor:
    """Return |x| as integers of the same order: NaN above Inf above the finite numbers.

    The result is a scratch buffer.
    """
    integer = NATIVE_INTEGER[x.dtype]
    bits = buffer("magnitude", x.shape, integer, x.device)
    mask = _masks.get(integer, lambda: whole(torch.iinfo(integer).max, integer))
    return torch.bitwise_and(x.view(integer), mask, out=bits)


def narrow(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to dtype, once and to nearest even; overflow becomes Inf."""
    if dtype == torch.float64:
        return y
    if dtype != torch.float32:
        y = _NARROW[dtype].cast(y, DOUBLE, rounding="even", saturate=False)
    single = y.to(torch.float32)
    size = y.abs()
    tiny = (size < _TINY32) & (size > 0)
    if any_set(tiny):
        bits = (size * (1 / _UNIT32)).round_().to(torch.int32)
        bits = bits.where(~y.signbit(), bits | -0x80000000)
        single = single.where(~tiny, bits.view(torch.float32))
    if dtype == torch.bfloat16:
        # y is a bf16 number already, so the lower half of the bits is zero.
        return (single.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return single.to(dtype)


def combine(elements: Tensor, scale: Tensor, dtype: torch.dtype, context: CastContext) -> Tensor:
    """Return elements * scale, rounded once to dtype."""
    if context.double and dtype != torch.float64:
        return narrow(context.multiply(elements, scale), dtype)
    return narrow(elements * scale, dtype)
