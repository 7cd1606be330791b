"""Faulty casts of a parent that give a stored weight, by the words that checks of kernels have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from qgate.causes.casts import wrong_casts
from qgate.checkpoints.grids import QuantizedWeight
from qgate.errors import QgateError
from qgate.formats import get
from qgate.formats.definition import quantize as define
from qgate.formats.integers import IntFormat
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

MOST_ELEMENTS = 1 << 17
"""Elements in leading rows that casts are tried at."""
MOST_OTHERS = 0.01
"""Share of values that a cast may leave: ratios near a boundary are rounded either way."""
EXACT, STORED = 1e-5, 2.0**-8
"""Relative distances of values from those of a cast: of float32, and of scales in 16 bits."""
UNLIKE = 0.5
"""Largest share of values that a right cast may have for one with scales in 16 bits to be named."""
_MX = {"fp8_e4m3": "mxfp8", "fp8_e5m2": "mxfp8_e5m2", "fp4_e2m1": "mxfp4"}


def describe_cast(weight: QuantizedWeight, parent: Tensor) -> str:
    """Name the faulty cast that gives the values of a weight, scales included; empty if none."""
    count = min(len(weight.elements), max(1, MOST_ELEMENTS // max(1, weight.shape[1])))
    x = parent[:count].double().numpy()
    values = weight.rows(0, count).values().double().numpy()
    quantizers = list(_settings(weight))
    ideals = [define(x, settings) for settings in quantizers]
    if any(_share(ideal, values, EXACT) >= 1 - MOST_OTHERS for ideal in ideals):
        return ""
    best, words = 1 - MOST_OTHERS, ""
    for settings, ideal in zip(quantizers, ideals, strict=True):
        is_unlike = _share(ideal, values, STORED) < UNLIKE
        for cast in wrong_casts(settings, others=False):
            result = cast.apply(x)
            if result is None or result.shape != values.shape:
                continue
            share = _share(result, values, EXACT)
            if is_unlike and not share > best:  # of two that are as near, the exact one counts more
                share = _share(result, values, STORED) - MOST_OTHERS / 2
            if share > best:
                best, words = share, f"it {cast.words}"
            if best == 1.0:
                return words
    return words


def _share(result: Floats, values: Floats, distance: float) -> float:
    with np.errstate(invalid="ignore"):
        return float((np.abs(result - values) <= distance * np.abs(values)).mean())


def _settings(weight: QuantizedWeight) -> Iterator[QuantizerSettings]:
    """List the quantizers that a weight's format stands for; none where rows say too little."""
    is_plain = weight.zero_points is None and weight.offsets is None and weight.blocks is None
    height, width = weight.tile
    if not is_plain or weight.order is not None or height > 1:
        return
    is_row = width >= weight.shape[1]
    options = {"granularity": "channel", "axis": 0} if is_row else _blocks(width)
    if weight.scale_codes is not None:
        if weight.scale_codes.dtype == torch.uint8 and width == 32 and weight.element in _MX:
            yield QuantizerSettings(get(_MX[weight.element]), {})
        return
    try:
        fmt = get(weight.element)
    except QgateError:
        return
    yield QuantizerSettings(fmt, options)
    if isinstance(fmt, IntFormat):
        half = _HalfStep(fmt.name, fmt.width, fmt.fraction_bits, fmt.signed)
        yield QuantizerSettings(half, {**options, "narrow": False})


def _blocks(width: int) -> dict[str, object]:
    return {"granularity": "block", "block": width, "axis": -1}


class _HalfStep(IntFormat):
    """Integers whose scales are made from the middle of both ends: amax/127.5."""

    @property
    def max(self) -> float:
        return super().max + self.step / 2

    def bounds(self, *, narrow: bool = True) -> tuple[float, float]:
        largest = super().max
        return (-largest if narrow else -largest - self.step), largest
