"""Sums over cells against sums over numbers one by one, and against the definition."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import qgate
from qgate.formats import FORMATS, definition
from qgate.stats import massive_beyond
from qgate.sweeps import _cells
from qgate.sweeps._cells import CellEdges, cell_edges
from tests.sweeps.test_sweep import ELEMENTS, MX, assert_level

TIES = [0.0, -0.0, 1.0, 464.0, 17.0, -(2.0**-10), 124.5, 0.75]


def wide(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers that are no bf16 numbers, with ties and equal ones."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 256, generator=draw) * torch.exp2(torch.randn(60, 1, generator=draw) * 2)
    x[x.abs() < 2**-12] = 2**-12
    x[0, : len(TIES)] = torch.tensor(TIES)
    x[1] = x[2] = 1 + 2**-20  # one cell of equal numbers
    return x.to(dtype)


@pytest.fixture
def counted_groups(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Use cells for small tensors too, and list what sums of groups become."""
    monkeypatch.setattr(_cells, "_FEW", 0)
    kinds: list[type] = []
    real = _cells._sums_of

    def summed(*args: object) -> object:
        kinds.append(type(part := real(*args)))  # type: ignore[arg-type]
        return part

    monkeypatch.setattr(_cells, "_sums_of", summed)
    return kinds


@pytest.mark.parametrize("name", ELEMENTS)
def test_cells_of_a_tensor_are_what_direct_evaluation_gives(
    name: str, counted_groups: list[type]
) -> None:
    x = wide().T  # not contiguous
    values, fmt = x.double().numpy(), FORMATS.get(name)
    swept = qgate.sweep(x, name, levels=6)
    assert set(counted_groups) == {_cells._CellSums}
    for level in swept.levels[:: max(len(swept.levels) // 5, 1)]:
        scale = level["factor"]
        q = definition.round_by_list(values / scale, fmt) * scale
        assert_level(level, q, values, values / scale, fmt)


@pytest.mark.parametrize("name", MX)
def test_cells_of_blocks_are_what_direct_evaluation_gives(
    name: str, counted_groups: list[type]
) -> None:
    x, fmt = wide(), FORMATS.get(name)
    swept = qgate.sweep(x, name, granularity="block")
    assert set(counted_groups) == {_cells._CellSums}
    codes = qgate.encode(x, name).scales.double().numpy().repeat(32, axis=1) - 127
    values = x.double().numpy()
    for level in swept.levels[::3]:
        scale = np.exp2(codes + level["exponent"])
        q = definition.round_by_list(values / scale, fmt.element) * scale
        assert_level(level, q, values, values / scale, fmt.element)


def _near(one: object, other: object, path: str) -> None:
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            _near(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other)
        for at, pair in enumerate(zip(one, other, strict=True)):
            _near(*pair, f"{path}[{at}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-12, nan_ok=True), path
    else:
        assert one == other, path


def _with_nan(x: Tensor) -> Tensor:
    x[5, 5], x[6, 6], x[7, 7] = math.nan, math.inf, -math.inf
    return x


def _far(x: Tensor) -> Tensor:
    return x * 1e-4 + 3


def _ends_of_the_range(x: Tensor) -> Tensor:
    x[0, :4] = torch.tensor([2.0**-149, -(2.0**-140), 3e38, 0.0])
    return x


def _massive(x: Tensor) -> Tensor:
    x[3, 3], x[4, 4] = 1e6, -2e6
    return x


CASES: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, object]]] = {
    "as it is": (lambda x: x, {}),
    "NaN and Inf": (_with_nan, {}),
    "far from zero": (_far, {}),
    "massive": (_massive, {}),
    "ends of the range": (_ends_of_the_range, {"max_exp": 3, "min_exp": -3}),
    "one sign": (lambda x: -x.abs(), {}),
    "float64": (lambda x: x.double(), {}),
    "far float64": (lambda x: x.double() * 1e-200, {}),
    "narrow scales": (lambda x: x, {"scale_bits": 4}),
    "last block short": (lambda x: x[:, :250], {"block": 48}),
    "other axis": (lambda x: x, {"axis": 0}),
}


@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("case", CASES)
def test_records_are_those_of_numbers_one_by_one(
    case: str, granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, options = CASES[case]
    x, name = change(wide()), "fp8_e4m3" if granularity == "tensor" else "mxfp4_e2m1"
    records = []
    for few in (0, math.inf):
        monkeypatch.setattr(_cells, "_FEW", few)
        records.append(qgate.sweep(x, name, 5, granularity=granularity, **options).to_dict())  # type: ignore[arg-type]
        # Of figures that are equal but for their last bit either is the best.
        del records[-1]["advice"]["best"]
    _near(*records, "")
    assert (massive_beyond(x.double()) < math.inf) == (records[0]["advice"]["massive"] is not None)


def test_the_number_of_threads_changes_no_bit() -> None:
    x, threads = wide().repeat(20, 1), torch.get_num_threads()
    records = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            records.append(qgate.sweep(x, "fp8_e5m2", 3).to_dict())
    finally:
        torch.set_num_threads(threads)
    assert records[0] == records[1]


@pytest.mark.parametrize("name", [*ELEMENTS, "int4", "int2", "fp8_e4m3fnuz"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-3.3, 1e30])
def test_numbers_beside_an_edge_round_as_their_cell_does(name: str, scale: float) -> None:
    fmt = FORMATS.get(name)
    edges = cell_edges(fmt, np.array([scale]))
    assert edges is not None
    within = np.stack([edges[:-1], np.nextafter(edges[1:], 0)])
    rounded = fmt.nearest(torch.from_numpy(within / scale)).numpy()
    assert (rounded[0] == rounded[1]).all()
    # Either end of a cell lies on the same side of what it rounds to.
    assert (np.sign(within - rounded * scale).prod(axis=0) >= 0).all()
    values = definition.round_by_list(within / scale, fmt)
    assert (values == rounded).all()


def test_formats_of_many_codes_and_scales_beyond_float64_have_no_edges() -> None:
    assert cell_edges(FORMATS.get("fp16"), np.ones(6)) is None
    assert cell_edges(FORMATS.get("fp8_e4m3"), np.array([1e306])) is None
    edges = CellEdges(FORMATS.get("fp4_e2m1"), lambda _: np.array([1.0]), beyond=5.0)
    first = edges.of(0)
    assert first is not None
    assert math.nextafter(5.0, math.inf) in first
    assert math.nextafter(5.0, math.inf) * 2**3 in edges.of(-3)  # type: ignore[operator]
