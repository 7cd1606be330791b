"""Tell codes that GPTQ chose from broken ones: steps from the nearest codes, and their errors.

GPTQ rounds column after column, and adds the error of each to the columns that follow. So its codes
are few steps from the nearest ones, and the error of a column is that of rounding plus a sum of the
errors of columns before it, with the same factors in all rows. Activations are not needed to see
it: what these sums leave of a column's error is as large as the error of the nearest codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.checkpoints.compute import PER_DB, ratio_db, squared
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.ideal import round_to
from qgate.checkpoints.record import StepFigures
from qgate.formats import get

LARGEST_RMS, LARGEST_ROW_RMS, LARGEST_COLUMN_RMS = 1.0, 2.0, 6.0
"""Limits of steps: GPTQ has up to 0.8, 1.7 and 4.2; swapped nibbles of INT4 have 3.5 in all."""
LARGEST_RMS_OF_BITS = {"t2": 0.65, "t3": 0.72}
"""Limit of steps among few codes: GPTQ has up to 0.6, a wrong group index from 0.7 on."""
LARGEST_SLOPE, LARGEST_SLOPE_OF_BITS = 0.6, {"t2": 1.2}
"""Limit of the share of a row's or a column's values that is lost: other codes lose all.

GPTQ loses up to 0.4, and 0.9 where there are four codes.
"""
KEPT_SHARE, TOO_SMALL = 0.25, 8.0
"""Relative error of the nearest codes of a column from which on it is too small, and how fast."""
LARGEST_OFFSET = 0.5
"""Limit of the mean steps of a row: zero points off by one have 1, GPTQ up to 0.3."""
LARGEST_GAIN = 1.8
"""Limit of the squared correlation of steps and values in a group, beside that of chance (1)."""
LARGEST_LEFT_DB = 0.35
"""Limit of what other columns leave of a column's error, over that of the nearest codes.

GPTQ leaves up to 0.15 dB, stochastic rounding 3 dB.
"""
COLUMNS, ROWS = 32, 1024
"""Columns and rows whose errors are looked at."""


@dataclass(frozen=True)
class _Errors:
    """Steps of codes from the nearest, and errors of both, as rows x columns."""

    steps: Tensor
    error: Tensor
    nearest_error: Tensor


def element_indices(weight: QuantizedWeight) -> Tensor:
    """Return the position of each element among the values of its format, in rising order."""
    elements = weight.float_elements()
    if weight.element.startswith(("int", "uint")):
        return elements
    values = torch.from_numpy(get(weight.element).values()).float()
    return torch.bucketize(elements.contiguous(), values[values.isfinite()].unique())


def measure_steps(weight: QuantizedWeight, parent: Tensor) -> StepFigures:
    """Measure how far codes are from the parent's nearest codes, and in which manner."""
    errors = _errors(weight, parent)
    steps = errors.steps
    total, least, energy = map(squared, (errors.error, errors.nearest_error, parent))
    return StepFigures(
        over_nearest_db=ratio_db(total, least, energy),
        share=float((steps != 0).float().mean()),
        largest=int(steps.abs().max()),
        rms=_rms(steps),
        row_rms=float(steps.square().mean(1).max().sqrt()),
        column_rms=float(steps.square().mean(0).max().sqrt()),
        offset=float(steps.mean(1).abs().max()) if steps.shape[1] > 16 else 0.0,
        slope=_slope(errors, parent),
        gain=_gain(weight, errors, parent),
        left_db=_left_db(weight, errors),
    )


def is_error_passed_on(figures: StepFigures, element: str) -> bool:
    """Return True if codes differ from the nearest ones as those of GPTQ do."""
    return (
        figures.rms <= LARGEST_RMS_OF_BITS.get(element[-2:], LARGEST_RMS)
        and figures.row_rms <= LARGEST_ROW_RMS
        and figures.column_rms <= LARGEST_COLUMN_RMS
        and figures.offset <= LARGEST_OFFSET
        and figures.slope <= LARGEST_SLOPE_OF_BITS.get(element[-2:], LARGEST_SLOPE)
        and figures.gain <= LARGEST_GAIN
        and figures.left_db is not None
        and figures.left_db <= LARGEST_LEFT_DB
    )


