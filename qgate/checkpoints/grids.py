"""The one form that every packing is decoded to: elements, and the scales that tiles share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements that are worked on at a time, so that they stay in the cache."""
TALL = 512
"""Rows of a tile above which its rows are worked on in parts."""
Slices = tuple[slice, ...]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of AWQ of each of eight neighboring outputs."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as rows of elements: value = (element - zero point) * scale of its tile + offset.

    element      the name of the element format
    elements     rows x columns: integers, or the values of a small float, in units of `unit`
    scales       one per tile in float32, with the scales of the whole tensor multiplied in
    tile         rows and columns of a tile
    zero_points  one per tile, in units of elements
    scale_codes  the scales as they are stored, where they have a format of their own
    order        the columns in the order of their tiles, None where tiles are neighbors
    offsets      one per tile, added to the values
    blocks       the bytes that a weight of GGUF was decoded from, and their type
    is_symmetric   zero points are declared to be the middle of the codes
    signed_scales  negative scales are right: the largest magnitude has the code of the end
    """

    element: str
    elements: Tensor
    scales: Tensor
    tile: tuple[int, int]
    zero_points: Tensor | None = None
    scale_codes: Tensor | None = None
    unit: float = 1.0
    order: Tensor | None = None
    offsets: Tensor | None = None
    blocks: tuple[str, Tensor] | None = None
    signed_scales: bool = False
    is_symmetric: bool = False

    def values(self) -> Tensor:
        """Return the dequantized weight in float32."""
        elements = self.in_tiles(self.float_elements())
        if self.zero_points is not None:
            elements = elements - self.zero_points[:, None, :, None]
        values = elements * self.scales[:, None, :, None]
        if self.offsets is not None:
            values += self.offsets[:, None, :, None]
        return self.from_tiles(values)

    def values_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the dequantized values at pairs of rows and columns."""
        height, width = self.tile
        elements = widen(self.elements[rows, columns]) * self.unit
        tiles = rows // height, columns // width
        if self.zero_points is not None:
            elements = elements - self.zero_points[tiles]
        return elements * self.scales[tiles]

    def float_elements(self) -> Tensor:
        """Return the elements in float32."""
        elements = widen(self.elements)
        return elements if self.unit == 1.0 else elements * self.unit

    def in_tiles(self, x: Tensor) -> Tensor:
        """View rows x columns as tile rows x rows of a tile x tile columns x columns of a tile."""
        x = x if self.order is None else x.index_select(1, self.order)
        rows, columns = x.shape
        height, width = min(self.tile[0], rows), min(self.tile[1], columns)
        pad = (0, -columns % width, 0, -rows % height)
        x = torch.nn.functional.pad(x, pad) if any(pad) else x
        return x.reshape(x.shape[0] // height, height, x.shape[1] // width, width)

    def from_tiles(self, x: Tensor) -> Tensor:
        """View tiles as rows x columns again."""
        whole = x.reshape(x.shape[0] * x.shape[1], -1)
        rows, columns = self.elements.shape
        whole = whole[:rows, :columns] if whole.shape != (rows, columns) else whole
        return whole if self.order is None else whole.index_select(1, self.order.argsort())

    def spread(self, x: Tensor) -> Tensor:
        """Repeat what tiles have for every element."""
        height, width = self.tile
        rows, columns = self.elements.shape
        tiles = x.repeat_interleave(min(height, rows), 0).repeat_interleave(min(width, columns), 1)
        tiles = tiles[:rows, :columns]
        return tiles if self.order is None else tiles.index_select(1, self.order.argsort())

    @property
    def shape(self) -> tuple[int, int]:
        """Return its rows and columns."""
        rows, columns = self.elements.shape
        return rows, columns

    @property
    def has_zero_points(self) -> bool:
        return self.zero_points is not None

    def spans(self) -> Iterator[tuple[int, int]]:
        """Split its rows into spans that are worked on one by one."""
        return row_spans(self.shape, self.tile[0])

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Return rows that are whole tiles, or that lie in one row of tiles."""
        height = self.tile[0]
        blocks = None if self.blocks is None else (self.blocks[0], self.blocks[1][start:stop])
        tiles = slice(start // height, -(-stop // height))
        return self._cut((slice(start, stop),), (tiles,), blocks)

    def in_order(self) -> QuantizedWeight:
        """Return the weight with its columns in the order of their tiles."""
        if self.order is None:
            return self
        # torch gathers no FP8; the elements of GPTQ, which has an order, are bytes.
        return replace(self, elements=self.elements.index_select(1, self.order), order=None)

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """Return columns that are whole tiles."""
        width = self.tile[1]
        tiles = slice(start // width, -(-stop // width))
        return self._cut((slice(None), slice(start, stop)), (slice(None), tiles), None)

    def _cut(
        self, elements: Slices, tiles: Slices, blocks: tuple[str, Tensor] | None
    ) -> QuantizedWeight:
        optional = (self.zero_points, self.scale_codes, self.offsets)
        zeros, codes, offsets = (None if x is None else x[tiles] for x in optional)
        return replace(
            self, elements=self.elements[elements], scales=self.scales[tiles], zero_points=zeros,
            scale_codes=codes, offsets=offsets, blocks=blocks,
        )  # fmt: skip


def row_spans(shape: tuple[int, int], height: int, together: int = 1) -> Iterator[tuple[int, int]]:
    """Split rows into spans of whole tiles, or into spans of one tile where tiles are tall.

    height    rows of a tile
    together  rows that must be decoded together
    """
    rows, columns = shape
    step = max(1, CHUNK // max(1, columns))
    if height <= TALL:
        unit = math.lcm(height, together)
        height = rows
    else:
        unit = together
    step = max(1, step // unit) * unit
    for tile in range(0, rows, max(1, height)):
        end = min(tile + height, rows)
        for start in range(tile, end, step):
            yield start, min(start + step, end)


def leading_rows(shape: tuple[int, int], unit: int, most: int) -> int:
    """Return how many leading rows have so many elements at most, in whole units if one fits."""
    rows, columns = shape
    count = most // max(1, columns)
    return min(rows, max(1, count // unit) * unit if count >= unit else max(1, count))


def widen(elements: Tensor) -> Tensor:
    """Return elements in float32; those of FP8 by float16, which is faster than torch's cast."""
    if elements.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return elements.float()
    bits = torch.empty(elements.shape, dtype=torch.int16)
    return widen_to(torch.empty(elements.shape), elements, bits)


def widen_to(out: Tensor, elements: Tensor, bits: Tensor) -> Tensor:
    """Write elements to float32 as `widen` does; `bits` is memory for as many integers."""
    if elements.dtype == torch.float8_e5m2:
        # The upper halves of float16.
        bits.copy_(elements.view(torch.uint8)).bitwise_left_shift_(8)
        return out.copy_(bits.view(torch.float16))
    if elements.dtype != torch.float8_e4m3fn:
        return out.copy_(elements)
    codes = elements.view(torch.int8)
    bits.copy_(codes).bitwise_left_shift_(7).bitwise_and_(_WITHOUT_COPIED_SIGN)
    out.copy_(bits.view(torch.float16)).mul_(_E4M3_OVER_FLOAT16)
    if codes.numel() and (codes.numpy() & _E4M3_NAN).max() == _E4M3_NAN:
        out.masked_fill_(codes.bitwise_and(_E4M3_NAN) == _E4M3_NAN, torch.nan)
    return out


_WITHOUT_COPIED_SIGN, _E4M3_OVER_FLOAT16, _E4M3_NAN = ~0x4000, 256.0, 0x7F
"""A sign stands twice in a byte that became 16 bits; exponents of float16 are 8 less than meant."""


def as_rows(x: Tensor) -> Tensor:
    """View a tensor as a matrix: a vector is one row, and all axes but the last are rows."""
    return x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)


