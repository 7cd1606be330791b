"""Value counts per block exponent: all that an MX sweep needs to know of a 16-bit tensor.

What happens to a number in a block depends on the number and on the exponent of the block's largest
magnitude, and on nothing else, whichever element format and offset is asked about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError, unknown
from qgate.stats import bits as _bits
from qgate.stats.summary import Floats, Ints

_BATCH = 2**22
_VIA = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """`rows[e]` counts the bit patterns in blocks whose largest magnitude has exponent e.

    Subnormal and zero blocks are under -127, where every MX scale is clamped anyway. Blocks that
    hold NaN or Inf are `poisoned` and counted apart.
    """

    dtype: str
    block: int
    rows: Mapping[int, Ints] = field(repr=False)
    poisoned: Ints = field(repr=False)

    def __add__(self, other: BlockCounts) -> BlockCounts:
        if not isinstance(other, BlockCounts):
            return NotImplemented
        for what in ("dtype", "block"):
            if getattr(self, what) != getattr(other, what):
                raise _bits.not_the_same(f"{what}s", getattr(self, what), getattr(other, what))
        rows = {e: row.copy() for e, row in self.rows.items()}
        for e, row in other.rows.items():
            rows[e] = rows[e] + row if e in rows else row.copy()
        return BlockCounts(self.dtype, self.block, rows, self.poisoned + other.poisoned)

    @property
    def n(self) -> int:
        return sum(int(row.sum()) for row in self.rows.values()) + int(self.poisoned.sum())

    def weighted(self) -> dict[int, tuple[Floats, Ints]]:
        """Per exponent the distinct values, ascending, and how often each occurs."""
        decoded = _bits.decoded(_bits.BY_NAME[self.dtype])
        found = {}
        for exponent, row in sorted(self.rows.items()):
            there = np.flatnonzero(row)
            order = np.argsort(decoded[there], kind="stable")
            found[exponent] = decoded[there][order], row[there][order]
        return found


def block_counts(
    x: Any, *, block: int = 32, axis: int = -1, via: Literal["bf16", "fp16"] | None = None
) -> BlockCounts:
    """Counts for blocks of that many elements along an axis, of a 16-bit tensor or its chunks.

    Other tensors are rounded with `via`, a part at a time (exactly, if they hold such numbers).

    Chunks are tensors of their own: a block does not go on from one to the next.
    """
    if via is not None and via not in _VIA:
        raise unknown("via", via, _VIA)
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block is a whole number, not {block!r}.")
    if block < 1:
        raise QgateError(f"block {block} is not allowed; it is at least 1.")
    total: BlockCounts | None = None
    for tensor in _bits.as_tensors(x):
        dtype = _VIA[via] if via is not None else tensor.dtype
        if dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"blocks are counted in bfloat16 and float16, not {tensor.dtype}.")
        if not -max(tensor.dim(), 1) <= axis < max(tensor.dim(), 1):
            raise QgateError(f"axis {axis} is out of range for {tensor.dim()} dimensions.")
        with _bits.serial():
            part = _count_blocks(tensor, block, axis, dtype)
        total = part if total is None else total + part
    if total is None:
        raise QgateError("there is nothing to count: no tensor was given.")
    return total


def _count_blocks(x: Tensor, block: int, axis: int, dtype: torch.dtype) -> BlockCounts:
    rows: dict[int, Ints] = {}
    poisoned = np.zeros(2**16, dtype=np.int64)
    along = x.movedim(axis, -1) if x.dim() > 1 else x
    room = _BATCH if x.device.type == "cpu" else 2**26
    infinity = 0x7F80 if dtype == torch.bfloat16 else 0x7C00
    for slab in _bits.slabs(along, room, unit=block):
        length = slab.shape[-1]
        bits = slab.reshape(-1, length).to(dtype).view(torch.int16)
        whole = length // block * block
        for part in (bits[:, :whole], bits[:, whole:]):
            if part.numel() == 0:
                continue
            groups = part.reshape(-1, block if part.shape[1] == whole and whole else part.shape[1])
            index = groups.contiguous().to(torch.int32)
            size = index.bitwise_and(0x7FFF).amax(1, keepdim=True)
            single = size.to(torch.int16).view(dtype).to(torch.float32).view(torch.int32)
            fields = (single >> 23).masked_fill_(size >= infinity, 255)
            found = torch.bincount(fields.view(-1), minlength=256).nonzero().view(-1)
            place = torch.zeros(256, dtype=torch.int32, device=x.device)
            place[found] = torch.arange(len(found), dtype=torch.int32, device=x.device)
            index.bitwise_and_(0xFFFF).add_(place[fields] << 16)
            counted = torch.bincount(index.view(-1), minlength=len(found) << 16)
            for field_number, row in zip(
                found.tolist(), counted.view(-1, 2**16).cpu().numpy(), strict=True
            ):
                if field_number == 255:
                    poisoned += row
                else:
                    exponent = field_number - 127
                    rows[exponent] = rows[exponent] + row if exponent in rows else row.copy()
    return BlockCounts(_bits.short_name(dtype), block, rows, poisoned)
