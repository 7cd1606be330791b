"""NVFP4: E2M1 elements, an E4M3 scale for each 16 of them, one float32 scale for the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from qgate.arithmetic import divided
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
    absolute ("mae") or squared ("mse") errors is smaller. Each error is e * s_b * amax(tensor) /
    (448 * 6) - x; they are added one by one, in tiles along each row and then half by half.
    `largest_scale` stands for 448.
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

    @property
    def _bound(self) -> float:
        return self.largest_scale * self.max

    def prepare(self, amax: Tensor) -> Tensor:
        """Return s_enc as float64 that holds a float32 number.

        Of `four_over_six` it is not rounded yet, so that the tensor's amax follows from it.
        """
        if (number := ordinary_number(amax)) is not None:
            quotient = self._bound / single(number)
            state = quotient if self.four_over_six else single(quotient)
            return amax.new_full((), state, dtype=DOUBLE.dtype)
        amax = widen(amax)
        encode = self._bound / to_single_grid(amax).clamp_(max=_FP32_MAX)
        encode = encode if self.four_over_six else _encode_scale(encode)
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
            base = to_single_grid(divided(amax, 6.0)) * _encode_scale(state)
            block_scale = self._better(x, to_single_grid(base), decode, context)
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
        assert context.state is not None
        rounding = "even" if context.q.rounding == "stochastic" else context.q.rounding
        amax = to_single_grid(self._bound / context.state)
        single_x = to_single_grid(x) if context.double else x
        scales, errors = [], []
        for factor in (1.0, 1.5):
            block_scale = self._stored(base * factor, context.work)
            ratios = self._ratios(x, block_scale, decode, context)
            codes = self.element.cast(ratios, context.work, rounding=rounding)
            values = to_single_grid(
                divided(to_single_grid(codes * block_scale * amax), self._bound)
            )
            error = to_single_grid(values - single_x).abs_()
            error = error if self.four_over_six == "mae" else to_single_grid(error.square_())
            scales.append(block_scale)
            errors.append(_error_sum(error, context.width or x.shape[2]))
        return scales[1].where(errors[1] < errors[0], scales[0])

    def tensor_scale(self, state: Tensor) -> Tensor:
        """Return s_dec, the scale that decoding multiplies with."""
        return to_single_grid(1.0 / _encode_scale(state))

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        assert context.state is not None
        block_scale = self.scale_element.from_codes(stored["scales"], context.work)
        return block_scale * context.state

    def define_state(self, x: Floats) -> float:
        finite = np.abs(x[np.isfinite(x)])
        amax = np.float32(min(finite.max(initial=0.0), _FP32_MAX))
        if amax == 0:
            return 1.0
        quotient = self._bound / float(amax)
        return quotient if self.four_over_six else min(float(np.float32(quotient)), _FP32_MAX)

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        fp32 = np.float32
        with np.errstate(over="ignore"):
            encode_scale = np.minimum(fp32(state), fp32(_FP32_MAX))
        decode_scale = fp32(1) / encode_scale
        factor = encode_scale * (fp32(1) / fp32(6))
        amax_of_tensor = fp32(self._bound / float(state or 1.0))

        def rounded(unrounded: Singles) -> tuple[Floats, Singles]:
            """Return values and errors with block scales that are rounded to E4M3."""
            bounded = np.minimum(unrounded, fp32(self.scale_element.max)).astype(np.float64)
            scale = round_by_list(bounded, self.scale_element).astype(fp32)
            encode = np.minimum(fp32(1) / (scale * decode_scale), fp32(_FP32_MAX))
            scaled = x * encode.astype(np.float64)[:, None]
            if not double:
                scaled = scaled.astype(fp32).astype(np.float64)
            codes = round_by_list(scaled, self.element, rounding=q.rounding)
            values = codes * scale.astype(np.float64)[:, None]
            shown = values.astype(fp32) * amax_of_tensor / fp32(self._bound)
            return np.asarray(values * float(decode_scale)), np.abs(shown - x.astype(fp32))

        with np.errstate(all="ignore"):
            amax = np.abs(x).max(axis=1).astype(fp32)
            if self.four_over_six is None:
                values, _ = rounded(amax * factor)
            else:
                base = amax / fp32(6) * encode_scale
                width = q.tile[1] if q.tile is not None else x.shape[1]
                (six, of_six), (four, of_four) = rounded(base), rounded(base * fp32(1.5))
                if self.four_over_six == "mse":
                    of_six, of_four = of_six * of_six, of_four * of_four
                better = _defined_sum(of_four, width) < _defined_sum(of_six, width)
                values = np.where(better[:, None], four, six)
        return np.where(poisoned(x, q)[:, None], np.nan, values)


def _encode_scale(state: Tensor) -> Tensor:
    """Return s_enc from the state of a tensor, which may not be rounded yet."""
    return to_single_grid(state).clamp_(max=_FP32_MAX)


def _error_sum(errors: Tensor, width: int) -> Tensor:
    """Add float32 numbers along each row of a block in order, then the rows half by half."""
    rows: Tensor = errors.unflatten(2, (-1, width))
    total = rows[:, :, :, 0]
    for column in range(1, width):
        total = to_single_grid(total + rows[:, :, :, column])
    while (count := total.shape[2]) > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        pairs = to_single_grid(total[:, :, : count - half] + total[:, :, half:])
        total = total[:, :, :half].clone()
        total[:, :, : count - half] = pairs
    return total


def _defined_sum(errors: Singles, width: int) -> Singles:
    """Do what `_error_sum` does, by the readable definition."""
    rows = errors.reshape(len(errors), -1, width)
    totals = [np.zeros(len(errors), np.float32) for _ in range(rows.shape[1])]
    for row in range(rows.shape[1]):
        for column in range(width):
            totals[row] = totals[row] + rows[:, row, column]
    while (count := len(totals)) > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        totals = [
            totals[row] + totals[row + half] if row + half < count else totals[row]
            for row in range(half)
        ]
    return totals[0]
