"""Error sums of many scales at once, from magnitudes and the counts of either sign."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qgate.formats import ElementFormat
from qgate.metrics import METRICS
from qgate.scales.levels import Level
from qgate.scales.rounding import round_rows
from qgate.stats import Counts, ErrorSums, Values, serial
from qgate.stats.summary import Floats

_ROOM = 2**17
_PIECE = 2**15


@dataclass
class CellEnds:
    """Cells of numbers that round alike at every level, each with its numbers' mean as magnitude.

    `spreads` are sums of squared distances from the mean.
    """

    spreads: Floats
    least: Floats
    greatest: Floats


@dataclass
class Folded:
    """Finite values folded to magnitudes: ascending, with the counts of either sign.

    For blocks, magnitudes are relative to the block's scale 2**exponent, and all are of blocks with
    that exponent. With `cells`, a magnitude stands for several numbers.
    """

    sizes: Floats
    positive: Floats
    negative: Floats
    exponent: int | None = None
    cells: CellEnds | None = None

    @property
    def counts(self) -> Floats:
        return self.positive + self.negative

    @staticmethod
    def pieces(values: Floats, exponent: int | None = None) -> Iterator[Folded]:
        """Fold values that are not counted, in pieces that stay in the cache."""
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            order = np.argsort(np.abs(piece))
            below = np.signbit(piece)[order].astype(np.float64)
            yield Folded(np.abs(piece)[order], 1.0 - below, below, exponent)


class LevelSums:
    """Sums per level that `add` collects; formats are odd functions, so folding loses nothing.

    All sums are in units of `base`, a power of two, which keeps the squares of float64 numbers near
    the ends of their range apart from zero and infinity. Second moments are about the reference's
    mean where that is far from zero, so that the correlation stays exact.
    """

    def __init__(
        self, fmt: ElementFormat, levels: Sequence[Level], summary: Counts | Values, scale_bits: int
    ) -> None:
        self.fmt, self.limit, self.is_wide = fmt, 2 ** (scale_bits - 1) - 1, scale_bits == 8
        power = math.frexp(summary.amax)[1]
        self.base = power if abs(power) > 300 else 0
        center = _center_of(summary)
        far = abs(center) >= summary.amax / 1e4
        self.center = math.ldexp(center, -self.base) if far else 0.0
        self.exponents = np.array([level.exponent for level in levels])
        # Of whole tensors: one may not be 2**exponent to the last bit.
        self.scales = np.array([level.factor for level in levels])
        (
            self.q_sum, self.q_square, self.q_centered, self.dot, self.co,
            self.error_sum, self.error_abs, self.error_square, self.error_max,
            self.saturated, self.underflow, self.flushed,
            self.saturated_noise, self.flushed_energy,
        ) = np.zeros((14, len(levels)))  # fmt: skip
        self.clamped, self.broken = np.zeros((2, len(levels)), dtype=bool)
        """Levels at which some block's scale was clamped, or is NaN."""
        self.n = self.r_sum = self.r_abs = self.r_square = self.r_centered = self.r_max = 0.0

    def scales_at(self, exponent: int | None) -> Floats:
        """Return the scales to use, relative to a block's own, as the quantizer clamps them."""
        if exponent is None:
            return self.scales
        clamped = np.clip(exponent + self.exponents, -self.limit, self.limit)
        return np.asarray(np.exp2(clamped - exponent))

    def _note_clamped(self, exponent: int) -> None:
        exponents = exponent + self.exponents
        self.clamped |= np.abs(exponents) > self.limit
        if not self.is_wide:
            self.broken |= exponents > self.limit

    def add(self, folded: Folded) -> None:
        """Add magnitudes with their weights to the sums of every level."""
        if not len(folded.sizes):
            return
        sizes, counts, signed = folded.sizes, folded.counts, folded.positive - folded.negative
        scales, power = self.scales_at(folded.exponent), -self.base
        if folded.exponent is not None:
            power += folded.exponent
            if sizes[-1] > 0:
                self._note_clamped(folded.exponent)
        unit = float(np.ldexp(1.0, power))
        true = sizes * unit
        cells = folded.cells or CellEnds(np.zeros(len(sizes)), sizes, sizes)
        spreads, least, greatest = (
            cells.spreads * unit * unit,
            cells.least * unit,
            cells.greatest * unit,
        )
        spread = float(spreads.sum())
        weighted = true * counts
        energy = true * weighted + spreads
        self.n += float(counts.sum())
        self.r_sum += float(true @ signed)
        self.r_abs += float(weighted.sum())
        self.r_square += float(energy.sum())
        up, down = true - self.center, true + self.center
        self.r_centered += float(up**2 @ folded.positive + down**2 @ folded.negative) + spread
        self.r_max = max(self.r_max, float(greatest.max()))
        # Ascending magnitudes: saturated ones are a tail, and those that underflow a head.
        ahead = np.concatenate([[0.0], np.cumsum(counts)])
        energy_ahead = np.concatenate([[0.0], np.cumsum(energy)])
        zeros = int(np.searchsorted(sizes, 0.0, side="right"))
        under = np.searchsorted(sizes, self.fmt.min_normal * scales, side="left")
        self.underflow += ahead[np.maximum(under, zeros)] - ahead[zeros]
        beyond = self.fmt.saturates_from()
        step = max(_ROOM // len(sizes), 1)
        for start in range(0, len(scales), step):
            part = slice(start, start + step)
            scale = scales[part, None]
            ratios = sizes / scale
            tails = np.array([row.searchsorted(beyond) for row in ratios])
            self.saturated[part] += ahead[-1] - ahead[tails]
            rounded = round_rows(self.fmt, ratios)
            flushed = np.array([row.searchsorted(0.0, "right") for row in rounded])
            flushed = np.maximum(flushed, zeros)
            self.flushed[part] += ahead[flushed] - ahead[zeros]
            self.flushed_energy[part] += energy_ahead[flushed]
            q = np.multiply(rounded, scale * unit, out=rounded)
            for ends in (least, greatest) if folded.cells else ():
                self._note_largest(part, np.abs(q - ends))
            self.q_sum[part] += q @ signed
            dot = q @ weighted
            self.dot[part] += dot
            if self.center == 0:
                self.co[part] += dot
            else:
                q_up, q_down = q - self.center, q + self.center
                self.q_centered[part] += q_up**2 @ folded.positive + q_down**2 @ folded.negative
                self.co[part] += q_up @ (up * folded.positive)
                self.co[part] += q_down @ (down * folded.negative)
            error = np.subtract(q, true, out=ratios)
            np.multiply(q, q, out=q)
            squares = q @ counts
            self.q_square[part] += squares
            if self.center == 0:
                self.q_centered[part] += squares
            self.error_sum[part] += error @ signed
            square = np.multiply(error, error, out=q)
            self.error_square[part] += square @ counts + spread
            for i in np.flatnonzero(tails < len(sizes)):
                tail = tails[i]
                noise = square[i, tail:] @ counts[tail:]
                noise += spreads[tail:].sum() if folded.cells else 0.0
                self.saturated_noise[start + i] += noise
            np.abs(error, out=error)
            if not folded.cells:
                self._note_largest(part, error)
            self.error_abs[part] += error @ counts

    def _note_largest(self, part: slice, errors: Floats) -> None:
        self.error_max[part] = np.maximum(self.error_max[part], errors.max(axis=1))

    def metrics(self) -> list[dict[str, float]]:
        """Return all metrics of each level in the tensor's units; NaN where blocks became NaN."""
        metrics = METRICS.of("errors")
        names = [metric.name for metric in metrics]
        formulas = [metric.formula or _undefined for metric in metrics]
        exact = [metric.exact if metric.formula else math.nan for metric in metrics]
        undefined = [math.nan] * len(metrics)
        degrees = [metric.degree * self.base for metric in metrics]
        results = []
        with np.errstate(over="ignore", under="ignore"):
            for sums, is_broken in zip(self._error_sums(), self.broken.tolist(), strict=True):
                if is_broken or not sums.count:
                    values = undefined
                elif sums.max_abs_error == 0:
                    values = exact
                else:
                    values = [float(formula(sums)) for formula in formulas]
                if self.base:
                    values = [float(np.ldexp(*each)) for each in zip(values, degrees, strict=True)]
                results.append(dict(zip(names, values, strict=True)))
        return results

    def _error_sums(self) -> Iterator[ErrorSums]:
        n, mean_r = self.n, self.r_sum / self.n
        shift_r = mean_r - self.center
        m2_r = _spread(self.r_centered, n * shift_r**2)
        sums = (
            self.q_sum, self.q_square, self.q_centered, self.dot, self.co, self.error_sum,
            self.error_abs, self.error_square, self.error_max,
        )  # fmt: skip
        for q_sum, q_square, q_centered, dot, co, error, error_abs, square, largest in zip(
            *(row.tolist() for row in sums), strict=True
        ):
            shift_q = q_sum / n - self.center
            yield ErrorSums(
                count=int(n),
                mean_actual=q_sum / n,
                mean_reference=mean_r,
                m2_actual=_spread(q_centered, n * shift_q**2),
                m2_reference=m2_r,
                co=co - n * shift_q * shift_r,
                sum_square_actual=q_square,
                sum_square_reference=self.r_square,
                dot=dot,
                sum_square_error=square,
                sum_abs_error=error_abs,
                sum_error=error,
                max_abs_error=largest,
                sum_abs_reference=self.r_abs,
                max_abs_reference=self.r_max,
            )


def _undefined(_: object) -> float:
    return math.nan


def _spread(about_center: float, shift: float) -> float:
    """Return a centered second moment; a remainder of rounding counts as 0."""
    moment = about_center - shift
    return moment if moment > 1e-13 * about_center else 0.0


def _center_of(summary: Counts | Values) -> float:
    """Return a number next to the mean, as the center of second moments."""
    if isinstance(summary, Values):
        return summary.mean
    values, weights = summary.weighted()
    return float(values @ (weights / max(summary.finite, 1)))


def without_massive(
    fmt: ElementFormat,
    parts: Iterable[Folded],
    scale_of: Callable[[int | None], Floats],
    beyond: float,
) -> tuple[float, int]:
    """Return the SQNR of the elements up to a magnitude, and the number beyond it."""
    # In units near that magnitude, no square overflows.
    base = math.frexp(beyond)[1]
    signal = noise = elements = 0.0
    for folded in parts:
        own, scale = folded.exponent or 0, float(scale_of(folded.exponent)[0])
        end = int(np.searchsorted(np.ldexp(folded.sizes, own), beyond, side="right"))
        elements += float(folded.counts[end:].sum())
        sizes, weights = folded.sizes[:end], folded.counts[:end]
        spread = 0.0 if folded.cells is None else folded.cells.spreads[:end].sum()
        spread = np.ldexp(spread, 2 * (own - base))
        with serial():
            rounded = fmt.nearest(torch.from_numpy(sizes / scale)).numpy() * scale
        true = np.ldexp(sizes, own - base)
        signal += float(np.square(true) @ weights + spread)
        noise += float(np.square(np.ldexp(rounded, own - base) - true) @ weights + spread)
    if noise == 0:
        return math.inf, int(elements)
    return (10 * math.log10(signal / noise) if signal else -math.inf), int(elements)