def nearest_elements(weight: QuantizedWeight, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements nearest to the parent at the stored scales, and their values."""
    scales = weight.scales[:, None, :, None]
    usable = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
    zeros = 0.0 if weight.zero_points is None else weight.zero_points[:, None, :, None]
    offsets = torch.zeros(()) if weight.offsets is None else weight.offsets[:, None, :, None]
    offsets = offsets.nan_to_num(0, 0, 0)
    codes = round_to(weight.element, (weight.in_tiles(parent.float()) - offsets) / usable + zeros)
    values = (codes - zeros) * torch.where(scales.isfinite(), scales, 0.0) + offsets
    return weight.from_tiles(codes), weight.from_tiles(values)


def over_codes_db(weight: QuantizedWeight, parent: Tensor) -> float:
    """Return the error over that of the nearest codes at the stored scales."""
    total = least = energy = 0.0
    for start, stop in weight.spans():
        chunk, source = weight.rows(start, stop), parent[start:stop].float()
        _, nearest = nearest_elements(chunk, source)
        total += squared(chunk.values().nan_to_num(0, 0, 0) - source)
        least += squared(nearest - source)
        energy += squared(source)
    return ratio_db(total, least, energy)


def _errors(weight: QuantizedWeight, parent: Tensor) -> _Errors:
    nearest, values = nearest_elements(weight, parent)
    other = replace(weight, elements=nearest, unit=1.0)
    steps = (element_indices(weight) - element_indices(other)).float()
    return _Errors(steps, weight.values() - parent, values - parent)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _slope(errors: _Errors, parent: Tensor) -> float:
    """Return the largest share of the values of a row or a column that changed codes lose."""
    products = (errors.error - errors.nearest_error) * parent
    squares = parent.square()
    tiny = 1e-30 + 1e-3 * float(squares.mean())
    lost = errors.nearest_error.square()
    slopes = []
    for axis in range(2):
        if parent.shape[axis] < 32:
            continue
        sizes = squares.mean(axis)
        # Columns of less than a step have nothing to lose: what others pass on is more.
        too_small = (lost.mean(axis) - sizes * KEPT_SHARE).clamp(min=0) * TOO_SMALL
        slopes.append(float((products.mean(axis) / (sizes + too_small + tiny)).abs().max()))
    return max(slopes, default=0.0)


def _gain(weight: QuantizedWeight, errors: _Errors, parent: Tensor) -> float:
    """Return the mean square of how steps correlate with values in a group; 1 by chance.

    Scales of other groups make every value too large, or every value too small.
    """
    products = (errors.error - errors.nearest_error) * parent
    width = weight.tile[1] if weight.tile[1] > 1 else 128
    sums = _by_groups(products, width)
    squares = _by_groups(products.square(), width)
    moved = squares > 0
    if not bool(moved.any()):
        return 0.0
    return float((sums[moved].square() / squares[moved]).mean())


def _by_groups(x: Tensor, width: int) -> Tensor:
    pad = -x.shape[1] % min(width, x.shape[1])
    padded = torch.nn.functional.pad(x, (0, pad)) if pad else x
    return padded.reshape(len(x), -1, min(width, x.shape[1])).sum(2)


def _left_db(weight: QuantizedWeight, errors: _Errors) -> float | None:
    """Return the error that columns leave of another's, over that of the nearest codes, in dB.

    In some order of columns GPTQ leaves 0 dB. The order is that of the group index at most, so the
    column of which least is left comes next. Noise is left whatever the other columns are.
    """
    rows, columns = errors.error.shape
    step = -(-rows // ROWS)
    scales = weight.scales.abs().nan_to_num(0, 0, 0).mean(1)
    unit = scales.repeat_interleave(-(-rows // len(scales)))[:rows, None].clamp(min=1e-30)
    error = (errors.error / unit)[::step]
    allowed = (errors.nearest_error / unit)[::step].double().square().mean(0)
    count = min(COLUMNS, columns, len(error) // 4)
    if count < 4 or not bool((allowed > 0).any()):
        return None
    allowed = allowed.clamp(min=float(allowed.median()) / 10)
    squares = error.double().square().sum(0)
    picked = torch.zeros(columns, dtype=torch.bool)
    basis = torch.zeros(count, len(error))
    total = 0.0
    for number in range(count):
        # A column that was picked explains one of as many parts as there are rows by chance.
        ratios = squares / (len(error) - number) / allowed
        ratios[picked] = torch.inf
        column = int(ratios.argmin())
        total += float(ratios[column].clamp(min=1e-3).log10())
        picked[column] = True
        own = error[:, column]
        for _ in range(2):
            own = own - basis.T @ (basis @ own)
        basis[number] = own / own.norm().clamp(min=1e-30)
        squares = (squares - (basis[number] @ error).double().square()).clamp(min=0)
    return PER_DB * total / count
