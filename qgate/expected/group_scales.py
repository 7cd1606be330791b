"""Scales of groups that share one, as kernels make them and checkpoints store them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from qgate.formats import get
from qgate.formats.definition import by_blocks, round_by_list
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

HALVES = {"bfloat16": "bf16", "float16": "fp16"}
"""Formats by the name of their dtype."""
TIMES, STORED = "times", "stored as "
"""Scales of the largest number times 1/divisor in float32; and such as are rounded after codes."""
PLUS = "plus 1e-07"
"""Scales of amax/divisor and a little more, as SageAttention adds it to those of threads."""


def group_scales(groups: Floats, q: QuantizerSettings, divisor: float, kind: str) -> Floats:
    """Return amax/divisor of each row, rounded to the dtype `kind` or up to a power of two."""
    if q.scale is not None:
        return np.full(len(groups), float(np.float32(float(q.scale))))
    amax = np.abs(groups).max(axis=1, initial=0.0)
    with np.errstate(invalid="ignore"):
        scales = amax * float(np.float32(1 / divisor)) if kind == TIMES else amax / divisor
        scales = float32(scales)
        if kind == PLUS:
            scales = float32(scales + float(np.float32(1e-7)))
        elif kind == "power of two":
            fraction, exponent = np.frexp(np.where(scales > 0, scales, 1.0))
            scales = np.where(
                np.isfinite(scales), np.ldexp(1.0, exponent - (fraction == 0.5)), scales
            )
        elif kind in HALVES:
            scales = rounded_to(HALVES[kind], scales)
        smallest = float(np.finfo(np.float32).smallest_subnormal)
        scales = np.where(amax == 0, 1.0, np.maximum(scales, smallest))
        return np.where(np.isinf(amax) & (q.inf != "saturate"), np.nan, scales)


def as_stored(scales: Floats, kind: str) -> Floats:
    """Round scales that are stored in 16 bits after codes were made with them."""
    half = kind.removeprefix(STORED)
    return rounded_to(HALVES[half], scales) if half != kind else scales


def rounded_to(name: str, values: Floats, **options: Any) -> Floats:
    """Round to an element format by its definition, overflow to the largest number."""
    fmt = get(name)
    assert fmt.kind == "element"
    return round_by_list(values, fmt, **options)


def by_groups(x: Floats, q: QuantizerSettings, rows: Callable[[Floats], Floats]) -> Floats:
    """Apply a function of rows, one per group that shares a scale, to a tensor."""
    if q.granularity == "tensor":
        return rows(x.reshape(1, -1)).reshape(x.shape)
    if q.granularity == "channel":
        axis = q.axis_of(x.ndim)
        moved = np.moveaxis(x, axis, 0)
        groups = moved.reshape(len(moved), math.prod(moved.shape[1:]))
        return np.moveaxis(rows(groups).reshape(moved.shape), 0, axis)
    if q.groups is not None:
        return q.groups.apply(x, rows)
    return by_blocks(x, q, rows)


def float32(values: Floats) -> Floats:
    return values.astype(np.float32).astype(np.float64)
