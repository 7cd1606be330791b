"""Block types of GGUF: the bytes of a block, decoded to elements, scales and minima.

A decoder takes blocks x bytes and returns blocks x elements as integers, and per sub-block a scale
and, for some, an offset: value = element * unit * scale + offset, to the bits of gguf's own
dequantizer. The code books of the I types are those of the gguf package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.grids import FP4_PAIRS, FP4_UNIT, decode_e8m0

SUPER = 256
"""Elements of a block of the K and I types."""


@dataclass(frozen=True)
class Decoded:
    """Blocks x elements, and blocks x sub-blocks of scales and offsets."""

    elements: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    scale_codes: Tensor | None = None


@dataclass(frozen=True)
class BlockType:
    """A type: its number in files, elements and bytes of a block, and its decoder.

    unit   what the elements are multiples of
    """

    name: str
    number: int
    elements: int
    bytes: int
    decode: Callable[[Tensor], Decoded]
    unit: float = 1.0


# Fields of blocks ---------------------------------------------------------------------------------


def half_at(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at a byte of each block, as one column of float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def planes(data: Tensor, shifts: tuple[int, ...], mask: int, group: int) -> Tensor:
    """Return the bits of groups of bytes at each shift: all of the first shift come first."""
    grouped = data.reshape(len(data), -1, group)
    out = torch.empty(len(data), grouped.shape[1], len(shifts), group, dtype=torch.uint8)
    for number, shift in enumerate(shifts):
        plane = out[:, :, number]
        if shift:
            torch.bitwise_right_shift(grouped, shift, out=plane)
        else:
            plane.copy_(grouped)
        if shift + mask.bit_length() < 8:
            plane.bitwise_and_(mask)
    return out.reshape(len(data), -1)


def nibbles(data: Tensor, group: int) -> Tensor:
    """Return the low halves of a group of bytes, then the high halves."""
    return planes(data, (0, 4), 15, group)


def _less(elements: Tensor, offset: int) -> Tensor:
    return elements.view(torch.int8).sub_(offset)


# Blocks of 32 -------------------------------------------------------------------------------------


def _q4_0(blocks: Tensor) -> Decoded:
    return Decoded(_less(nibbles(blocks[:, 2:], 16), 8), half_at(blocks, 0))


def _q4_1(blocks: Tensor) -> Decoded:
    elements = nibbles(blocks[:, 4:], 16)
    return Decoded(elements, half_at(blocks, 0), half_at(blocks, 2))


def _fifth_bits(data: Tensor) -> Tensor:
    """Return the bits of four bytes per block as the 16s of 32 elements."""
    bits = (data[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(len(data), 32) << 4


def _q5_0(blocks: Tensor) -> Decoded:
    codes = nibbles(blocks[:, 6:], 16).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return Decoded(_less(codes, 16), half_at(blocks, 0))


def _q5_1(blocks: Tensor) -> Decoded:
    codes = nibbles(blocks[:, 8:], 16).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return Decoded(codes, half_at(blocks, 0), half_at(blocks, 2))


def _q8_0(blocks: Tensor) -> Decoded:
    return Decoded(blocks[:, 2:].view(torch.int8), half_at(blocks, 0))


def _fp4(data: Tensor, group: int) -> Tensor:
    """Return FP4 values in units of 0.5 of groups whose low halves come first."""
    return FP4_PAIRS[:, 0].index_select(0, nibbles(data, group).reshape(-1).int()).reshape(
        len(data), -1
    )  # fmt: skip


def _mxfp4(blocks: Tensor) -> Decoded:
    codes = blocks[:, :1].contiguous()
    return Decoded(_fp4(blocks[:, 1:], 16), decode_e8m0(codes), scale_codes=codes)


def _nvfp4(blocks: Tensor) -> Decoded:
    codes = (blocks[:, :4] & 127).contiguous()
    scales = codes.view(torch.float8_e4m3fn)
    return Decoded(_fp4(blocks[:, 4:], 8), scales.float(), scale_codes=scales)


# One and two bits ---------------------------------------------------------------------------------


def _q1_0(blocks: Tensor) -> Decoded:
    bits = (blocks[:, 2:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return Decoded(_less(bits.reshape(len(blocks), 128).mul_(2), 1), half_at(blocks, 0))


def _q2_0(blocks: Tensor) -> Decoded:
    pairs = (blocks[:, 2:, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)) & 3
    return Decoded(_less(pairs.reshape(len(blocks), 64), 1), half_at(blocks, 0))


def _tq1_0(blocks: Tensor) -> Decoded:
    """Decode ternary digits: five in a byte, as a fraction of 256, the first digit uppermost."""
    parts = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        data = blocks[:, start:stop].clone()
        for _ in range(digits):
            parts.append(((data.short() * 3) >> 8).to(torch.int8))
            data = data * 3  # modulo 256
    return Decoded(torch.cat(parts, 1).sub_(1), half_at(blocks, 52))


def _tq2_0(blocks: Tensor) -> Decoded:
    return Decoded(_less(planes(blocks[:, :64], (0, 2, 4, 6), 3, 32), 1), half_at(blocks, 64))


# K types ------------------------------------------------------------------------------------------


def _q2_k(blocks: Tensor) -> Decoded:
    stored = blocks[:, :16]
    scales = half_at(blocks, 80) * (stored & 15).float()
    offsets = half_at(blocks, 82) * (stored >> 4).float()
    return Decoded(planes(blocks[:, 16:80], (0, 2, 4, 6), 3, 32), scales, offsets.neg_())


def _q3_k(blocks: Tensor) -> Decoded:
    low = nibbles(blocks[:, 96:104], 8)
    stored = low | planes(blocks[:, 104:108], (0, 2, 4, 6), 3, 4) << 4
    scales = half_at(blocks, 108) * (stored.float() - 32)
    codes = planes(blocks[:, 32:96], (0, 2, 4, 6), 3, 32)
    # A bit of the mask that is not set takes 4 away.
    high = planes(blocks[:, :32], tuple(range(8)), 1, 32) << 2
    return Decoded(_less(codes.bitwise_or_(high), 4), scales)


def _six_bit_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and minima of 12 bytes; two bits of some lie apart."""
    first, second, third = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Decoded:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    return Decoded(
        nibbles(blocks[:, 16:], 32),
        scales.mul_(half_at(blocks, 0)),
        minima.mul_(half_at(blocks, 2)).neg_(),
    )


