"""Figures of streamed weights beside the obvious definition in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.checkpoints import compute, grids
from qgate.checkpoints.compute import measure
from qgate.checkpoints.grids import FP4_UNIT, QuantizedWeight
from qgate.checkpoints.methods.steps import nearest_elements
from qgate.formats import get
from tests.shares import share

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A weight to be measured: element, tile, shape, scales of a format of their own, zeros."""

    name: str
    element: str
    tile: tuple[int, int]
    shape: tuple[int, int]
    scale_codes: torch.dtype | None = None
    zero_points: bool = False


CASES = (
    Case("int8 per row", "int8", (1, 96), (40, 96)),
    Case("int8 per tensor", "int8", (700, 32), (700, 32)),
    Case("int4 in groups", "int4", (1, 32), (33, 96)),
    Case("uint4 with zero points", "uint4", (1, 32), (33, 96), None, True),
    Case("uint4 with zero points, cut off", "uint4", (1, 32), (33, 80), None, True),
    Case("uint8 with zero points per tensor", "uint8", (600, 24), (600, 24), None, True),
    Case("FP8 per row", "fp8_e4m3", (1, 96), (40, 96)),
    Case("E5M2 per tensor", "fp8_e5m2", (40, 96), (40, 96)),
    Case("FP8 in tiles", "fp8_e4m3", (16, 32), (48, 96)),
    Case("FP8 in tiles that do not fit", "fp8_e4m3", (16, 32), (41, 83)),
    Case("FP8 in tall tiles", "fp8_e4m3", (600, 12), (1500, 24)),
    Case("MXFP4", "fp4_e2m1", (1, 32), (33, 96), torch.uint8),
    Case("NVFP4", "fp4_e2m1", (1, 16), (33, 96), torch.float8_e4m3fn),
)


def _spread(x: Tensor, case: Case) -> Array:
    """Repeat what tiles share over their elements."""
    wide = x.double().numpy().repeat(case.tile[0], 0).repeat(case.tile[1], 1)
    return np.asarray(wide[: case.shape[0], : case.shape[1]])


def _values_of(element: str) -> Array:
    if element.startswith("u"):
        return np.arange(2.0 ** int(element[4:]))
    if element.startswith("int"):
        half = 2.0 ** (int(element[3:]) - 1)
        return np.arange(-half, half)
    return np.asarray(get(element).values(), dtype=np.float64)


def _nearest(values: Array, x: Array) -> Array:
    """Round to the nearest value; of two, either is as near."""
    return np.asarray(values[np.abs(x[..., None] - values).argmin(-1)])


def _tiles(x: Array, case: Case) -> list[list[Array]]:
    height, width = case.tile
    return [
        [x[i : i + height, j : j + width] for j in range(0, x.shape[1], width)]
        for i in range(0, x.shape[0], height)
    ]


def _weight(case: Case, seed: int = 0) -> tuple[QuantizedWeight, Tensor]:
    """Quantize a parent, and disturb some codes and scales."""
    generator = torch.Generator().manual_seed(seed)
    parent = (torch.randn(*case.shape, generator=generator) * 0.05).bfloat16()
    parent[3] = 0
    values, x = _values_of(case.element), parent.double().numpy()
    largest = values.max()
    tiles = _tiles(x, case)
    zeros = None
    if case.zero_points:
        low = np.array([[min(t.min(), 0) for t in row] for row in tiles])
        high = np.array([[max(t.max(), 0) for t in row] for row in tiles])
        scales = np.maximum((high - low) / largest, 1e-9)
        zeros = torch.from_numpy((-low / scales).round()).float()
    else:
        scales = np.array([[abs(t).max() / largest or 1.0 for t in row] for row in tiles])
    codes = None
    own = torch.from_numpy(scales).float()
    if case.scale_codes == torch.uint8:
        codes = (own.log2().floor() + 127).to(torch.uint8)
        codes[-1, 0] += 1
        own = torch.exp2(codes.float() - 127)
    elif case.scale_codes is not None:
        own[-1, 0] *= 1.5
        codes = (own / 1e-4).clamp(0.01, 400).to(case.scale_codes)
        own = codes.float() * 1e-4
    else:
        own[-1, 0] *= 1.5
    shift = 0.0 if zeros is None else _spread(zeros, case)
    elements = torch.from_numpy(_nearest(values, x / _spread(own, case) + shift))
    elements[::5, ::7] = 0
    if case.element == "fp4_e2m1":
        stored, unit = (elements / FP4_UNIT).to(torch.int8), FP4_UNIT
    else:
        dtype = {"i": torch.int8, "u": torch.uint8}.get(case.element[0]) or getattr(
            torch, f"float8_{case.element[4:]}{'fn' if '4m3' in case.element else ''}"
        )
        stored, unit = elements.to(dtype), 1.0
    weight = QuantizedWeight(case.element, stored, own, case.tile, zeros, codes, unit)
    return weight, parent


