"""Exact conversions between torch's dtypes and the float types the kernels compute in.

Nothing here trusts a float instruction with a subnormal float32: a thread may flush those to zero
(`torch.set_flush_denormal`), so they are read and written as bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.formats.engine.scratch import Shelf, buffer
from qgate.formats.floats import FloatFormat

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
FP32 = FloatFormat("fp32", 8, 23, "ieee", bias=127)
_NARROW = {
    torch.float32: FP32,
    torch.float16: FloatFormat("fp16", 5, 10, "ieee", bias=15),
    torch.bfloat16: FloatFormat("bf16", 8, 7, "ieee", bias=127),
}
FP32_MAX = torch.finfo(torch.float32).max
_shelf = Shelf(256)
_TINY32 = 2.0**-126
_UNIT32 = 2.0**-149


@dataclass(frozen=True)
class Work:
    """A float type to compute in, with the layout of its bits."""

    dtype: torch.dtype
    integer: torch.dtype
    mantissa: int
    bias: int

    @property
    def exponent_mask(self) -> int:
        return (2 * self.bias + 1) << self.mantissa

    @property
    def magnitude_mask(self) -> int:
        return self.exponent_mask | ((1 << self.mantissa) - 1)

    @property
    def below_half(self) -> float:
        """The largest number below one half."""
        return 0.5 - 2.0 ** -(self.mantissa + 2)

    def power(self, exponent: Tensor) -> Tensor:
        """2**exponent for an integer tensor, from the bits."""
        return ((exponent.to(self.integer) + self.bias) << self.mantissa).view(self.dtype)

    def table(
        self, key: Hashable, values: Callable[[], Iterable[float]], device: torch.device
    ) -> Tensor:
        """A constant as a tensor, made once per device and key."""

        def make() -> Tensor:
            table = torch.tensor(list(values()), dtype=torch.float64, device="cpu")
            return table.to(device=device, dtype=self.dtype)

        return _shelf.get((key, self.dtype, device), make)


SINGLE = Work(torch.float32, torch.int32, mantissa=23, bias=127)
DOUBLE = Work(torch.float64, torch.int64, mantissa=52, bias=1023)


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as an integer of the same order: NaN above Inf above the finite numbers.

    The result is a scratch buffer.
    """
    integer = NATIVE_INTEGER[x.dtype]
    bits = buffer("magnitude", x.shape, integer, x.device)
    return torch.bitwise_and(x.view(integer), torch.iinfo(integer).max, out=bits)


def widen(x: Tensor) -> Tensor:
    """x as float64, exactly."""
    if x.dtype == torch.float64:
        return x
    single = x.to(torch.float32)
    y = single.to(torch.float64)
    bits = single.view(torch.int32).bitwise_and(0x7FFFFFFF)
    tiny = (bits < 0x00800000) & (bits > 0)
    if _worth_it(tiny):
        exact = (bits.to(torch.float64) * _UNIT32).copysign(y)
        y = y.where(~tiny, exact)
    return y


def _worth_it(mask: Tensor) -> bool:
    """If any is set; a device is not asked, because the answer would be waited for."""
    return mask.device.type != "cpu" or bool(mask.any())


def narrow(y: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to dtype, rounded once to nearest even, overflow to Inf."""
    if dtype == torch.float64:
        return y
    if dtype != torch.float32:
        y = _NARROW[dtype].cast(y, DOUBLE, rounding="even", saturate=False)
    single = y.to(torch.float32)
    size = y.abs()
    tiny = (size < _TINY32) & (size > 0)
    if _worth_it(tiny):
        bits = (size * (1 / _UNIT32)).round_().to(torch.int32)
        bits = bits.where(~y.signbit(), bits | -0x80000000)
        single = single.where(~tiny, bits.view(torch.float32))
    if dtype == torch.bfloat16:
        # y is a bf16 number already, so the lower half of the bits is zero.
        return (single.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return single.to(dtype)


def to_single_grid(y: Tensor) -> Tensor:
    """float64 numbers rounded to float32 numbers, still as float64."""
    return FP32.cast(y, DOUBLE, rounding="even", saturate=False)


def divide(x: Tensor, scale: Tensor, *, exact: bool) -> Tensor:
    """x / scale in float64, good for one more rounding.

    With 24-bit operands the quotient is never rounded onto a tie of an 8-bit grid. With 53-bit ones
    it can be, so `exact` rounds it to odd: an inexact quotient ends in a one and so is no tie.
    """
    y = x / scale
    if not exact:
        return y
    x_m, x_e = torch.frexp(x)
    s_m, s_e = torch.frexp(scale)
    y_m, y_e = torch.frexp(y)
    product, error = _two_product(y_m, s_m.expand_as(y_m))
    shifted = x_m * DOUBLE.power((x_e - s_e - y_e).clamp(-2, 2))
    return _to_odd(y, (shifted - product) - error)


def multiply(x: Tensor, factor: Tensor, *, exact: bool) -> Tensor:
    """x * factor in float64, rounded to odd if `exact` (see `divide`)."""
    y = x * factor
    if not exact:
        return y
    x_m, _ = torch.frexp(x)
    f_m, _ = torch.frexp(factor)
    product, error = _two_product(x_m, f_m.expand_as(x_m))
    del product
    return _to_odd(y, error)


def _two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a * b as a rounded product and its exact error (Dekker), for numbers near one."""
    product = a * b
    splitter = 2.0**27 + 1
    a_high = a * splitter - (a * splitter - a)
    b_high = b * splitter - (b * splitter - b)
    a_low, b_low = a - a_high, b - b_high
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return product, error


def _to_odd(y: Tensor, rest: Tensor) -> Tensor:
    """y moved one step toward its exact value y + rest where its last bit is even."""
    bits = y.view(torch.int64)
    outward = (rest * y.sign()).sign().to(torch.int64)
    move = ((bits & 1) == 0) & y.isfinite() & (y != 0)
    return (bits + outward * move).view(torch.float64)
