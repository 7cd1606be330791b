"""NVFP4: E2M1 elements, an E4M3 scale for each 16 of them, one float32 scale for the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from qgate.formats._block import BlockFormat, block_amax_bits, non_finite, poisoned
from qgate.formats._element import ElementFormat
from qgate.formats._work import (
    DOUBLE,
    CastContext,
    ScaledChunk,
    WorkType,
    ordinary_number,
    single,
    widen,
)
from qgate.formats.definition import CLEARLY_LESS, round_by_list
from qgate.formats.floats import to_single_grid
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor

Singles = npt.NDArray[np.float32]
_FP32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Nvfp4Format(BlockFormat):
    """Every step is one float32 operation, in TransformerEngine's order:

    s_enc = 448 * 6 / amax(tensor), at most FLT_MAX, 1 for an all-zero tensor;  s_dec = 1 / s_enc
    s_b   = E4M3(amax(block) * (s_enc * (1/6))), at most 448, subnormals and zero included
    e     = E2M1(x * min(1 / (s_b * s_dec), FLT_MAX))
    x     ~ e * s_b * s_dec, exact and rounded once

    With `by_rows` s_enc is made from each row along the axis, not from the tensor. With
    `four_over_six` each block takes the better of s_b = E4M3(b) and E4M3(b * 1.5), which put its
    largest element at 6 and at 4, where b = (amax(block) / 6) * s_enc: the second if the sum of its
    absolute ("mae") or squared ("mse") errors is smaller. `largest_scale` stands for 448 in s_enc.
    """

    scale_element: ElementFormat
    by_rows: bool = False
    four_over_six: Literal["mae", "mse"] | None = None
    largest_scale: float = 448.0

    options: ClassVar[frozenset[str]] = frozenset({"axis", "block", "rounding", "generator", "inf"})
    scale: ClassVar[str] = "E4M3, FP32"
    default_block: ClassVar[int] = 16
    needs_amax: ClassVar[bool] = True

    @property
    def notes(self) -> str:
        if self.four_over_six:
            return "a block's largest is 4 or 6"
        return f"scales of block and {'row' if self.by_rows else 'tensor'}"

    @property
    def is_plain(self) -> bool:
        """True for scales of the tensor and blocks whose largest element is 6."""
        return not self.by_rows and self.four_over_six is None and self.largest_scale == 448

    def prepare(self, amax: Tensor) -> Tensor:
        """Return s_enc as float64 that holds a float32 number."""
        bound = self.largest_scale * self.max
        if (number := ordinary_number(amax)) is not None:
            return amax.new_full((), single(bound / single(number)), dtype=DOUBLE.dtype)
        amax = widen(amax)
        rounded = to_single_grid(amax).clamp_(max=_FP32_MAX)
        encode = to_single_grid(bound / rounded).clamp_(max=_FP32_MAX)
        return encode.where(amax > 0, 1.0)

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        q, work, state = context.q, context.work, context.state
        assert state is not None
        bits = block_amax_bits(x, work)
        bad = non_finite(bits, context)
        amax = to_single_grid(bits.view(work.dtype)).masked_fill_(bad, 0.0)
        decode = self.tensor_scale(state)
        if self.four_over_six is None:
            factor = to_single_grid(state * to_single_grid(state.new_tensor(1.0 / 6.0)))
            block_scale = self._stored(amax * factor, work)
        else:
            block_scale = self._better(x, to_single_grid(amax / 6.0) * state, decode, context)
        scaled = self._ratios(x, block_scale, decode, context).masked_fill_(bad, 0.0)
        elements = self.element.cast(scaled, work, rounding=q.rounding, generator=q.generator)
        scale = (block_scale * decode).masked_fill_(bad, float("nan"))
        codes = self.scale_element.to_codes(block_scale.masked_fill(bad, float("nan")), work)
        return ScaledChunk(elements, scale, scaled, {"scales": codes})

    def _stored(self, unrounded: Tensor, work: WorkType) -> Tensor:
        """Round the product of float32 numbers to float32, then to a scale of the format."""
        bounded = to_single_grid(unrounded).clamp_(max=self.scale_element.max)
        return self.scale_element.cast(bounded, work, rounding="even")

    def _ratios(
        self, x: Tensor, block_scale: Tensor, decode: Tensor, context: CastContext
    ) -> Tensor:
        encode = to_single_grid(1.0 / to_single_grid(block_scale * decode)).clamp_(max=_FP32_MAX)
        ratios = x * encode
        return ratios if context.double else to_single_grid(ratios)

    def _better(self, x: Tensor, base: Tensor, decode: Tensor, context: CastContext) -> Tensor:
        """Return the block scales of 6, or of 4 where their error is smaller."""
        rounding = "even" if context.q.rounding == "stochastic" else context.q.rounding
        base = to_single_grid(base)
        scales, errors = [], []
        for factor in (1.0, 1.5):
            block_scale = self._stored(base * factor, context.work)
            ratios = self._ratios(x, block_scale, decode, context)
            elements = self.element.cast(ratios, context.work, rounding=rounding)
            error = (elements * (block_scale * decode) - x).abs()
            error = error if self.four_over_six == "mae" else error.square()
            scales.append(block_scale)
            errors.append(error.sum(2, keepdim=True))
        return scales[1].where(errors[1] < errors[0] * CLEARLY_LESS, scales[0])

    def tensor_scale(self, state: Tensor) -> Tensor:
        """Return s_dec, the scale that decoding multiplies with."""
        return to_single_grid(1.0 / state)

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        assert context.state is not None
        block_scale = self.scale_element.from_codes(stored["scales"], context.work)
        return block_scale * context.state

    def define_state(self, x: Floats) -> float:
        finite = np.abs(x[np.isfinite(x)])
        amax = np.float32(min(finite.max(initial=0.0), _FP32_MAX))
        if amax == 0:
            return 1.0
        with np.errstate(over="ignore"):
            encode = np.float32(self.largest_scale * self.max) / amax
        return float(np.minimum(encode, np.float32(_FP32_MAX)))

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        fp32 = np.float32
        encode_scale = fp32(state)
        decode_scale = fp32(1) / encode_scale
        factor = encode_scale * (fp32(1) / fp32(6))

        def rounded(unrounded: Singles) -> Floats:
            """Quantize with block scales that are rounded to E4M3."""
            bounded = np.minimum(unrounded, fp32(self.scale_element.max)).astype(np.float64)
            scale = round_by_list(bounded, self.scale_element).astype(fp32)
            encode = np.minimum(fp32(1) / (scale * decode_scale), fp32(_FP32_MAX))
            scaled = x * encode.astype(np.float64)[:, None]
            if not double:
                scaled = scaled.astype(fp32).astype(np.float64)
            codes = round_by_list(scaled, self.element, rounding=q.rounding)
            return np.asarray(codes * scale.astype(np.float64)[:, None] * float(decode_scale))

        with np.errstate(all="ignore"):
            amax = np.abs(x).max(axis=1).astype(fp32)
            if self.four_over_six is None:
                values = rounded(amax * factor)
            else:
                base = amax / fp32(6) * encode_scale
                power = 1 if self.four_over_six == "mae" else 2
                six, four = rounded(base), rounded(base * fp32(1.5))
                of_six, of_four = ((np.abs(y - x) ** power).sum(axis=1) for y in (six, four))
                values = np.where((of_four < of_six * CLEARLY_LESS)[:, None], four, six)
        return np.where(poisoned(x, q)[:, None], np.nan, values)
