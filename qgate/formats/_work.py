"""The float types that formats compute in, and what a format is given and gives back.

Nothing here trusts a float instruction with a subnormal float32: a thread may flush those to zero
(`torch.set_flush_denormal`), so they are read and written as bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from qgate.formats._scratch import Shelf
from qgate.formats.options import CastOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_shelf = Shelf(256)
_UNIT32 = 2.0**-149
_ORDINARY = 2.0**-100, 2.0**100


@dataclass(frozen=True)
class Work:
    """A float type to compute in, with the layout of its bits."""

    width: int
    mantissa: int
    bias: int

    @cached_property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.width == 32 else torch.float64

    @cached_property
    def integer(self) -> torch.dtype:
        import torch

        return torch.int32 if self.width == 32 else torch.int64

    @cached_property
    def exponent_mask(self) -> int:
        return (2 * self.bias + 1) << self.mantissa

    @cached_property
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
        import torch

        def make() -> Tensor:
            table = torch.tensor(list(values()), dtype=torch.float64, device="cpu")
            return table.to(device=device, dtype=self.dtype)

        return _shelf.get((key, self.dtype, device), make)


SINGLE = Work(32, mantissa=23, bias=127)
DOUBLE = Work(64, mantissa=52, bias=1023)


@dataclass
class Parts:
    """A chunk [outer, blocks, block, inner] as float64 elements on the grid times a float64 scale.

    `ratios` are the elements before they were rounded: x in units of its scale, as the format
    divides. `stored` holds what `encode` keeps besides the element codes, one row per block in the
    third dimension ("scales", and "micro" for the finer levels of HiF4).
    """

    elements: Tensor
    scale: Tensor
    ratios: Tensor
    stored: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Call:
    """What a format has to know: the options, the float type, and what was found out before.

    `state` is the scale of an element format, or what a block format keeps for the whole tensor;
    `numel` the size of the whole tensor, of which a format sees one chunk at a time; `amax_bits`
    the largest magnitudes of the groups as bits of x's dtype, where they are known and finite.
    """

    q: CastOptions
    work: Work
    double: bool
    state: Tensor | None = None
    numel: int = 0
    amax_bits: Tensor | None = None

    def divide(self, x: Tensor, scale: Tensor) -> Tensor:
        """x / scale in float64, good for one more rounding.

        With 24-bit operands the quotient is never rounded onto a tie of an 8-bit grid. With 53-bit
        ones it can be, so it is rounded to odd: an inexact quotient ends in a one and so is no tie.
        """
        y = x / scale
        if not self.double:
            return y
        (x_m, x_e), (s_m, s_e), (y_m, y_e) = x.frexp(), scale.frexp(), y.frexp()
        product, error = _two_product(y_m, s_m.expand_as(y_m))
        shifted = x_m * DOUBLE.power((x_e - s_e - y_e).clamp(-2, 2))
        return _to_odd(y, (shifted - product) - error)

    def multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        """x * factor in float64, good for one more rounding (see `divide`)."""
        y = x * factor
        if not self.double:
            return y
        x_m, f_m = x.frexp()[0], factor.frexp()[0]
        return _to_odd(y, _two_product(x_m, f_m.expand_as(x_m))[1])


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
    bits = y.view(DOUBLE.integer)
    outward = (rest * y.sign()).sign().to(DOUBLE.integer)
    move = ((bits & 1) == 0) & y.isfinite() & (y != 0)
    return (bits + outward * move).view(DOUBLE.dtype)


def widen(x: Tensor) -> Tensor:
    """x as float64, exactly."""
    if x.dtype == DOUBLE.dtype:
        return x
    if (number := ordinary_number(x)) is not None:
        return x.new_full(x.shape, number, dtype=DOUBLE.dtype)
    single = x.to(SINGLE.dtype)
    y = single.to(DOUBLE.dtype)
    bits = single.view(SINGLE.integer).bitwise_and(0x7FFFFFFF)
    tiny = (bits < 0x00800000) & (bits > 0)
    if any_set(tiny):
        exact = (bits.to(DOUBLE.dtype) * _UNIT32).copysign(y)
        y = y.where(~tiny, exact)
    return y


def ordinary_number(x: Tensor) -> float | None:
    """The number that is all of x, which saves many operations on one; None far from one.

    No step from there to a scale meets a subnormal float32. A device is not asked.
    """
    if x.numel() != 1 or x.device.type != "cpu":
        return None
    number = float(x.item())
    return number if _ORDINARY[0] < number < _ORDINARY[1] else None


def single(number: float) -> float:
    """An ordinary number rounded to float32."""
    return float(np.float32(number))


def any_set(mask: Tensor) -> bool:
    """If any is set; a device is not asked, because the answer would be waited for."""
    return mask.device.type != "cpu" or bool(mask.any())
