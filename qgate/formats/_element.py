"""The base of element formats: facts that follow from the values of the codes.

A family (floats, integers, HiF8) supplies the value of each code and the spacing of its grid; the
rest follows here. Nothing in this file needs torch: methods that meet tensors use the tensor's own
methods.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from qgate.formats._work import DOUBLE, CastContext, ChunkDraws, ScaledChunk, WorkType, widen
from qgate.formats.options import Floats, Rounding

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor

_OPTIONS = frozenset(
    {"scale", "granularity", "axis", "block", "groups", "rounding", "saturate", "inf", "generator"}
)


@dataclass(frozen=True)
class ElementFormat(abc.ABC):
    """A finite set of values with a rounding rule."""

    name: str

    kind: ClassVar[Literal["element"]] = "element"
    options: ClassVar[frozenset[str]] = _OPTIONS
    block: ClassVar[int | None] = None
    scale: ClassVar[str] = "-"
    rounding: ClassVar[Rounding] = "even"
    tapered: ClassVar[bool] = False
    """True if precision falls with the distance from 1, so that the best scale fills no range."""
    always_scaled: ClassVar[bool] = False
    """True if values mean nothing without a scale; one is made from x where none is set."""

    is_codebook: ClassVar[bool] = False
    """True if values are any numbers, not mirrored, and of two as near the lower is taken."""

    needs_amax: ClassVar[bool] = False
    stored: ClassVar[dict[str, int]] = {"scales": 1}

    @property
    def default_rule(self) -> str:
        """The scale rule of a quantizer without one."""
        return "floor"

    @property
    def element(self) -> ElementFormat:
        """The format itself; a block format has another."""
        return self

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits of one code."""

    @property
    @abc.abstractmethod
    def layout(self) -> str:
        """Sign, exponent and mantissa bits, or what stands for them."""

    @property
    @abc.abstractmethod
    def min_normal(self) -> float:
        """The smallest magnitude with full precision."""

    @property
    @abc.abstractmethod
    def max_exponent(self) -> int:
        """The exponent of the largest value, floor(log2(max))."""

    @property
    @abc.abstractmethod
    def mantissa(self) -> int:
        """Bits after the leading one at the largest value."""

    @abc.abstractmethod
    def code_values(self) -> Floats:
        """Return the value of each code, in code order, NaN and Inf included."""

    @abc.abstractmethod
    def inverse_quantum(self, x: Tensor, work: WorkType) -> Tensor | float:
        """Return 1 / (spacing of the grid at x) for each x, the same at both ends of a binade.

        Multiplying by it turns rounding to the format into rounding to an integer.
        """

    @property
    def signed(self) -> bool:
        """True if every value has its negative twin, or nearly every one."""
        return True

    @property
    def notes(self) -> str:
        return ""

    @cached_property
    def sorted_codes(self) -> npt.NDArray[np.int64]:
        """Codes in the order of their values; of two zeros the positive one, NaN left out."""
        values = self.code_values()
        zeros = [code for code in np.flatnonzero(values == 0) if np.signbit(values[code])]
        order = np.argsort(values, kind="stable")
        keep = ~np.isnan(values[order]) & ~np.isin(order, zeros)
        return np.asarray(order[keep], dtype=np.int64)

    @cached_property
    def sorted_values(self) -> Floats:
        """The values of `sorted_codes`, strictly ascending; infinities are at the ends."""
        return np.asarray(self.code_values()[self.sorted_codes], dtype=np.float64)

    def values(self) -> Floats:
        """Return all finite values, ascending."""
        return np.asarray(self.sorted_values[np.isfinite(self.sorted_values)])

    def magnitudes(self) -> Floats:
        """Return the finite values from zero up: the list that defines rounding."""
        values = self.values()
        return np.asarray(values[values >= 0])

    @cached_property
    def _ends(self) -> tuple[float, float]:
        values = self.values()
        return float(values[values > 0][0]), float(values[-1])

    @property
    def max(self) -> float:
        return self._ends[1]

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value (equal to `min_normal` where there are no subnormals)."""
        return self._ends[0]

    def bounds(self, *, narrow: bool = True) -> tuple[float, float]:
        """Return the smallest and the largest value in use."""
        del narrow
        return -self.max, self.max

    def saturates_from(
        self, rounding: Rounding | None = None, largest: float | None = None
    ) -> float:
        """Return the smallest magnitude that, rounded without a bound, is above `largest`.

        `largest` is the format's largest value, or the magnitude of its lowest where that differs.
        A tie saturates where rounding to even leaves the largest value: at 464 for E4M3 it stays.
        """
        rounding = rounding or self.rounding
        largest = self.max if largest is None else largest
        if largest == 0:
            return self.survives_from(rounding)
        step = math.ldexp(1.0, self.max_exponent - self.mantissa)
        if rounding == "zero":
            return largest + step
        stays = rounding != "away" and self.is_even(largest, step)
        return math.nextafter(largest + step / 2, math.inf) if stays else largest + step / 2

    def is_even(self, largest: float, step: float) -> bool:
        """Tell if a tie above the largest value stays there."""
        return largest / step % 2 == 0

    def survives_from(self, rounding: Rounding | None = None) -> float:
        """Return the smallest magnitude that does not become zero."""
        rounding = rounding or self.rounding
        if rounding == "zero":
            return self.min_subnormal
        half = self.min_subnormal / 2
        return half if rounding == "away" else math.nextafter(half, math.inf)

    @property
    def has_inf(self) -> bool:
        return bool(np.isinf(self.code_values()).any())

    @property
    def nan_code(self) -> int | None:
        codes = np.flatnonzero(np.isnan(self.code_values()))
        return int(codes[0]) if len(codes) else None

    @cached_property
    def negative_zero(self) -> int | None:
        """The code of -0, or None where there is a single zero."""
        values = self.code_values()
        codes = np.flatnonzero((values == 0) & np.signbit(values))
        return int(codes[0]) if len(codes) else None

    def nearest(self, x: Tensor) -> Tensor:
        """Round float64 numbers to values of the format; overflow saturates."""
        return self.cast(x, DOUBLE, rounding=self.rounding)

    def to_grid(
        self,
        x: Tensor,
        work: WorkType,
        rounding: Rounding,
        generator: Generator | ChunkDraws | None = None,
    ) -> Tensor:
        """Round x as if the grid went on beyond the largest value."""
        inverse = self.inverse_quantum(x, work)
        return round_to_integer(x * inverse, work, rounding, generator).div_(inverse)

    def cast(
        self,
        x: Tensor,
        work: WorkType,
        *,
        rounding: Rounding,
        saturate: bool = True,
        narrow: bool = True,
        generator: Generator | ChunkDraws | None = None,
    ) -> Tensor:
        """Round x to the format's values; NaN stays NaN, overflow saturates or does not."""
        low, high = self.bounds(narrow=narrow)
        if saturate:
            y = self.to_grid(x.clamp(low, high), work, rounding, generator)
        else:
            y = self.to_grid(x, work, rounding, generator)
            over = (y > high) | (y < low)
            if rounding == "zero":
                y = y.where(~(over & x.isfinite()), y.clamp(low, high))
                over = (y > high) | (y < low)
            y = y.where(~over, y * float("inf") if self.has_inf else y * float("nan"))
            if low == 0:
                y = y.masked_fill(y < 0, float("nan"))
        return y if self.negative_zero is not None else y.add_(0.0)

    def at_random(self, x: Tensor, draws: Tensor) -> Tensor:
        """Round float64 numbers up in size where a draw is below what they lack, else down."""
        x = x.clamp(*self.bounds())
        inverse = self.inverse_quantum(x, DOUBLE)
        steps = (x * inverse).abs()
        below = steps.floor()
        return (below + (draws < steps - below)).copysign(x) / inverse

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        """Split a float64 chunk into elements and scale; without a scale they are the values."""
        q, scale = context.q, context.state
        if scale is not None:
            x = context.divide(x, scale).masked_fill_(scale.isnan(), 0.0)
        elements = self.cast(
            x,
            context.work,
            rounding=q.rounding,
            saturate=q.saturate,
            narrow=q.narrow,
            generator=q.generator,
        )
        return ScaledChunk(elements, x.new_ones(()) if scale is None else scale, x)

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        """Return the float64 scale of `split` from its stored codes."""
        del context
        return widen(stored["scales"])

    def to_codes(self, y: Tensor, work: WorkType) -> Tensor:
        """Return the codes of float64 values; NaN becomes its code, or 0 without one."""
        import torch

        value_table = work.table((self, "values"), self.sorted_values.tolist, y.device)
        code_table = work.table((self, "codes"), self.sorted_codes.tolist, y.device)
        codes = code_table[
            torch.searchsorted(value_table, y.contiguous()).clamp_(max=len(code_table) - 1)
        ]
        if self.negative_zero is not None:
            codes = codes.masked_fill_((y == 0) & y.signbit(), self.negative_zero)
        codes = codes.masked_fill_(y.isnan(), self.nan_code or 0).int()
        if self.bits > 8:
            return codes.to(torch.int16).view(torch.uint16)
        return codes.to(torch.uint8)

    def from_codes(self, codes: Tensor, work: WorkType) -> Tensor:
        """Return the float64 values of codes."""
        table = work.table((self, "decoded"), self.code_values().tolist, codes.device)
        return table[codes.int()]

    def code_dtype(self) -> torch.dtype:
        import torch

        return torch.uint8 if self.bits <= 8 else torch.uint16


def drawn(t: Tensor, generator: Generator | ChunkDraws | None) -> Tensor:
    """Draw a number from 0 to 1 for each element."""
    if isinstance(generator, ChunkDraws):
        return generator.of(t)
    return t.new_empty(t.shape).uniform_(generator=generator)


def round_to_integer(
    t: Tensor, work: WorkType, rounding: Rounding, generator: Generator | ChunkDraws | None = None
) -> Tensor:
    """Round t to integers, in place where possible; -0, NaN and Inf stay as they are."""
    if rounding == "even":
        return t.round_()
    if rounding == "zero":
        return t.trunc_()
    if rounding == "away":
        # One half itself would carry the number just below one half up to one.
        return (t.abs() + work.below_half).trunc_().copysign_(t)
    size = t.abs()
    low = size.floor()
    up = drawn(t, generator) < size - low
    return (low + up).copysign_(t)
