"""NVFP4: E2M1 elements, an E4M3 scale for each 16 of them, one float32 scale for the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgate.formats._block import BlockFormat, block_amax_bits, non_finite, poisoned
from qgate.formats._element import ElementFormat
from qgate.formats._work import DOUBLE, CastContext, ScaledChunk, ordinary_number, single, widen
from qgate.formats.definition import round_by_list
from qgate.formats.floats import to_single_grid
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor

_FP32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Nvfp4Format(BlockFormat):
    """Every step is one float32 operation, in TransformerEngine's order:

    s_enc = 448 * 6 / amax(tensor), at most FLT_MAX, 1 for an all-zero tensor;  s_dec = 1 / s_enc
    s_b   = E4M3(amax(block) * (s_enc * (1/6))), at most 448, subnormals and zero included
    e     = E2M1(x * min(1 / (s_b * s_dec), FLT_MAX))
    x     ~ e * s_b * s_dec, exact and rounded once
    """

    scale_element: ElementFormat

    options: ClassVar[frozenset[str]] = frozenset({"axis", "block", "rounding", "generator", "inf"})
    scale: ClassVar[str] = "E4M3, FP32"
    default_block: ClassVar[int] = 16
    needs_amax: ClassVar[bool] = True
    notes = "scales of block and tensor"

    def prepare(self, amax: Tensor) -> Tensor:
        """Return s_enc as float64 that holds a float32 number."""
        bound = self.scale_element.max * self.max
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
        factor = to_single_grid(state * to_single_grid(state.new_tensor(1.0 / 6.0)))
        unrounded = to_single_grid(amax * factor).clamp_(max=self.scale_element.max)
        block_scale = self.scale_element.cast(unrounded, work, rounding="even")
        encode = to_single_grid(1.0 / to_single_grid(block_scale * decode)).clamp_(max=_FP32_MAX)
        scaled = (x * encode).masked_fill_(bad, 0.0)
        if not context.double:
            scaled = to_single_grid(scaled)
        elements = self.element.cast(scaled, work, rounding=q.rounding, generator=q.generator)
        scale = (block_scale * decode).masked_fill_(bad, float("nan"))
        codes = self.scale_element.to_codes(block_scale.masked_fill(bad, float("nan")), work)
        return ScaledChunk(elements, scale, scaled, {"scales": codes})

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
            encode = np.float32(self.scale_element.max * self.max) / amax
        return float(np.minimum(encode, np.float32(_FP32_MAX)))

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        fp32 = np.float32
        encode_scale = fp32(state)
        decode_scale = fp32(1) / encode_scale
        factor = encode_scale * (fp32(1) / fp32(6))
        with np.errstate(all="ignore"):
            amax = np.abs(x).max(axis=1).astype(fp32)
            unrounded = np.minimum(amax * factor, fp32(self.scale_element.max))
            scale = round_by_list(unrounded.astype(np.float64), self.scale_element).astype(fp32)
            encode = np.minimum(fp32(1) / (scale * decode_scale), fp32(_FP32_MAX))
            scaled = x * encode.astype(np.float64)[:, None]
            if not double:
                scaled = scaled.astype(fp32).astype(np.float64)
        codes = round_by_list(scaled, self.element, rounding=q.rounding)
        values = codes * scale.astype(np.float64)[:, None] * float(decode_scale)
        return np.where(poisoned(x, q)[:, None], np.nan, values)
