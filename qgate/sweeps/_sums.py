"""Error sums of many scales at once, from magnitudes and how often each sign of them occurs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from qgate.formats import ElementFormat
from qgate.metrics import METRICS
from qgate.stats import ErrorSums, serial

Floats = npt.NDArray[np.float64]
_ROOM = 2**17
_PIECE = 2**15


@dataclass
class Folded:
    """Finite values folded to magnitudes: ascending, with the counts of either sign.

    For blocks, magnitudes are relative to the block's scale 2**exponent, and all are of blocks with
    that exponent.
    """

    sizes: Floats
    positive: Floats
    negative: Floats
    exponent: int | None = None

    @staticmethod
    def of(values: Floats, weights: npt.NDArray[np.int64], exponent: int) -> Folded:
        """From distinct values, relative to the scale, and their counts."""
        sizes, place = np.unique(np.abs(values), return_inverse=True)
        below = np.signbit(values)
        positive = np.bincount(place, np.where(below, 0, weights), minlength=len(sizes))
        negative = np.bincount(place, np.where(below, weights, 0), minlength=len(sizes))
        return Folded(sizes, positive.astype(np.float64), negative.astype(np.float64), exponent)

    @staticmethod
    def each(values: Floats, exponent: int | None = None) -> Iterator[Folded]:
        """From values that are not counted, in pieces that stay in the cache."""
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            order = np.argsort(np.abs(piece))
            below = np.signbit(piece)[order].astype(np.float64)
            yield Folded(np.abs(piece)[order], 1.0 - below, below, exponent)


class LevelSums:
    """Sums per level that `add` collects; formats are odd, so folding loses nothing.

    Everything is added up in units of `base`, a power of two, which keeps the squares of float64
    numbers near the ends of their range apart from zero and infinity. Second moments are taken
    about the reference's mean where that is far from zero, so that a correlation survives it.
    """

    def __init__(
        self,
        fmt: ElementFormat,
        exponents: list[float],
        center: float,
        amax: float,
        scale_bits: int = 8,
        scales: list[float] | None = None,
    ) -> None:
        """`scales` are those of whole tensors where they are not 2**exponent to the last bit."""
        self.fmt, self.scale_bits, self.scales = fmt, scale_bits, scales
        power = int(np.frexp(amax)[1])
        self.base = power if abs(power) > 300 else 0
        self.center = float(np.ldexp(center, -self.base))
        if abs(center) < amax / 1e4:
            self.center = 0.0
        self.exponents = np.asarray(exponents, dtype=np.float64)
        zeros = np.zeros(len(exponents))
        self.q_sum, self.q_square, self.q_centered = zeros.copy(), zeros.copy(), zeros.copy()
        self.dot, self.co = zeros.copy(), zeros.copy()
        self.error_sum, self.error_abs, self.error_square = (zeros.copy() for _ in range(3))
        self.error_max = zeros.copy()
        self.saturated, self.underflow, self.flushed = (zeros.copy() for _ in range(3))
        self.saturated_noise, self.flushed_energy = zeros.copy(), zeros.copy()
        self.clamped, self.broken = zeros > 0, zeros > 0
        """Levels at which some block's scale is not the one asked for, or is NaN."""
        self.n = 0.0
        self.r_sum = self.r_abs = self.r_square = self.r_centered = self.r_max = 0.0

    def _block_levels(self, exponent: int, *, zero: bool) -> Floats:
        """The exponents to use, relative to the block's own, as the quantizer would clamp them."""
        limit = 2 ** (self.scale_bits - 1) - 1
        wanted = exponent + self.exponents
        used = np.clip(wanted, -limit, limit)
        if not zero:
            self.clamped |= used != wanted
            if self.scale_bits != 8:
                self.broken |= wanted > limit
        return np.asarray(used - exponent)

    def add(self, folded: Folded) -> None:
        """Magnitudes with weights."""
        if not len(folded.sizes):
            return
        sizes, both = folded.sizes, folded.positive + folded.negative
        signed = folded.positive - folded.negative
        exponents, power = self.exponents, -self.base
        if folded.exponent is not None:
            power += folded.exponent
            exponents = self._block_levels(folded.exponent, zero=sizes[-1] == 0)
        unit = float(np.ldexp(1.0, power))
        true = sizes * unit
        weighted = true * both
        energy = true * weighted
        self.n += float(both.sum())
        self.r_sum += float(true @ signed)
        self.r_abs += float(weighted.sum())
        self.r_square += float(energy.sum())
        up, down = true - self.center, true + self.center
        self.r_centered += float(up**2 @ folded.positive + down**2 @ folded.negative)
        self.r_max = max(self.r_max, float(true[-1]))
        scales = np.exp2(exponents) if self.scales is None else np.asarray(self.scales)
        # Ascending magnitudes: what saturates is a tail, what underflows or is flushed a head.
        ahead = np.concatenate([[0.0], np.cumsum(both)])
        energy_ahead = np.concatenate([[0.0], np.cumsum(energy)])
        zeros = int(np.searchsorted(sizes, 0.0, side="right"))
        under = np.searchsorted(sizes, self.fmt.min_normal * scales, side="left")
        self.underflow += ahead[np.maximum(under, zeros)] - ahead[zeros]
        beyond = self.fmt.saturates_from()
        step = max(_ROOM // len(sizes), 1)
        with serial():
            for start in range(0, len(scales), step):
                part = slice(start, start + step)
                scale = scales[part, None]
                ratios = sizes / scale
                kept = np.array([np.searchsorted(row, beyond) for row in ratios])
                self.saturated[part] += ahead[-1] - ahead[kept]
                rounded = self.fmt.nearest(torch.from_numpy(ratios)).numpy()
                del ratios
                flushed = np.array([np.searchsorted(row, 0.0, side="right") for row in rounded])
                flushed = np.maximum(flushed, zeros)
                self.flushed[part] += ahead[flushed] - ahead[zeros]
                self.flushed_energy[part] += energy_ahead[flushed]
                q = np.multiply(rounded, scale * unit, out=rounded)
                self.q_sum[part] += q @ signed
                self.dot[part] += q @ weighted
                if self.center == 0:
                    self.co[part] += q @ weighted
                else:
                    q_up, q_down = q - self.center, q + self.center
                    self.q_centered[part] += q_up**2 @ folded.positive + q_down**2 @ folded.negative
                    self.co[part] += q_up @ (up * folded.positive) + q_down @ (
                        down * folded.negative
                    )
                error = q - true
                np.multiply(q, q, out=q)
                squares = q @ both
                self.q_square[part] += squares
                if self.center == 0:
                    self.q_centered[part] += squares
                self.error_sum[part] += error @ signed
                square = np.multiply(error, error, out=q)
                self.error_square[part] += square @ both
                for i, tail in enumerate(kept, start):
                    self.saturated_noise[i] += square[i - start, tail:] @ both[tail:]
                np.abs(error, out=error)
                self.error_abs[part] += error @ both
                self.error_max[part] = np.maximum(self.error_max[part], error.max(axis=1))

    def metrics(self, level: int) -> dict[str, float]:
        """All metrics of one level, in the tensor's own units; NaN where blocks became NaN."""
        metrics = METRICS.of("errors")
        if self.broken[level]:
            return {metric.name: float("nan") for metric in metrics}
        sums = self._error_sums(level)
        with np.errstate(over="ignore", under="ignore"):
            return {
                each.name: float(np.ldexp(each.function(sums), each.degree * self.base))
                for each in metrics
            }

    def _error_sums(self, level: int) -> ErrorSums:
        n = self.n
        shift_q, shift_r = self.q_sum[level] / n - self.center, self.r_sum / n - self.center
        return ErrorSums(
            count=int(n),
            mean_actual=float(self.q_sum[level] / n),
            mean_reference=self.r_sum / n,
            m2_actual=_spread(float(self.q_centered[level]), float(n * shift_q**2)),
            m2_reference=_spread(self.r_centered, n * shift_r**2),
            co=float(self.co[level] - n * shift_q * shift_r),
            sum_square_actual=float(self.q_square[level]),
            sum_square_reference=self.r_square,
            dot=float(self.dot[level]),
            sum_square_error=float(self.error_square[level]),
            sum_abs_error=float(self.error_abs[level]),
            sum_error=float(self.error_sum[level]),
            max_abs_error=float(self.error_max[level]),
            sum_abs_reference=self.r_abs,
            max_abs_reference=self.r_max,
        )


def _spread(about_center: float, shift: float) -> float:
    """A centered second moment; what is left of a constant's by rounding is none."""
    left = about_center - shift
    return left if left > 1e-13 * about_center else 0.0
