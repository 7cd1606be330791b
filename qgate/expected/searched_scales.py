"""Scales that a search finds for each group: the smallest squared error of many."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from qgate.expected.conventions import with_options
from qgate.expected.distances import relative_error
from qgate.expected.group_scales import by_groups, group_scales
from qgate.formats.definition import quantize as define
from qgate.formats.definition import round_by_list, scales_and_zero_points
from qgate.formats.mx import mx_format
from qgate.formats.nvfp4 import Nvfp4Format
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

FACTORS = np.linspace(0.25, 1.25, 101)
"""Of the scales that a definition gives; those of vectors, which take long, are fewer."""


GGML_DB = {
    "iq1_s": 0.9, "iq1_m": 1.0, "iq2_xxs": 0.6, "iq2_xs": 0.7, "iq2_s": 0.6, "iq3_xxs": 0.5,
    "iq3_s": 0.65, "iq4_nl": 0.1, "iq4_xs": 0.2,
}  # fmt: skip
"""dB that llama.cpp's quantizers err more than the definition, which tries all rows of a book.

The middle of those with and without an importance matrix: each is at most 0.4 dB from it.
"""


def scales_of(groups: Floats, q: QuantizerSettings, state: float | None = None) -> Floats:
    """Return the scale that the definition gives to each row; `state` is NVFP4's of the tensor."""
    if q.zero_point is not None:
        return scales_and_zero_points(groups, with_options(q, zero_point="minmax"))[0]
    amax = np.abs(np.nan_to_num(groups)).max(axis=1, initial=0.0)
    mx = mx_format(q.format)
    if mx is not None:
        limit = 2 ** (q.scale_bits - 1) - 1
        exponents = mx.define_exponents(amax, q.scale_rule, limit)
        return np.asarray(np.ldexp(1.0, np.clip(exponents, -limit, limit).astype(int)))
    if q.format.kind == "element":
        return group_scales(groups, q, q.format.max, "float32")
    if state is None:
        return np.where(amax > 0, amax, 1.0) / q.format.element.max
    assert isinstance(q.format, Nvfp4Format)
    return q.format.define_scales(groups, q, state)


def search_scales(x: Floats, q: QuantizerSettings) -> Floats:
    """Quantize with the scale of each group that has the smallest squared error of many."""
    one_scale = q.granularity is not None and q.zero_point is None and q.rotation is None
    is_shared = q.format.kind == "block" and q.format.with_share(1.0) is not None
    if not one_scale or (not is_shared and q.format.element.is_codebook) or q.format.name == "hif4":
        raise ValueError(f"{q!r} has no one scale per group to search for.")
    state = q.format.define_state(x) if q.format.kind == "block" else None
    tries = partial(_by_share if is_shared else _by_scale, q=q, state=state)
    return by_groups(x, q, lambda groups: _nearest(groups, tries(groups)))


def _nearest(groups: Floats, tries: Iterator[Floats]) -> Floats:
    """Return for each row the try with the smallest sum of squared errors."""
    nearest, smallest = groups, np.full(len(groups), np.inf)
    for y in tries:
        squares = np.square(y - groups).sum(1)
        nearest = np.where((squares < smallest)[:, None], y, nearest)
        smallest = np.minimum(squares, smallest)
    return nearest


def _by_share(groups: Floats, q: QuantizerSettings, state: float | None) -> Iterator[Floats]:
    """Yield blocks quantized with many times the scales that their codebook gives them."""
    assert q.format.kind == "block"
    for share in FACTORS[:: 8 if q.format.effort > 1 else 1].tolist():
        fmt = q.format.with_share(share)
        assert fmt is not None
        yield fmt.define(groups, q, state, False)


def _by_scale(groups: Floats, q: QuantizerSettings, state: float | None) -> Iterator[Floats]:
    """Yield groups quantized with many times the scales that the definition gives them."""
    scales, is_power = scales_of(groups, q, state), mx_format(q.format) is not None
    for factor in np.ldexp(1.0, np.arange(-3, 3)) if is_power else FACTORS:
        changed = scales * factor
        if state is not None and not is_power:
            assert isinstance(q.format, Nvfp4Format)
            scale = q.format.scale_element
            stored = round_by_list(np.minimum(changed * state, scale.max), scale)
            changed = np.where(stored > 0, stored, scale.min_subnormal) / state
        yield changed[:, None] * round_by_list(
            groups / changed[:, None], q.format.element, rounding=q.rounding, narrow=q.narrow
        )


def search_allowance(q: QuantizerSettings) -> float:
    """Return the squared error that a right search may leave, in times of the definition's."""
    return float(10 ** (0.1 * GGML_DB.get(q.format.name, 0.0)))


def least_searched(x: Floats, q: QuantizerSettings) -> Floats:
    """Return values with the largest error that a right search leaves: mostly the definition's."""
    return x + (define(x, q) - x) * math.sqrt(search_allowance(q))


def searched_error(x: Floats, q: QuantizerSettings) -> float:
    """Return the relative squared error that a search for scales leaves."""
    return relative_error(search_scales(x, q), x)
