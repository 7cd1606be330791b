"""Blocks that each choose the better of two grids: 4over6, IF4 and its kind, MixFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from qgate.arithmetic import divided
from qgate.formats._block import poisoned
from qgate.formats._element import ElementFormat
from qgate.formats._grids import BlockGrid, define_choice, define_on_grid, sum_errors
from qgate.formats._work import DOUBLE, CastContext, ScaledChunk, single
from qgate.formats.floats import to_single_grid
from qgate.formats.nvfp4 import Nvfp4Format, encode_scale
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor
_SIGN = 128


@dataclass(frozen=True)
class ChoosingFormat(Nvfp4Format):
    """NVFP4 whose blocks take the second of two grids if its error is smaller.

    Each grid g has the block scale s_g = E4M3(amax(block) / largest_g * s_enc * factor_g), the
    elements e_g = round_g(x * min(1 / (s_g * s_dec), FLT_MAX) * (1 / unit_g)), and the error
    e_g * s_g * amax(tensor) * unit_g / bound - x. Absolute ("mae") or squared ("mse") errors are
    added one by one, in tiles along each row and then half by half. A block is e * s_b * s_dec,
    exact and rounded once; where the unit is not 1 the scale is (s_b * s_dec) * unit in float32.
    With `signed` the sign bit of the stored scale says that the second grid is taken; with
    `second_wins` it is also taken where both errors are the same.
    """

    grids: tuple[BlockGrid, BlockGrid] = ()  # type: ignore[assignment]
    error: Literal["mae", "mse"] = "mse"
    signed: bool = True
    second_wins: bool = False
    largest_scale: float = 448.0

    @property
    def notes(self) -> str:
        (first, second), error = self.grids, self.error
        if first.element == second.element:
            return f"a block's largest is {first.largest / second.factor:g} or {first.largest:g}"
        return f"{first.element.name} or {second.element.name} by {error}"

    def prepare(self, amax: Tensor) -> Tensor:
        """Return s_enc as float64, not rounded, so that the tensor's amax follows from it."""
        quotient = self.quotient(amax)
        return quotient.where(quotient > 0, 1.0)

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        q, work, state = context.q, context.work, context.state
        assert state is not None
        amax, bad = self.magnitudes(x, context)
        decode, encode = self.tensor_scale(state), encode_scale(state)
        parts, errors, squares = [], [], self.error == "mse"
        for grid in self.grids:
            base = to_single_grid(to_single_grid(divided(amax, grid.largest)) * encode)
            block_scale = self.stored_scale(base * grid.factor, work)
            ratios = self.ratios(x, block_scale, decode, context)
            if grid.unit != 1:
                ratios = ratios * single(1 / grid.unit)
                ratios = ratios if context.double else to_single_grid(ratios)
            parts.append((block_scale, ratios))
            errors.append(sum_errors(grid, x, block_scale, ratios, context, self.bound, squares))
        second = errors[1] <= errors[0] if self.second_wins else errors[1] < errors[0]
        second = second & ~bad
        block_scale, ratios = (b.where(second, a) for a, b in zip(*parts, strict=True))
        ratios = ratios.masked_fill_(bad, 0.0)
        options = {"rounding": q.rounding, "generator": q.generator}
        elements = self.grids[0].element.cast(ratios, work, **options)
        if self.signed:
            on_second = self.grids[1].element.cast(ratios, work, **options)
            elements = on_second.where(second, elements)
        stored = self.scale_element.to_codes(block_scale.masked_fill(bad, float("nan")), work)
        if self.signed:
            stored = stored | second.to(stored.dtype) * _SIGN
        scale = self._scale(block_scale, second, decode).masked_fill_(bad, float("nan"))
        beside = (second, self.grids[1].element.saturates_from(q.rounding)) if self.signed else None
        return ScaledChunk(elements, scale, ratios, {"scales": stored}, second=beside)

    def _scale(self, block_scale: Tensor, second: Tensor, decode: Tensor) -> Tensor:
        scale, unit = block_scale * decode, self.grids[1].unit
        if unit == 1:
            return scale
        return to_single_grid(to_single_grid(scale) * single(unit)).where(second, scale)

    def to_codes(self, parts: ScaledChunk) -> Tensor:
        codes = super().to_codes(parts)
        if parts.second is None:
            return codes
        second, grid = parts.second[0], self.grids[1]
        on_second = (grid.codes or grid.element).to_codes(parts.elements, DOUBLE).to(codes.dtype)
        chosen: Tensor = (on_second & (2**self.bits - 1)).where(second, codes)
        return chosen

    def from_codes(self, codes: Tensor, stored: dict[str, Tensor]) -> Tensor:
        elements = super().from_codes(codes, stored)
        if not self.signed:
            return elements
        grid = self.grids[1]
        on_second = ElementFormat.from_codes(grid.codes or grid.element, codes, DOUBLE)
        return on_second.where(stored["scales"] >= _SIGN, elements)

    def second_values(self) -> Floats:
        """Return the value of each code of the second grid, in units of the block's scale."""
        grid = self.grids[1]
        return np.asarray((grid.codes or grid.element).code_values() * grid.unit)

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        assert context.state is not None
        if not self.signed:
            return super().unscale(stored, context)
        second = stored["scales"] >= _SIGN
        block_scale = self.scale_element.from_codes(stored["scales"] & (_SIGN - 1), context.work)
        return self._scale(block_scale, second, context.state)

    def define_state(self, x: Floats) -> float:
        return self.define_quotient(x) or 1.0

    def define(
        self, x: Floats, q: CastOptions, state: float | None, double: bool, favor: float = 1.0
    ) -> Floats:
        """Quantize rows by the readable definition; `favor` multiplies the errors of the first."""
        assert state is not None
        codes, scales = self._chosen(x, q, state, double, favor)
        return np.where(poisoned(x, q)[:, None], np.nan, codes * scales[:, None])

    def define_scales(self, x: Floats, q: CastOptions, state: float) -> Floats:
        scales = self._chosen(np.nan_to_num(x), q, state, False, 1.0)[1]
        return np.where(scales > 0, scales, 1.0 / state)

    def _chosen(
        self, x: Floats, q: CastOptions, state: float, double: bool, favor: float
    ) -> tuple[Floats, Floats]:
        """Return the elements of each row on the grid it takes, and its scale."""
        tried, options = [], {"double": double, "squares": self.error == "mse"}
        with np.errstate(all="ignore"):
            for grid in self.grids:
                tried.append(define_on_grid(self, grid, x, q, state, **options))
        return define_choice(tried[0], tried[1], self.second_wins, favor)


def is_signed_choice(fmt: object) -> bool:
    """Tell whether the sign bit of scales says which grid a block of this format is on."""
    return isinstance(fmt, ChoosingFormat) and fmt.signed
