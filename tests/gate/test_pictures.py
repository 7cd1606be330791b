"""Pictures of errors and magnitudes against slow and obvious definitions, element by element."""

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
from qgate.errors import QgateError
from qgate.gate.measuring import pictures as error_pictures
from qgate.gate.measuring.pictures import (
    BINS,
    LOW,
    SIZE,
    WORST,
    ends,
    error_picture,
    magnitude_picture,
    stride,
)
from qgate.stats import errors

WIDE = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, math.nan, math.inf, -math.inf])
PAIRS = arrays.arrays(np.float32, (2, 7, 5), elements=WIDE)


def slow(actual: Any, reference: Any) -> dict[str, Any]:
    """The definition, one pair of numbers after the other."""
    pairs = [
        (float(a), float(r))
        for a, r in zip(np.ravel(actual), np.ravel(reference), strict=True)
        if math.isfinite(a) and math.isfinite(r)
    ]
    errs = [a - r for a, r in pairs]
    rms = math.sqrt(math.fsum(r * r for _, r in pairs) / len(pairs)) if pairs else 0.0
    error_rms = math.sqrt(math.fsum(e * e for e in errs) / len(errs)) if errs else 0.0
    edge = min(max(map(abs, errs), default=0.0), 4 * error_rms)
    return {"pairs": pairs, "errors": errs, "rms": rms, "edge": edge}


def cell(x: float, edge: float, size: int) -> int:
    return min(max(math.floor((x / edge + 1) * size / 2), 0), size - 1)


def octave(r: float, rms: float) -> int:
    return 0 if r == 0 else max(math.frexp(abs(r) / rms)[1] - 1 - LOW, 0)


def agree(found: Any, actual: Any, reference: Any) -> None:
    """Every number of a picture against the definition."""
    true = slow(actual, reference)
    pairs, errs, rms = true["pairs"], true["errors"], found["rms"]
    assert found["rms"] == pytest.approx(true["rms"], rel=1e-12)
    bins, edge = found["bins"], found["bins"]["edge"]
    assert edge == pytest.approx(true["edge"], rel=1e-12)
    assert bins["below"] == sum(e < -edge for e in errs)
    assert bins["above"] == sum(e > edge for e in errs)
    if edge:
        counts = [0] * BINS
        for e in errs:
            if abs(e) <= edge:
                counts[cell(e, edge, BINS)] += 1
        assert bins["counts"] == counts
    else:
        assert bins["counts"] == [len(errs)]
    assert sum(found["octaves"]["elements"]) == len(pairs)
    if not rms:
        assert found["density"] == {"size": SIZE, "edge": 0.0, "cells": []}
        assert found["octaves"]["error"] == [float(any(errs))]
        return
    far = max((abs(x) for pair in pairs for x in pair), default=0.0)
    assert found["density"]["edge"] == pytest.approx(min(math.asinh(far / rms), 12.0), rel=1e-12)
    square: dict[tuple[int, int], int] = {}
    reach = found["density"]["edge"]
    for a, r in pairs:
        # numpy's inverse sine, as its last bit may differ from that of the math library.
        x, y = (float(np.arcsinh(np.array([v / rms, 0.0]))[0]) for v in (r, a))
        cell_index = cell(x, reach, SIZE), cell(y, reach, SIZE)
        square[cell_index] = square.get(cell_index, 0) + 1
    cells = found["density"]["cells"]
    assert dict(zip(zip(cells[::3], cells[1::3], strict=True), cells[2::3], strict=True)) == square
    octaves = found["octaves"]
    places = [octave(r, rms) for _, r in pairs]
    assert octaves["low"] == LOW
    assert octaves["elements"] == [places.count(k) for k in range(max(places) + 1)]
    for name, values in (("error", errs), ("energy", [r for _, r in pairs])):
        total = math.fsum(v * v for v in values)
        for k, share in enumerate(octaves[name]):
            cell_energy = math.fsum(v * v for v, at in zip(values, places, strict=True) if at == k)
            assert share == pytest.approx(
                cell_energy / total if total else 0.0, rel=1e-3, abs=1e-12
            )


