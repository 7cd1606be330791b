"""Faults of exporters in the bytes of GGUF blocks, and what undoes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from qgate.checkpoints.gguf.blocks import BlockType
from qgate.checkpoints.gguf.weights import KINDS, decode_blocks
from qgate.checkpoints.grids import QuantizedWeight

ByteChange = Callable[[Tensor], Tensor]
NIBBLES = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q5_0": (6, 16), "Q5_1": (8, 16), "Q4_K": (16, 32),
           "Q5_K": (48, 32), "Q6_K": (0, 64), "IQ4_NL": (2, 16), "IQ4_XS": (8, 16),
           "MXFP4": (1, 16), "NVFP4": (4, 8)}  # fmt: skip
"""Where the codes of a block begin, and how many bytes hold low halves and high halves."""
ENDS = {"Q6_K": 128}
PAIRS = {"Q4_1": 0, "Q5_1": 0, "Q2_K": 80, "Q4_K": 0, "Q5_K": 0}
"""Where the float16 numbers of scales and of minima stand side by side."""


def block_faults(weight: QuantizedWeight) -> Iterator[tuple[str, Callable[[], QuantizedWeight]]]:
    """Yield faults in words, and the weight without them."""
    if weight.blocks is None:
        return
    name, raw = weight.blocks
    kind = KINDS[name]

    def changed(change: ByteChange) -> Callable[[], QuantizedWeight]:
        return lambda: decode_blocks(_in_blocks(raw, kind, change), kind)

    if kind.name in NIBBLES:
        yield (
            "the halves of each byte are swapped (the order of nibbles)",
            changed(partial(_with_codes, kind=kind, change=_halves_swapped)),
        )
        yield (
            "bytes hold neighboring codes, not those of both halves of a block (the order of "
            "nibbles)",
            changed(partial(_with_codes, kind=kind, change=partial(_from_neighbors, kind=kind))),
        )
    if kind.name in PAIRS:
        swap = partial(_pair_swapped, start=PAIRS[kind.name])
        yield "scales and minima of blocks are swapped", changed(swap)
    if kind.name in ("Q2_K", "Q4_K", "Q5_K"):
        of_sub_blocks = _q2_swapped if kind.name == "Q2_K" else _sub_blocks_swapped
        yield "scales and minima of sub-blocks are swapped", changed(of_sub_blocks)
    for step, side in ((1, "after"), (-1, "before")):
        moved = changed(partial(torch.roll, shifts=step, dims=0))
        yield f"every block is that {side} it", moved
    for other in KINDS.values():
        if _fits(other, kind, raw):
            words = f"its blocks are {other.name}, and it is declared {kind.name}"
            yield words, partial(decode_blocks, raw, other)


def _fits(other: BlockType, kind: BlockType, raw: Tensor) -> bool:
    """Return True for another type whose blocks take as many bytes for as many elements."""
    return (
        other.name != kind.name
        and other.bytes * kind.elements == kind.bytes * other.elements
        and raw.shape[1] % other.bytes == 0
    )


def _in_blocks(raw: Tensor, kind: BlockType, change: ByteChange) -> Tensor:
    return change(raw.reshape(-1, kind.bytes).clone()).reshape(raw.shape)


def _with_codes(blocks: Tensor, kind: BlockType, change: ByteChange) -> Tensor:
    start = NIBBLES[kind.name][0]
    stop = ENDS.get(kind.name, kind.bytes)
    blocks[:, start:stop] = change(blocks[:, start:stop])
    return blocks


def _halves_swapped(codes: Tensor) -> Tensor:
    return codes >> 4 | codes << 4


def _from_neighbors(codes: Tensor, kind: BlockType) -> Tensor:
    """Pack codes that lie in pairs of neighbors in the halves of their group."""
    group = NIBBLES[kind.name][1]
    grouped = codes.reshape(len(codes), -1, group)
    low, high = grouped & 15, grouped >> 4
    # Code 2j is low and 2j + 1 high in byte j: the first half of the bytes has the low codes.
    first = grouped.new_empty(*grouped.shape[:2], 2 * group)
    first[..., 0::2], first[..., 1::2] = low, high
    return (first[..., :group] | first[..., group:] << 4).reshape(codes.shape)


def _pair_swapped(blocks: Tensor, start: int) -> Tensor:
    pair = blocks[:, start : start + 4].clone()
    blocks[:, start : start + 2], blocks[:, start + 2 : start + 4] = pair[:, 2:], pair[:, :2]
    return blocks


def _sub_blocks_swapped(blocks: Tensor) -> Tensor:
    """Swap the six-bit scales and minima of eight sub-blocks."""
    data = blocks[:, 4:16].clone()
    blocks[:, 4:8], blocks[:, 8:12] = data[:, 4:8], data[:, :4]
    blocks[:, 12:16] = _halves_swapped(data[:, 8:])
    return blocks


def _q2_swapped(blocks: Tensor) -> Tensor:
    blocks[:, :16] = _halves_swapped(blocks[:, :16])
    return blocks