def _ideal(case: Case, weight: QuantizedWeight, parent: Array) -> tuple[Array, Array]:
    """Quantize the parent as an ideal quantizer of the format does; return values and scales."""
    values = _values_of(case.element)
    low, high = values.min(), values.max()
    result, scales = np.zeros_like(parent), np.zeros(weight.scales.shape)
    for i, row in enumerate(_tiles(parent, case)):
        for j, tile in enumerate(row):
            amax, shift = abs(tile).max(), 0.0
            if case.zero_points:
                ends = min(tile.min(), 0), max(tile.max(), 0)
                scale = max((ends[1] - ends[0]) / (high - low), 1.2e-38)
                shift = np.clip(np.round(low - ends[0] / scale), low, high)
            elif case.scale_codes == torch.uint8:
                scale = 2.0 ** (math.floor(math.log2(amax)) - 2) if amax else 1.0
            elif case.scale_codes is not None:
                e4m3 = _values_of("fp8_e4m3")
                scale = float(_nearest(e4m3, np.array(amax / high / 1e-4))) * 1e-4 or 1.0
            else:
                scale = amax / high or 1.0
            window = slice(i * case.tile[0], None), slice(j * case.tile[1], None)
            rounded = (_nearest(values, tile / scale + shift) - shift) * scale
            result[window][: tile.shape[0], : tile.shape[1]] = rounded
            scales[i, j] = scale
    return result, scales


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


def test_figures_are_those_of_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grids, compute):
        monkeypatch.setattr(module, "CHUNK", 1 << 11)
    weight, source = _weight(case)
    figures = measure(weight, source)
    elements = weight.elements.float().double().numpy() * weight.unit
    shift = 0.0 if weight.zero_points is None else _spread(weight.zero_points, case)
    values = (elements - shift) * _spread(weight.scales, case)
    parent = source.double().numpy()
    ideal, scales = _ideal(case, weight, parent)
    own, least = ((x - parent) ** 2 for x in (values, ideal))
    energy = (parent**2).sum()
    assert figures.error == pytest.approx(own.sum() / energy, rel=1e-5)
    assert figures.over_ideal_db == pytest.approx(
        10 * math.log10(own.sum() / least.sum()), abs=1e-4
    )
    cosine = (values * parent).sum() / math.sqrt((values**2).sum() * energy)
    assert figures.cosine == pytest.approx(cosine, rel=1e-5)
    usual = 0.5 * least.sum() / energy * (parent**2).sum(1)
    floor = np.maximum(usual, 1e-12 * energy / len(parent))
    ratios = own.sum(1) / np.maximum(least.sum(1), floor)
    assert figures.worst_row is not None
    assert figures.worst_row[0] == ratios.argmax()
    assert figures.worst_row[1] == pytest.approx(10 * math.log10(ratios.max()), abs=1e-3)
    low, high = _values_of(case.element).min(), _values_of(case.element).max()
    ends = (elements <= low) | (elements >= high) if low == 0 else abs(elements) >= high
    assert figures.count == values.size
    assert figures.not_finite == 0
    assert figures.at_ends_share == pytest.approx(ends.mean())
    assert figures.zero_share == pytest.approx((values == 0).mean())
    assert figures.flushed_share == pytest.approx(((values == 0) & (ideal != 0)).mean())
    few = len(_values_of(case.element)) <= 16
    unused = np.setdiff1d(_values_of(case.element), elements) if few else ()
    assert figures.unused_codes == len(unused)
    ratio = np.log2(weight.scales.double().numpy() / scales)
    assert figures.scales.log2_ratio == pytest.approx(
        float(torch.from_numpy(ratio).flatten().median()), abs=1e-5
    )
    assert figures.scales.count == weight.scales.numel()
    assert figures.scales.smallest == float(weight.scales.min())
    assert figures.scales.largest == float(weight.scales.max())


@share(4)
def test_figures_do_not_depend_on_chunks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, source = _weight(case, seed=1)
    whole = measure(weight, source)
    for module in (grids, compute):
        monkeypatch.setattr(module, "CHUNK", 1)
    parts = measure(weight, source)
    assert parts.error == pytest.approx(whole.error, rel=1e-5)
    assert parts.over_ideal_db == pytest.approx(whole.over_ideal_db, abs=1e-4)
    for name in ("count", "zero_share", "unused_codes", "at_ends_share", "flushed_share"):
        assert getattr(parts, name) == getattr(whole, name), name
    assert parts.scales == whole.scales
    for own, other in zip(
        nearest_elements(weight, source), nearest_elements(weight, source.float()), strict=True
    ):
        assert torch.equal(own, other)


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    weight, source = _weight(CASES[0])
    weight.scales[2], weight.scales[4] = math.nan, math.inf
    figures = measure(weight, source)
    zeros = int((weight.elements[4] == 0).sum())
    assert figures.not_finite == 2 * 96
    assert figures.scales.not_finite == 2
    assert math.isfinite(figures.error or math.nan)
    assert zeros > 0
    alone = measure(weight)
    assert alone.not_finite == figures.not_finite
    assert alone.error is None
    assert alone.scales.smallest == figures.scales.smallest


def test_scales_of_a_tall_tile_count_once() -> None:
    weight, source = _weight(next(case for case in CASES if "tall" in case.name))
    assert measure(weight, source).scales.count == 6
    assert measure(weight).scales.count == 6
