"""ONNX's node cases of low-bit types: computed by qgate's formats, or refused with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.conformance import onnx_nodes
from tests.conformance.onnx_nodes import NodeCase, Refusal
from tests.conformance.reading import Array, Mask
from tests.shares import proof, slow_file

pytestmark = slow_file

ALL, CHOSEN, LOW_BIT = 1884, 193, 164
"""The cases of onnx 1.23.2: all, those that quantize or have a low-bit type, the latter alone."""
CHECKED = {
    "fp8_e4m3": 22,
    "fp8_e5m2": 20,
    "fp8_e4m3fnuz": 18,
    "fp8_e5m2fnuz": 18,
    "fp4_e2m1": 14,
    "int4": 17,
    "int2": 17,
    "uint8": 12,
    "uint4": 17,
    "uint2": 17,
    "mxint8": 4,
}
"""The cases that are computed, by format."""
REFUSED = {
    "INT16: qgate has no such format": 3,
    "UINT16: qgate has no such format": 2,
    "a product of integers, no quantizer": 12,
}
"""The others, by the reason why qgate does not compute them."""


def _is_negative_zero(x: Array) -> Mask:
    return (x == 0) & np.signbit(x)


def _is_nan_of_fp4(case: NodeCase, x: Array, theirs: Array, ours: Array) -> Mask:
    fp4 = case.outputs[0].type == "FLOAT4E2M1"
    return fp4 & np.isnan(x) & np.isnan(ours) & _is_negative_zero(theirs)


def _loses_its_sign(case: NodeCase, x: Array, theirs: Array, ours: Array) -> Mask:
    quantized = (case.op, case.outputs[0].type) == ("QuantizeLinear", "FLOAT4E2M1")
    return quantized & _is_negative_zero(x) & _is_negative_zero(ours) & (theirs == 0)


def _wraps(case: NodeCase, x: Array, theirs: Array, ours: Array) -> Mask:
    target = case.outputs[0].type
    if case.op not in ("Cast", "CastLike") or "INT" not in target:
        return np.zeros_like(x, dtype=bool)
    span = 2.0 ** int(target[-1])
    low = 0.0 if target.startswith("U") else -span / 2
    wrapped = (x - low) % span + low
    return (theirs == wrapped) & (ours == np.clip(x, low, low + span - 1)) & (ours != theirs)


def _divides_in_float32(case: NodeCase, x: Array, theirs: Array, ours: Array) -> Mask:
    if case.op != "DynamicQuantizeLinear":
        return np.zeros_like(x, dtype=bool)
    quotients = x / case.outputs[1].numbers
    return (np.abs(quotients % 1 - 0.5) < 2.0**-20) & (np.abs(ours - theirs) == 1)


@dataclass(frozen=True)
class Difference:
    """A difference by design: the elements that differ, and the number of cases with some.

    `applies` is given a case, its first input x, ONNX's numbers and ours.
    """

    reason: str
    applies: Callable[[NodeCase, Array, Array, Array], Mask]
    cases: int


DIFFERENCES = (
    Difference(
        "FP4 has no NaN: ONNX stores -0, and qgate keeps the NaN",
        _is_nan_of_fp4,
        cases=6,
    ),
    Difference(
        "beyond the range ONNX's cast to integers wraps around, and qgate saturates",
        _wraps,
        cases=24,
    ),
    Difference(
        "ONNX adds a zero point of 0 to the FP4 number -0, which makes it 0",
        _loses_its_sign,
        cases=1,
    ),
    Difference(
        "ONNX rounds x / scale to float32, which makes a tie of a quotient beside one",
        _divides_in_float32,
        cases=2,
    ),
)


@dataclass
class Results:
    """What became of each case."""

    checked: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def results() -> Results:
    totals = Results()
    for case in onnx_nodes.collect()[1]:
        try:
            outputs = onnx_nodes.run(case)
        except Refusal as refusal:
            totals.refused[str(refusal)] += 1
            continue
        totals.checked[onnx_nodes.format_of(case)] += 1
        _compare(case, outputs, totals)
    return totals


def _compare(case: NodeCase, outputs: list[Array], found: Results) -> None:
    x = case.inputs[0].numbers
    for output, ours in zip(case.outputs, outputs, strict=True):
        theirs = output.numbers
        differ = (ours != theirs) | (np.signbit(ours) != np.signbit(theirs))
        differ &= ~(np.isnan(ours) & np.isnan(theirs))
        for difference in DIFFERENCES:
            if x.shape == ours.shape and differ.any():
                explained = differ & difference.applies(case, x, theirs, ours)
                found.different[difference.reason] += int(explained.any())
                differ &= ~explained
        found.unexplained += [
            f"{case.name} {index}: {ours[index]!r}, not {theirs[index]!r}"
            for index in map(tuple, np.argwhere(differ).tolist())
        ]


@proof
def test_no_difference_is_unexplained(results: Results) -> None:
    assert not results.unexplained, "\n".join(results.unexplained)


def test_differences_by_design_are_where_they_were(results: Results) -> None:
    assert results.different == {difference.reason: difference.cases for difference in DIFFERENCES}


def test_every_case_is_computed_or_refused(results: Results) -> None:
    total, chosen = onnx_nodes.collect()
    assert (total, len(chosen)) == (ALL, CHOSEN)
    assert sum(case.has_low_bit_type for case in chosen) == LOW_BIT
    assert results.refused == REFUSED
    assert results.checked == CHECKED
    assert results.checked.total() + results.refused.total() == CHOSEN


def test_a_wrong_number_is_unexplained() -> None:
    case = next(c for c in onnx_nodes.collect()[1] if c.name == "test_quantizelinear_e4m3fn")
    (numbers,) = onnx_nodes.run(case)
    totals = Results()
    _compare(case, [np.where(numbers == 448, 240, numbers)], totals)
    assert totals.unexplained == [
        "test_quantizelinear_e4m3fn (3,): np.float64(240.0), not np.float64(448.0)"
    ]
