"""The float types that formats compute in, and the input and output of their casts.

Nothing here trusts a float instruction with a subnormal float32: a thread may flush those to zero
(`torch.set_flush_denormal`), so they are read and written as bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from qgate.formats._scratch import BoundedCache
from qgate.formats.options import CastOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_shelf = BoundedCache(256)
_UNIT32 = 2.0**-149
_ORDINARY = 2.0**-100, 2.0**100


@dataclass(frozen=True)
class WorkType:
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
        """Return 2**exponent of an integer tensor, from the bits."""
        return ((exponent.to(self.integer) + self.bias) << self.mantissa).view(self.dtype)

    def table(
        self, key: Hashable, values: Callable[[], Iterable[float]], device: torch.device
    ) -> Tensor:
        """Return a constant as a tensor, made once per device and key."""
        import torch

        def make() -> Tensor:
            table = torch.tensor(list(values()), dtype=torch.float64, device="cpu")
            return table.to(device=device, dtype=self.dtype)

        return _shelf.get((key, self.dtype, device), make)


SINGLE = WorkType(32, mantissa=23, bias=127)
DOUBLE = WorkType(64, mantissa=52, bias=1023)


@dataclass
class ScaledChunk:
    """A chunk [outer, blocks, block, inner] as float64 elements on the grid times a float64 scale.

    `ratios` are the elements before they were rounded: x in units of its scale, as the format
    divides. `stored` holds what `encode` keeps besides the element codes, one row per block in the
    third dimension ("scales", and "micro" for the finer levels of HiF4). `zero_point` is what codes
    of integers have above their elements. `second` says which blocks are on another grid, and from
    where on that one saturates.
    """

    elements: Tensor
    scale: Tensor
    ratios: Tensor
    stored: dict[str, Tensor] = field(default_factory=dict)
    zero_point: Tensor | None = None
    second: tuple[Tensor, float] | None = None


@dataclass
class CastContext:
    """The input of a cast beside its numbers: options, float type, and figures of the tensor.

    `state` is the scale of an element format, or the state that a block format has of the whole
    tensor; `numel` is the size of the whole tensor, of which a cast gets one chunk at a time;
    `amax_bits` are the largest magnitudes of the groups as bits of x's dtype, if computed before
    and finite; `zero_point` goes with the scale of integers; `width` is the length of a tile's row.
    """

    q: CastOptions
    work: WorkType
    double: bool
    state: Tensor | None = None
    numel: int = 0
    amax_bits: Tensor | None = None
    zero_point: Tensor | None = None
    width: int = 0

    def divide(self, x: Tensor, scale: Tensor) -> Tensor:
        """Divide in float64 so that one more rounding is still exact.

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
        """Multiply in float64 so that one more rounding is still exact (see `divide`)."""
        y = x * factor
        if not self.double:
            return y
        x_m, f_m = x.frexp()[0], factor.frexp()[0]
        return _to_odd(y, _two_product(x_m, f_m.expand_as(x_m))[1])


def _two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a * b as a rounded product and its exact error (Dekker), for numbers near one."""
    product = a * b
    splitter = 2.0**27 + 1
    a_high = a * splitter - (a * splitter - a)
    b_high = b * splitter - (b * splitter - b)
    a_low, b_low = a - a_high, b - b_high
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return product, error


def _to_odd(y: Tensor, error: Tensor) -> Tensor:
    """Move y one step toward its exact value y + error where its last bit is even."""
    bits = y.view(DOUBLE.integer)
    outward = (error * y.sign()).sign().to(DOUBLE.integer)
    move = ((bits & 1) == 0) & y.isfinite() & (y != 0)
    return (bits + outward * move).view(DOUBLE.dtype)


def widen(x: Tensor) -> Tensor:
    """Convert x to float64, exactly."""
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
    """Return the only number of x as a Python float; None for more numbers or one far from 1.

    No step from such a number to a scale meets a subnormal float32. Tensors on a device give None,
    because reading them waits.
    """
    if x.numel() != 1 or x.device.type != "cpu":
        return None
    number = float(x.item())
    return number if _ORDINARY[0] < number < _ORDINARY[1] else None


def single(number: float) -> float:
    """Round an ordinary number to float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def any_set(mask: Tensor) -> bool:
    """Tell whether any is set; on a device say yes, because reading the answer waits."""
    return mask.device.type != "cpu" or bool(mask.any())


@dataclass(frozen=True)
class ChunkDraws:
    """The draws of one chunk of a tensor."""

    numbers: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return a draw for each element; those that fill up a block get 1, and never grow."""
        missing = x.shape[2] - self.numbers.shape[2] if x.dim() == 4 else 0
        if not missing:
            return self.numbers
        return x.new_ones(x.shape).double().slice_scatter(self.numbers, 2, 0, -missing)
