"""NVFP4: E2M1 elements, an E4M3 or UE5M3 scale per 16 of them, one float32 scale for the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
from qgate.formats.definition import round_by_list
from qgate.formats.floats import to_single_grid
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor

Singles = npt.NDArray[np.float32]
FP32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Nvfp4Format(BlockFormat):
    """Every step is one float32 operation, in TransformerEngine's order:

    s_enc = 448 * 6 / amax(tensor), at most FLT_MAX, 1 for an all-zero tensor;  s_dec = 1 / s_enc
    s_b   = E4M3(amax(block) * (s_enc * (1/6))), at most 448, subnormals and zero included
    e     = E2M1(x * min(1 / (s_b * s_dec), FLT_MAX))
    x     ~ e * s_b * s_dec, exact and rounded once

    With `by_rows` s_enc is made from each row along the axis, not from the tensor. The largest
    value of another element stands for 6, and that of another `scale_element` for 448.
    """

    scale_element: ElementFormat
    by_rows: bool = False

    options: ClassVar[frozenset[str]] = frozenset({"axis", "block", "rounding", "generator", "inf"})
    default_block: ClassVar[int] = 16
    needs_amax: ClassVar[bool] = True

    @property
    def scale(self) -> str:  # type: ignore[override]
        return f"{self.scale_element.name.removeprefix('fp8_').upper()}, FP32"

    @property
    def notes(self) -> str:
        return f"scales of block and {'row' if self.by_rows else 'tensor'}"

    @property
    def largest_scale(self) -> float:
        """The scale that the block with the tensor's largest magnitude has."""
        return self.scale_element.max

    @property
    def bound(self) -> float:
        return self.largest_scale * self.max

    def prepare(self, amax: Tensor) -> Tensor:
        """Return s_enc as float64 that holds a float32 number."""
        quotient = self.quotient(amax)
        return encode_scale(quotient).where(quotient > 0, 1.0)

    def quotient(self, amax: Tensor) -> Tensor:
        """Return bound / amax(tensor) as float64, not rounded yet; 0 for an all-zero tensor."""
        if (number := ordinary_number(amax)) is not None:
            return amax.new_full((), self.bound / single(number), dtype=DOUBLE.dtype)
        amax = widen(amax)
        return (self.bound / to_single_grid(amax).clamp_(max=FP32_MAX)).where(amax > 0, 0.0)

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        q, work, state = context.q, context.work, context.state
        assert state is not None
        amax, bad = self.magnitudes(x, context)
        factor = to_single_grid(state * to_single_grid(state.new_tensor(1.0 / self.max)))
        block_scale, decode = self.stored_scale(amax * factor, work), self.tensor_scale(state)
        ratios = self.ratios(x, block_scale, decode, context).masked_fill_(bad, 0.0)
        elements = self.element.cast(ratios, work, rounding=q.rounding, generator=q.generator)
        scale = (block_scale * decode).masked_fill_(bad, float("nan"))
        codes = self.scale_element.to_codes(block_scale.masked_fill(bad, float("nan")), work)
        return ScaledChunk(elements, scale, ratios, {"scales": codes})

    def magnitudes(self, x: Tensor, context: CastContext) -> tuple[Tensor, Tensor]:
        """Return the largest magnitude of each block, and which blocks are bad."""
        bits = block_amax_bits(x, context.work)
        bad = non_finite(bits, context)
        return to_single_grid(bits.view(context.work.dtype)).masked_fill_(bad, 0.0), bad

    def stored_scale(self, unrounded: Tensor, work: WorkType) -> Tensor:
        """Round the product of float32 numbers to float32, then to a scale of the format."""
        bounded = to_single_grid(unrounded).clamp_(max=self.scale_element.max)
        return self.scale_element.cast(bounded, work, rounding="even")

    def ratios(
        self, x: Tensor, block_scale: Tensor, decode: Tensor, context: CastContext
    ) -> Tensor:
        """Return x in units of the scales of its block and of the tensor."""
        encode = to_single_grid(1.0 / to_single_grid(block_scale * decode)).clamp_(max=FP32_MAX)
        ratios = x * encode
        return ratios if context.double else to_single_grid(ratios)

    def tensor_scale(self, state: Tensor) -> Tensor:
        """Return s_dec, the scale that decoding multiplies with."""
        return to_single_grid(1.0 / encode_scale(state))

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        assert context.state is not None
        block_scale = self.scale_element.from_codes(stored["scales"], context.work)
        return block_scale * context.state

    def define_state(self, x: Floats) -> float:
        quotient = self.define_quotient(x)
        return min(single(quotient), FP32_MAX) if quotient else 1.0

    def define_quotient(self, x: Floats) -> float:
        finite = np.abs(x[np.isfinite(x)])
        amax = np.float32(min(finite.max(initial=0.0), FP32_MAX))
        return self.bound / float(amax) if amax else 0.0

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        assert state is not None
        with np.errstate(all="ignore"):
            factor = np.float32(state) * (np.float32(1) / np.float32(self.max))
            scale = self.define_scale(np.abs(x).max(axis=1).astype(np.float32) * factor)
            ratios = self.define_ratios(x, scale, state, double)
            codes = round_by_list(ratios, self.element, rounding=q.rounding)
            values = codes * scale.astype(np.float64)[:, None] * float(decode_scale(state))
        return np.where(poisoned(x, q)[:, None], np.nan, values)

    def define_scales(self, x: Floats, q: CastOptions, state: float) -> Floats:
        """Return the scale of each row's elements, 1 / s_enc where that of its block is zero."""
        del q
        amax = np.abs(np.nan_to_num(x)).max(axis=1, initial=0.0)
        bounded = np.minimum(amax * (state / self.max), self.scale_element.max)
        scale = round_by_list(bounded, self.scale_element)
        return np.asarray(np.where(scale > 0, scale, 1.0) / state)

    def define_scale(self, unrounded: Singles) -> Singles:
        """Round the scales of blocks."""
        bounded = np.minimum(unrounded, np.float32(self.scale_element.max)).astype(np.float64)
        return round_by_list(bounded, self.scale_element).astype(np.float32)

    def define_ratios(self, x: Floats, scale: Singles, state: float, double: bool) -> Floats:
        encode = np.minimum(np.float32(1) / (scale * decode_scale(state)), np.float32(FP32_MAX))
        ratios = x * encode.astype(np.float64)[:, None]
        return np.asarray(ratios if double else ratios.astype(np.float32).astype(np.float64))


def encode_scale(state: Tensor) -> Tensor:
    """Return s_enc from the state of a tensor, which may not be rounded yet."""
    return to_single_grid(state).clamp_(max=FP32_MAX)


def decode_scale(state: float) -> np.float32:
    """Do what `tensor_scale` does, by the readable definition."""
    return np.float32(1) / np.float32(min(state, FP32_MAX))


def nvfp4_format(fmt: object) -> Nvfp4Format | None:
    """Return a format with scales of blocks and the tensor, and one grid; None for others."""
    return fmt if type(fmt) is Nvfp4Format and not fmt.by_rows else None