@settings(max_examples=150)
@given(PAIRS)
def test_it_is_what_the_definition_says(pair: Any) -> None:
    actual, reference = pair
    picture = error_picture([(torch.from_numpy(actual), torch.from_numpy(reference))])
    assert picture["elements"] == picture["sampled"] == actual.size
    agree(picture, actual, reference)
    json.dumps(picture, allow_nan=False)


@settings(max_examples=60)
@given(PAIRS, st.integers(1, 6))
def test_pairs_are_one_tensor(pair: Any, at: int) -> None:
    actual, reference = map(torch.from_numpy, pair)
    parts = [(actual[:at], reference[:at]), (actual[at:], reference[at:])]
    assert error_picture(parts) == error_picture([(actual, reference)])


def test_a_large_tensor_is_sampled_at_a_stride_that_reaches_all_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(error_pictures, "MOST", 1000)
    torch.manual_seed(0)
    reference = torch.randn(512, 12)
    actual = reference + 0.1 * torch.randn(512, 12)
    step = stride(reference.numel(), 12)
    assert step == 7
    assert {element % 12 for element in range(0, 512 * 12, step)} == set(range(12))
    picture = error_picture([(actual, reference)])
    assert (picture["elements"], picture["sampled"]) == (6144, 878)
    agree(picture, actual.reshape(-1)[::step], reference.reshape(-1)[::step])
    assert picture == error_picture([(actual.clone(), reference.clone())]), "the same every time"


def test_no_error_is_one_bin() -> None:
    x = torch.randn(4, 8)
    picture = error_picture([(x, x.clone())], errors(x, x, channel_axis=-1))
    assert picture["bins"] == {"edge": 0.0, "counts": [32], "below": 0, "above": 0}
    assert sum(picture["octaves"]["error"]) == 0
    assert picture["channels"] == []
    assert picture["channel_count"] == 8


def test_a_reference_of_zeros_has_no_density() -> None:
    actual, reference = torch.tensor([[1.0, -2.0]]), torch.zeros(1, 2)
    picture = error_picture([(actual, reference)], errors(actual, reference, channel_axis=-1))
    assert picture["rms"] == 0
    assert picture["density"]["cells"] == []
    assert picture["octaves"] == {"low": 0, "error": [1.0], "energy": [0.0], "elements": [2]}
    assert picture["channels"] == [
        {"index": 1, "share": 0.8, "relative_mse": None},
        {"index": 0, "share": 0.2, "relative_mse": None},
    ]


def test_a_single_element_and_none() -> None:
    picture = error_picture([(torch.tensor(1.5), torch.tensor(1.0))])
    assert (picture["elements"], picture["rms"], picture["bins"]["edge"]) == (1, 1.0, 0.5)
    assert picture["bins"]["counts"][-1] == 1
    assert picture["octaves"]["elements"][-1] == 1
    empty = error_picture([(torch.zeros(0, 4), torch.zeros(0, 4))])
    assert (empty["elements"], empty["sampled"], empty["bins"]["counts"]) == (0, 0, [0])
    assert error_picture([])["elements"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_and_layout_is_read_as_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    actual, reference = torch.randn(6, 4).to(dtype).T, torch.randn(6, 4).T
    picture = error_picture([(actual, reference)])
    agree(picture, actual.double().numpy(), reference.double().numpy())


def test_what_is_not_finite_is_in_no_count() -> None:
    actual = torch.tensor([[1.0, math.nan, 3.0, math.inf]])
    reference = torch.tensor([[1.0, 2.0, -math.inf, math.inf]])
    picture = error_picture([(actual, reference)], errors(actual, reference, channel_axis=-1))
    assert (picture["sampled"], picture["bins"]["counts"]) == (4, [1])
    everything = error_picture([(torch.full((3,), math.nan), torch.ones(3))])
    assert (everything["sampled"], everything["rms"]) == (3, 0.0)
    json.dumps([picture, everything], allow_nan=False)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1.7e308])
