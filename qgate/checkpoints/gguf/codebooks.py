"""Block types of GGUF whose elements come from code books, which the gguf package has.

Codes name eight or four elements at a time; signs are stored apart. See `gguf_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qgate.checkpoints.gguf.blocks import SUPER, BlockType, Decoded, half_at, nibbles
from qgate.formats.vector_books import DELTA, code_book, sign_rows


def _rows(table: Tensor, codes: Tensor) -> Tensor:
    """Look up rows of a table; of each block one after the other."""
    return table.index_select(0, codes.reshape(-1).int()).reshape(len(codes), -1)


def _words(data: Tensor) -> Tensor:
    """Return pairs of bytes as numbers, the low one first."""
    pairs = data.reshape(len(data), -1, 2).int()
    return pairs[:, :, 0] | pairs[:, :, 1] << 8


def _long_words(data: Tensor) -> Tensor:
    """Return groups of four bytes as numbers, the lowest first."""
    fours = data.reshape(len(data), -1, 4).long()
    return fours[..., 0] | fours[..., 1] << 8 | fours[..., 2] << 16 | fours[..., 3] << 24


def _signs_of_words(words: Tensor) -> Tensor:
    """Return the signs of 32 elements for each word: four codes of 7 bits."""
    codes = (words[:, :, None] >> torch.tensor([0, 7, 14, 21])) & 127
    return _rows(sign_rows("IQ2_XXS"), codes.flatten(1))


def _halves(data: Tensor) -> Tensor:
    """Return both halves of each byte, the low one first, in float32."""
    return torch.stack([data & 15, data >> 4], 2).reshape(len(data), -1).float()


def _iq2_xxs(blocks: Tensor) -> Decoded:
    words = _long_words(blocks[:, 2:].contiguous())[:, 1::2]
    scales = half_at(blocks, 0) * ((words >> 28).float() + 0.5) * 0.25
    codes = blocks[:, 2:].reshape(len(blocks), 8, 8)[:, :, :4].flatten(1)
    elements = _rows(code_book("IQ2_XXS"), codes)
    return Decoded(elements.mul_(_signs_of_words(words)), scales)


def _iq2_xs(blocks: Tensor) -> Decoded:
    words = _words(blocks[:, 2:66])
    scales = half_at(blocks, 0) * (_halves(blocks[:, 66:]) + 0.5) * 0.25
    elements = _rows(code_book("IQ2_XS"), words & 511)
    return Decoded(elements.mul_(_rows(sign_rows("IQ2_XXS"), words >> 9)), scales)


def _iq2_s(blocks: Tensor) -> Decoded:
    scales = half_at(blocks, 0) * (_halves(blocks[:, 74:]) + 0.5) * 0.25
    high = (blocks[:, 66:74, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)) & 3
    codes = blocks[:, 2:34].int() | high.flatten(1).int() << 8
    elements = _rows(code_book("IQ2_S"), codes)
    return Decoded(elements.mul_(_rows(sign_rows(""), blocks[:, 34:66])), scales)


def _iq3_xxs(blocks: Tensor) -> Decoded:
    words = _long_words(blocks[:, 66:].contiguous())
    scales = half_at(blocks, 0) * ((words >> 28).float() + 0.5) * 0.5
    elements = _rows(code_book("IQ3_XXS"), blocks[:, 2:66])
    return Decoded(elements.mul_(_signs_of_words(words)), scales)


def _iq3_s(blocks: Tensor) -> Decoded:
    scales = half_at(blocks, 0) * (1 + 2 * _halves(blocks[:, 106:]))
    high = (blocks[:, 66:74, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    codes = blocks[:, 2:66].int() | high.flatten(1).int() << 8
    elements = _rows(code_book("IQ3_S"), codes)
    return Decoded(elements.mul_(_rows(sign_rows(""), blocks[:, 74:106])), scales)


def _shifted(elements: Tensor, is_down: Tensor) -> Tensor:
    """Return elements in eighths, an eighth up or down for whole sub-blocks."""
    shifts = 1 - 2 * is_down.to(torch.int8)
    grouped = (elements * DELTA).reshape(len(elements), shifts.shape[1], -1)
    return (grouped + shifts[:, :, None]).flatten(1)


def _iq1_s(blocks: Tensor) -> Decoded:
    words = _words(blocks[:, 34:])
    scales = half_at(blocks, 0) * (2 * (words >> 12 & 7) + 1)
    high = (words[:, :, None] >> torch.tensor([0, 3, 6, 9], dtype=torch.int32)) & 7
    codes = blocks[:, 2:34].int() | high.flatten(1) << 8
    elements = _rows(code_book("IQ1_S"), codes)
    return Decoded(_shifted(elements, words >> 15), scales)


def _iq1_m(blocks: Tensor) -> Decoded:
    stored = _words(blocks[:, 48:])
    # The upper four bits of the four words are one float16 number.
    bits = (stored >> 12) << torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    whole = bits.sum(1, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    steps = (stored[:, :, None] >> torch.tensor([0, 3, 6, 9], dtype=torch.int32)) & 7
    scales = whole[:, None] * (2 * steps.flatten(1) + 1)
    halves = torch.stack([blocks[:, 32:48] & 15, blocks[:, 32:48] >> 4], 2).flatten(1)
    codes = blocks[:, :32].int() | (halves & 7).int() << 8
    elements = _rows(code_book("IQ1_S"), codes)
    return Decoded(_shifted(elements, halves >> 3), scales)


def _iq4_nl(blocks: Tensor) -> Decoded:
    codes = nibbles(blocks[:, 2:], 16)
    return Decoded(_rows(code_book("IQ4_NL"), codes), half_at(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Decoded:
    high = (_words(blocks[:, 2:4]) >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], 2).flatten(1)
    scales = half_at(blocks, 0) * ((low.int() | high << 4) - 32).float()
    codes = nibbles(blocks[:, 8:], 16)
    return Decoded(_rows(code_book("IQ4_NL"), codes), scales)


CODEBOOK_TYPES: Mapping[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("IQ2_XXS", 16, SUPER, 66, _iq2_xxs),
        BlockType("IQ2_XS", 17, SUPER, 74, _iq2_xs),
        BlockType("IQ3_XXS", 18, SUPER, 98, _iq3_xxs),
        BlockType("IQ1_S", 19, SUPER, 50, _iq1_s, 1 / DELTA),
        BlockType("IQ4_NL", 20, 32, 18, _iq4_nl),
        BlockType("IQ3_S", 21, SUPER, 110, _iq3_s),
        BlockType("IQ2_S", 22, SUPER, 82, _iq2_s),
        BlockType("IQ4_XS", 23, SUPER, 136, _iq4_xs),
        BlockType("IQ1_M", 29, SUPER, 56, _iq1_m, 1 / DELTA),
    )
}