def _q5_k(blocks: Tensor) -> Decoded:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    high = planes(blocks[:, 16:48], tuple(range(8)), 1, 32) << 4
    return Decoded(
        nibbles(blocks[:, 48:], 32).bitwise_or_(high),
        scales.mul_(half_at(blocks, 0)),
        minima.mul_(half_at(blocks, 2)).neg_(),
    )


def _q6_k(blocks: Tensor) -> Decoded:
    high = planes(blocks[:, 128:192], (0, 2, 4, 6), 3, 32) << 4
    codes = nibbles(blocks[:, :128], 64).bitwise_or_(high)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Decoded(_less(codes, 32), scales.mul_(half_at(blocks, 208)))


def _q8_k(blocks: Tensor) -> Decoded:
    scales = blocks[:, :4].contiguous().view(torch.float32)
    return Decoded(blocks[:, 4:260].view(torch.int8), scales)


BLOCK_TYPES: Mapping[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 2, 32, 18, _q4_0),
        BlockType("Q4_1", 3, 32, 20, _q4_1),
        BlockType("Q5_0", 6, 32, 22, _q5_0),
        BlockType("Q5_1", 7, 32, 24, _q5_1),
        BlockType("Q8_0", 8, 32, 34, _q8_0),
        BlockType("Q2_K", 10, SUPER, 84, _q2_k),
        BlockType("Q3_K", 11, SUPER, 110, _q3_k),
        BlockType("Q4_K", 12, SUPER, 144, _q4_k),
        BlockType("Q5_K", 13, SUPER, 176, _q5_k),
        BlockType("Q6_K", 14, SUPER, 210, _q6_k),
        BlockType("Q8_K", 15, SUPER, 292, _q8_k),
        BlockType("TQ1_0", 34, SUPER, 54, _tq1_0),
        BlockType("TQ2_0", 35, SUPER, 66, _tq2_0),
        BlockType("MXFP4", 39, 32, 17, _mxfp4, FP4_UNIT),
        BlockType("NVFP4", 40, 64, 36, _nvfp4, FP4_UNIT),
        BlockType("Q1_0", 41, 128, 18, _q1_0),
        BlockType("Q2_0", 42, 64, 18, _q2_0),
    )
}
