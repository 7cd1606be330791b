"""A wrong code has one name, at an argument and inside a kernel."""

from __future__ import annotations

import numpy as np
import pytest

import qgate
from qgate.causes.integers import ROUNDED_DOWN, ROUNDED_UP, code_faults, grid_faults

VALUES = np.array([0.3, -0.3, 0.9, 1.7, 2.6, -5.0, 6.0])


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e4m3", "fp4_e2m1", "mxfp4"])
def test_codes_rounded_one_way_have_one_name(fmt: str) -> None:
    scaled = {} if fmt.startswith("mx") else {"granularity": "tensor"}
    q = qgate.Quantizer(fmt, **scaled)
    words = [fault.words for fault in (*code_faults(q), *grid_faults(q))]
    # Of integers the ratio may be a quotient or a product: two ways to one fault.
    ways = 2 if fmt.startswith("int") else 1
    assert [words.count(name) for name in (ROUNDED_DOWN, ROUNDED_UP)] == [ways, ways]
    assert {name for name in words if "rounded" in name} == {ROUNDED_DOWN, ROUNDED_UP}


def test_values_of_a_grid_are_rounded_one_way_and_cut_off() -> None:
    q = qgate.Quantizer("fp4_e2m1", granularity="tensor", scale=1.0)
    changed = {fault.words: fault.apply(VALUES) for fault in grid_faults(q)}
    down, up = changed[ROUNDED_DOWN], changed[ROUNDED_UP]
    assert down is not None
    assert up is not None
    assert down.tolist() == [0.0, -0.5, 0.5, 1.5, 2.0, -6.0, 6.0]
    assert up.tolist() == [0.5, 0.0, 1.0, 2.0, 3.0, -4.0, 6.0]
    early = changed["saturates at 3, not at 6"]
    assert early is not None
    assert np.abs(early).max() == 3.0
