"""Scales that a search finds for each group: the smallest squared error of many."""

from __future__ import annotations

import numpy as np

from qgate.expected.conventions import with_options
from qgate.expected.distances import relative_error
from qgate.expected.group_scales import by_groups, group_scales
from qgate.formats.definition import round_by_list, scales_and_zero_points
from qgate.formats.mx import mx_format
from qgate.formats.nvfp4 import Nvfp4Format
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings


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
    if q.format.name == "hif4" or not one_scale:
        raise ValueError(f"{q!r} has no one scale per group to search for.")
    state = q.format.define_state(x) if q.format.kind == "block" else None
    is_power = mx_format(q.format) is not None
    factors = np.ldexp(1.0, np.arange(-3, 3)) if is_power else np.linspace(0.25, 1.25, 101)
    element = q.format.element

    def rows(groups: Floats) -> Floats:
        scales = scales_of(groups, q, state)
        nearest, smallest = groups, np.full(len(groups), np.inf)
        for factor in factors:
            changed = scales * factor
            if state is not None and not is_power:
                assert isinstance(q.format, Nvfp4Format)
                scale = q.format.scale_element
                stored = round_by_list(np.minimum(changed * state, scale.max), scale)
                changed = np.where(stored > 0, stored, scale.min_subnormal) / state
            y = changed[:, None] * round_by_list(
                groups / changed[:, None], element, rounding=q.rounding, narrow=q.narrow
            )
            squares = np.square(y - groups).sum(1)
            nearest = np.where((squares < smallest)[:, None], y, nearest)
            smallest = np.minimum(squares, smallest)
        return nearest

    return by_groups(x, q, rows)


def searched_error(x: Floats, q: QuantizerSettings) -> float:
    """Return the relative squared error that a search for scales leaves."""
    return relative_error(search_scales(x, q), x)
