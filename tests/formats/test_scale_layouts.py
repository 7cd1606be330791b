"""Layouts of block scales in memory, against torchao's, CUTLASS's notation and DeepGEMM's rules."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

from qgate.formats.scale_layouts import (
    BY_COLUMN,
    BY_ROW,
    PACKED_BY_COLUMN,
    SWIZZLES,
    TILES_OF_8X4,
    TILES_OF_128X4,
    ScaleLayout,
)

with contextlib.redirect_stderr(io.StringIO()):
    from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

SHAPES = [(1, 1), (17, 4), (128, 4), (130, 5), (256, 12), (300, 9)]
Nested = tuple["int | Nested", ...]


def scales_of(rows: int, blocks: int, *matrices: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * blocks)
    return torch.randint(1, 255, (*matrices, rows, blocks), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_of_128x4_are_torchaos(shape: tuple[int, int]) -> None:
    scales = scales_of(*shape)
    memory = to_blocked(scales)
    assert torch.equal(TILES_OF_128X4.store(scales), memory)
    assert torch.equal(TILES_OF_128X4.load(memory, *shape), from_blocked(memory, *shape))


def index_of(coordinate: int, shape: Nested, stride: Nested) -> int:
    """Return where a layout in CuTe's notation has a coordinate, first modes first."""
    index = 0
    for size, step in zip(shape, stride, strict=True):
        if isinstance(size, tuple):
            assert isinstance(step, tuple)
            count = 1
            for part in size:
                assert isinstance(part, int)
                count *= part
            index += index_of(coordinate % count, size, step)
        else:
            assert isinstance(step, int)
            count = size
            index += coordinate % size * step
        coordinate //= count
    return index


def test_a_tile_is_the_atom_of_cutlass() -> None:
    """CUTLASS: the scales of 128 rows and 4 blocks have shape (32, 4) x 4, stride (16, 4) x 1."""
    places = TILES_OF_128X4.addresses(128, 4)
    for row in range(128):
        for block in range(4):
            assert places[row, block] == index_of(row, ((32, 4),), ((16, 4),)) + block


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_columns_are_those_of_deepgemm(shape: tuple[int, int]) -> None:
    """Four exponents in an int32, the first in the lowest byte; columns of 16 bytes or a multiple."""
    scales, (rows, blocks) = scales_of(*shape), shape
    words = PACKED_BY_COLUMN.store(scales).view(torch.int32)
    aligned = -(-rows // 4) * 4
    for row in range(0, rows, 7):
        for first in range(0, blocks, 4):
            bytes_of = [int(s) for s in scales[row, first : first + 4]]
            word = sum(byte << 8 * byte_index for byte_index, byte in enumerate(bytes_of))
            assert int(words[first // 4 * aligned + row]) & 0xFFFFFFFF == word
    floats = scales.float()
    strided = torch.zeros(blocks, aligned).T
    strided[:rows] = floats
    assert torch.equal(BY_COLUMN.store(floats), strided.T.reshape(-1))


@pytest.mark.parametrize("layout", [BY_ROW, *SWIZZLES], ids=lambda layout: layout.name)
def test_what_is_stored_is_read_back(layout: ScaleLayout) -> None:
    for shape in SHAPES:
        scales = scales_of(*shape, 2, 3)
        memory = layout.store(scales)
        assert torch.equal(layout.load(memory, *shape), scales)
        padding = memory.shape[-1] - shape[0] * shape[1]
        assert int((memory == 0).sum()) == 6 * padding


def test_few_rows_are_tiles_of_8() -> None:
    places = TILES_OF_8X4.addresses(16, 8)
    assert places[0, :5].tolist() == [0, 1, 2, 3, 32]
    assert places[:9, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 64]
