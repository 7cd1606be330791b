"""What is counted and rounded in few passes is what the obvious code makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.checkpoints import compute, local_sums
from qgate.checkpoints.chunk_memory import thread_memory
from qgate.checkpoints.compute import measure
from qgate.checkpoints.grids import FP4_UNIT, QuantizedWeight, decode_e8m0, from_bytes, widen
from qgate.checkpoints.ideal import element_range, round_to
from qgate.formats import get
from qgate.formats.definition import round_by_list

CODES = torch.arange(256, dtype=torch.uint8)
FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    numbers = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a[numbers].view(torch.int32), b[numbers].view(torch.int32)
    )


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("flushes", [False, True])
def test_every_code_of_fp8_is_widened_to_its_value(dtype: torch.dtype, flushes: bool) -> None:
    stored = CODES.view(dtype).reshape(16, 16)
    torch.set_flush_denormal(flushes)
    try:
        widened, turned = widen(stored), widen(stored.T)
    finally:
        torch.set_flush_denormal(False)
    assert _same_bits(widened, stored.float())
    assert _same_bits(turned, stored.float().T.contiguous())


def test_every_exponent_is_its_power_of_two() -> None:
    powers = decode_e8m0(CODES)
    assert powers[:255].double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert powers[255].isnan()


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_of_bytes_are_their_bits_the_lowest_first(bits: int) -> None:
    for packed in (CODES[:255].reshape(5, 51), CODES.reshape(16, 16).T):
        codes = from_bytes(packed, bits)
        shifts = range(0, 8, bits)
        by_shifts = torch.stack([packed >> shift & 2**bits - 1 for shift in shifts], 2).flatten(1)
        assert torch.equal(codes, by_shifts)


@pytest.mark.parametrize(
    "element", ["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz"]
)
def test_floats_are_rounded_as_the_definition_says(element: str) -> None:
    draw = torch.Generator().manual_seed(0)
    largest = element_range(element)[1]
    spread = torch.randn(2**12, generator=draw) * torch.logspace(-6, 1, 2**12)
    grid = torch.arange(-64, 65) / 64  # with ties
    x = torch.cat([spread, grid, 4 * grid]) * largest / 4
    definition = round_by_list(x.double().numpy(), get(element).element)
    assert round_to(element, x).double().tolist() == definition.clip(-largest, largest).tolist()


@pytest.mark.parametrize(
    ("element", "dtype", "unit"),
    [("int8", torch.int8, 1), ("uint8", torch.uint8, 1), ("int4", torch.int8, 1),
     ("uint4", torch.uint8, 1), ("int2", torch.int8, 1), ("fp4_e2m1", torch.int8, FP4_UNIT),
     ("fp8_e4m3", torch.float8_e4m3fn, 1), ("fp8_e5m2", torch.float8_e5m2, 1)],
)  # fmt: skip
def test_codes_at_the_ends_are_counted_as_values_are(
    element: str, dtype: torch.dtype, unit: float
) -> None:
    low, high = element_range(element)
    elements = CODES.view(dtype)[None]
    values = elements.float() * unit
    work = thread_memory().workspace((1, 256), (1, 256))
    weight = QuantizedWeight(element, elements, torch.ones(1, 1), (1, 256), unit=unit)
    ends = (values >= high) | (values <= max(low, -high))
    assert 0 < compute._count_ends(weight, work) == int(ends.sum())


@pytest.mark.parametrize("tile", [(1, 16), (1, 96), (8, 32)])
def test_chunks_are_judged_alike_alone_and_together(
    tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and scales of several chunks are looked at at once; a doubled one is in the last."""
    draw = torch.Generator().manual_seed(1)
    parent = torch.randn(4096, 96, generator=draw)
    height, width = tile
    tiles = parent.reshape(4096 // height, height, 96 // width, width)
    scales = tiles.abs().amax((1, 3)) / 7
    codes = (tiles / scales[:, None, :, None]).round().reshape(parent.shape).to(torch.int8)
    scales[-1, -1] *= 2
    weight = QuantizedWeight("int4", codes, scales, tile)
    together = measure(weight, parent)
    monkeypatch.setattr(local_sums, "TILES", 1)
    monkeypatch.setattr(compute, "SCALES", 1)
    assert measure(weight, parent) == together
    assert together.scales.count == scales.numel()
    octaves = np.frexp(scales.numpy())[1]
    assert together.scales.octaves is not None
    assert together.scales.octaves[0] == octaves.min() - 1
    assert sum(together.scales.octaves[1]) == scales.numel()
    if width < 96:
        assert together.worst_group is not None
        assert together.worst_group[:2] == (4096 - height, 96 - width)