def test_the_ends_of_float64_neither_overflow_nor_vanish(size: float) -> None:
    reference = torch.tensor([[1.0, 0.5, -0.25]], dtype=torch.float64) * size
    picture = error_picture([(-reference, reference)])
    json.dumps(picture, allow_nan=False)
    assert picture["rms"] > 0
    assert picture["bins"]["edge"] > 0


def test_the_worst_channels_are_those_of_the_sums() -> None:
    torch.manual_seed(2)
    reference = torch.randn(64, 20)
    noise = torch.randn(64, 20) * torch.arange(20)
    picture = error_picture(
        [(reference + noise, reference)], errors(reference + noise, reference, channel_axis=-1)
    )
    squares = ((reference + noise).double() - reference.double()).square().sum(0)
    worst = torch.argsort(squares, descending=True)[:WORST].tolist()
    assert [channel["index"] for channel in picture["channels"]] == worst
    for worst_channel in picture["channels"]:
        at = worst_channel["index"]
        assert worst_channel["share"] == pytest.approx(float(squares[at] / squares.sum()), rel=1e-3)
        energy = float(reference[:, at].double().square().sum())
        assert worst_channel["relative_mse"] == pytest.approx(float(squares[at]) / energy, rel=1e-3)


def test_a_picture_is_small() -> None:
    torch.manual_seed(3)
    reference = torch.randn(512, 128)
    actual = reference + 0.03 * torch.randn(512, 128)
    picture = error_picture([(actual, reference)], errors(actual, reference, channel_axis=-1))
    assert len(json.dumps(picture, separators=(",", ":"))) < 4096


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(QgateError, match="shape"):
        error_picture([(torch.zeros(3), torch.zeros(4))])


# Magnitudes against counting one by one ------------------------------------------------------------

ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=150)
@given(arrays.arrays(np.float32, 12, elements=ANY), st.lists(st.integers(0, 9), min_size=12))
def test_every_value_is_in_its_octave(values: Any, weights: list[int]) -> None:
    picture = magnitude_picture(values, weights[:12], nonfinite=2)
    sizes = [(abs(float(v)), w) for v, w in zip(values, weights, strict=False) if math.isfinite(v)]
    for k, count in enumerate(picture["counts"]):
        low = math.ldexp(1.0, picture["low"] + k)
        assert count == sum(w for size, w in sizes if low <= size < 2 * low)
    assert picture["zeros"] == sum(w for size, w in sizes if size == 0)
    assert sum(picture["counts"]) + picture["zeros"] + picture["nonfinite"] - 2 == sum(weights[:12])
    json.dumps(picture, allow_nan=False)


def test_a_tensor_counts_each_element_once() -> None:
    x = torch.tensor([[0.5, 0.75, -1.0], [0.0, 6.0, math.nan]], dtype=torch.bfloat16)
    picture = magnitude_picture(x, fmt="fp8_e4m3", saturated=1, flushed=2)
    assert (picture["low"], picture["counts"]) == (-1, [2, 1, 0, 1])
    assert (picture["zeros"], picture["nonfinite"]) == (1, 1)
    assert (picture["saturated"], picture["flushed"]) == (1, 2)
    assert picture["largest"] == math.log2(448)
    assert picture["smallest"] == -9


def test_nothing_but_zeros_has_no_octave() -> None:
    picture = magnitude_picture(torch.zeros(3))
    assert (picture["low"], picture["counts"], picture["zeros"]) == (0, [], 3)
    assert (picture["format"], picture["largest"], picture["smallest"]) == ("", None, None)


@pytest.mark.parametrize("name", formats.names())
def test_only_a_format_without_scales_has_ends(name: str) -> None:
    largest, smallest = ends(name)
    fmt = formats.get(name)
    scaled = not isinstance(fmt, formats.ElementFormat) or isinstance(fmt, formats.IntFormat)
    assert (largest is None, smallest is None) == (scaled, scaled)
    if largest is not None and smallest is not None:
        assert smallest < largest
