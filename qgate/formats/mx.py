"""The OCP microscaling formats: a power-of-two scale per block, rounded by one of four rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgate.formats._block import BlockFormat, Format, block_amax_bits, non_finite, poisoned
from qgate.formats._work import CastContext, ScaledChunk
from qgate.formats.definition import round_by_list
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MxFormat(BlockFormat):
    """Elements times 2**S. S is made from the block's largest magnitude (`scale_rule`):

    floor  floor(log2 amax) - emax, the OCP rule: the largest elements may saturate
    ceil   ceil(log2 amax) - emax
    even   floor(log2 of amax rounded half up to the element's mantissa) - emax
    rceil  the smallest S with amax <= max * 2**S: nothing saturates
    """

    size: int = 32
    default_rule: str = "floor"

    options: ClassVar[frozenset[str]] = frozenset(
        {"axis", "block", "scale_rule", "scale_bits", "rounding", "generator", "inf"}
    )
    scale: ClassVar[str] = "E8M0"
    notes = "four scale rules"

    @property
    def block(self) -> int:
        return self.size

    def carry(self, rule: str, mantissa: int) -> int:
        """Return what to add to the bits of amax so that its exponent field becomes S + emax."""
        one = 1 << mantissa
        largest = int(self.max / 2.0**self.element.max_exponent * one) - one
        return {
            "floor": 0,
            "ceil": one - 1,
            "even": one >> (self.element.mantissa + 1),
            "rceil": one - 1 - largest,
        }[rule]

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        q, work = context.q, context.work
        amax = block_amax_bits(x, work)
        bad = non_finite(amax, context)
        infinite = amax == work.exponent_mask
        limit = 2 ** (q.scale_bits - 1) - 1
        exponent = (amax + self.carry(q.scale_rule, work.mantissa)) >> work.mantissa
        exponent = exponent - (work.bias + self.element.max_exponent)
        if q.scale_bits != 8:
            bad = bad | ((exponent > limit) & ~infinite)
        exponent = exponent.where(~infinite, limit).clamp_(-limit, limit)
        ratios = (x * work.power(-exponent)).masked_fill_(bad, 0.0)
        elements = self.element.cast(ratios, work, rounding=q.rounding, generator=q.generator)
        codes = (exponent + limit).masked_fill_(bad, 2 * limit + 1)
        scale = work.power(exponent).masked_fill_(bad, float("nan"))
        return ScaledChunk(elements, scale, ratios, {"scales": codes.byte()})

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        limit = 2 ** (context.q.scale_bits - 1) - 1
        codes = stored["scales"].to(context.work.integer)
        return context.work.power(codes - limit).masked_fill_(codes == 2 * limit + 1, float("nan"))

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        del state, double
        limit = 2 ** (q.scale_bits - 1) - 1
        exponent = self.define_exponents(np.abs(x).max(axis=1), q.scale_rule, limit)
        bad = poisoned(x, q)
        if q.scale_bits < 8:
            bad = bad | ((exponent > limit) & np.isfinite(exponent))
        scale = np.ldexp(1.0, np.clip(exponent, -limit, limit).astype(int))[:, None]
        values = round_by_list(x / scale, self.element, rounding=q.rounding) * scale
        return np.where(bad[:, None], np.nan, values)

    def define_exponents(self, amax: Floats, rule: str, limit: int) -> Floats:
        """Return the shared exponents by the words of the rule, before they are clamped."""
        finite = np.isfinite(amax)
        # amax = fraction * 2**exponent, fraction in [0.5, 1)
        fraction, exponent = np.frexp(np.where(finite, amax, 1.0))
        log2_floor, one_to_two = exponent - 1, 2 * fraction
        emax = self.element.max_exponent
        if rule == "floor":
            shared = log2_floor - emax
        elif rule == "ceil":
            shared = log2_floor + (one_to_two > 1) - emax
        elif rule == "even":
            steps = 2.0**self.element.mantissa
            rounded = np.floor(one_to_two * steps + 0.5) / steps
            shared = log2_floor + (rounded >= 2) - emax
        else:
            shared = log2_floor - emax + (one_to_two > self.max / 2.0**emax)
        return np.where(finite, np.where(amax == 0, -limit, shared), np.inf)


def mx_format(fmt: Format) -> MxFormat | None:
    """Return the format if it is a microscaling one, else None."""
    return fmt if isinstance(fmt, MxFormat) else None
