"""Pictures of magnitudes against counting one by one."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from qgate import formats
from qgate.gate.measuring.pictures import ends, magnitude_picture

WIDE = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=150)
@given(arrays.arrays(np.float32, 12, elements=WIDE), st.lists(st.integers(0, 9), min_size=12))
def test_every_value_is_in_its_octave(values: Any, weights: list[int]) -> None:
    found = magnitude_picture(values, weights[:12], nonfinite=2)
    sizes = [(abs(float(v)), w) for v, w in zip(values, weights, strict=False) if math.isfinite(v)]
    for k, count in enumerate(found["counts"]):
        low = math.ldexp(1.0, found["low"] + k)
        assert count == sum(w for size, w in sizes if low <= size < 2 * low)
    assert found["zeros"] == sum(w for size, w in sizes if size == 0)
    assert sum(found["counts"]) + found["zeros"] + found["nonfinite"] - 2 == sum(weights[:12])
    json.dumps(found, allow_nan=False)


def test_a_tensor_counts_each_element_once() -> None:
    x = torch.tensor([[0.5, 0.75, -1.0], [0.0, 6.0, math.nan]], dtype=torch.bfloat16)
    found = magnitude_picture(x, fmt="fp8_e4m3", saturated=1, flushed=2)
    assert (found["low"], found["counts"]) == (-1, [2, 1, 0, 1])
    assert (found["zeros"], found["nonfinite"]) == (1, 1)
    assert (found["saturated"], found["flushed"]) == (1, 2)
    assert found["largest"] == math.log2(448)
    assert found["smallest"] == -9


def test_nothing_but_zeros_has_no_octave() -> None:
    found = magnitude_picture(torch.zeros(3))
    assert (found["low"], found["counts"], found["zeros"]) == (0, [], 3)
    assert (found["format"], found["largest"], found["smallest"]) == ("", None, None)


@pytest.mark.parametrize("name", formats.names())
def test_only_a_format_without_scales_has_ends(name: str) -> None:
    largest, smallest = ends(name)
    known = formats.get(name)
    scaled = not isinstance(known, formats.ElementFormat) or isinstance(known, formats.IntFormat)
    assert (largest is None, smallest is None) == (scaled, scaled)
    if largest is not None and smallest is not None:
        assert smallest < largest
