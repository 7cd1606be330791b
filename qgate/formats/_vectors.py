"""Rows of a codebook that are nearest to ratios, by the readable definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qgate.formats.options import Floats

if TYPE_CHECKING:
    from qgate.formats.vector_codebook import VectorFormat

STEPS = 256.0
"""Ratios are whole numbers of such parts of 1, so that sums of squares are exact in any order."""


def define_tile(fmt: VectorFormat, x: Floats, s: Floats, d: Floats) -> tuple[Floats, Floats]:
    """Return the values of tiles at one scale each, and what it costs."""
    unit = np.where(s == 0, d, s)
    unit = np.where(unit == 0, 1.0, unit)
    with np.errstate(over="ignore"):
        ratios = x / unit
    end = 2 * fmt.reach
    r = np.rint(np.clip(ratios, -end, end) * STEPS)
    elements, errors = _define_rows(fmt, r)
    error = np.where(s == 0, np.square(r), errors).sum(axis=1)
    is_beyond = (np.abs(ratios) > end).any(axis=1)
    return elements * s, np.where(is_beyond, np.inf, error * unit[:, 0] ** 2)


def _define_rows(fmt: VectorFormat, r: Floats) -> tuple[Floats, Floats]:
    """Return the nearest elements to ratios, and the squares of their errors."""
    above = _unshifted(fmt, r - fmt.shift * STEPS)
    elements, errors = above[0] + fmt.shift, above[1]
    if fmt.shift:
        below = _unshifted(fmt, r + fmt.shift * STEPS)
        sums = [part.reshape(-1, fmt.shifted).sum(axis=1) for part in (errors, below[1])]
        is_below = np.repeat(sums[1] < sums[0], fmt.shifted).reshape(r.shape)
        elements = np.where(is_below, below[0] - fmt.shift, elements)
        errors = np.where(is_below, below[1], errors)
    return elements, errors


def _unshifted(fmt: VectorFormat, r: Floats) -> tuple[Floats, Floats]:
    rows = fmt.rows()
    signs = np.where((r < 0) & (fmt.signs != ""), -1.0, 1.0)
    if fmt.signs == "even":
        eights, sizes = signs.reshape(-1, 8), np.abs(r).reshape(-1, 8)
        eights[np.arange(len(sizes)), sizes.argmin(axis=1)] *= eights.prod(axis=1)
    target = (r * signs).reshape(-1, rows.shape[1])
    # The square of the distance less that of the target.
    scores = np.square(rows).sum(axis=1) * STEPS - 2 * target @ rows.T
    nearest = rows[scores.argmin(axis=1)]
    errors = np.square(target - nearest * STEPS)
    return nearest.reshape(r.shape) * signs, errors.reshape(r.shape)