def fp8_name(elements: Tensor) -> str:
    """Return the element format of FP8 values."""
    return "fp8_e5m2" if elements.dtype == torch.float8_e5m2 else "fp8_e4m3"


def from_nibbles(packed: Tensor) -> Tensor:
    """Return the FP4 values of bytes with two codes each, the low one first, in units of 0.5."""
    return _looked_up(packed, FP4_PAIRS)


def fp4_values(codes: Tensor) -> Tensor:
    """Return the FP4 values of codes, one in each byte, in units of 0.5."""
    return _FP4.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def from_words(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the unsigned codes of int32 words along the last axis, the lowest bits first."""
    if bits == 3:
        return _from_stream(packed, bits, count)
    codes = packed.reshape(-1).contiguous().view(torch.uint8).reshape(*packed.shape[:-1], -1)
    return from_bytes(codes, bits)[..., :count]


def from_bytes(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes of bytes along the last axis, the lowest bits first."""
    if bits == 4:
        wide = packed.to(torch.int16, memory_format=torch.contiguous_format)
        return (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)
    return packed if bits == 8 else _looked_up(packed, _PAIRS_OF_BITS)


def _looked_up(packed: Tensor, table: Tensor) -> Tensor:
    """Return the elements of each byte: rows of a table, gathered as one number each."""
    wide = {2: torch.int16, 4: torch.int32}[table.shape[1]]
    rows = table.view(wide).reshape(-1).index_select(0, packed.reshape(-1).int())
    return rows.view(table.dtype).reshape(*packed.shape[:-1], -1)


def _from_stream(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return codes of 3 bits, which go on in the next word."""
    position = torch.arange(count) * bits
    word, shift = position // 32, position % 32
    wide = packed.long() & 0xFFFFFFFF
    wide = wide | torch.nn.functional.pad(wide[..., 1:], (0, 1)) << 32
    return ((wide[..., word] >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Return powers of two; the code 255 is NaN."""
    return _POWERS.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


_POWER_BITS = [1 << 22, *(code << 23 for code in range(1, 255)), 0x7FC00000]
_POWERS = torch.tensor(_POWER_BITS, dtype=torch.int32).view(torch.float32)
FP4_UNIT = 0.5
_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
FP4_PAIRS = torch.stack([_FP4.repeat(16), _FP4.repeat_interleave(16)], 1)
"""The two values of every byte of FP4 codes, in units of 0.5."""
_BYTES = torch.arange(256, dtype=torch.uint8)
_PAIRS_OF_BITS = torch.stack([_BYTES >> shift & 3 for shift in range(0, 8, 2)], 1)
"""The codes of 2 bits of every byte, the lowest first."""
