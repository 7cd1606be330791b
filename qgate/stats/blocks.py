"""Value counts per block exponent: all that an MX sweep needs of a 16-bit tensor.

The result for a number in a block depends on the number and on the exponent of the block's largest
magnitude, and on nothing else, for every element format and offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from qgate.errors import QgateError, unknown
from qgate.stats import bits as _bits
from qgate.stats.value_counts import Counts
from qgate.tensor_inputs import usual_arithmetic

_BATCH = 2**22


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """`rows[e]` counts the bit patterns in blocks whose largest magnitude has exponent e.

    Subnormal and zero blocks are under -127, where every MX scale is clamped anyway. Blocks that
    hold NaN or Inf are `poisoned` and counted apart.
    """

    dtype: str
    block: int
    rows: Mapping[int, Counts] = field(repr=False)
    poisoned: Counts = field(repr=False)

    def __add__(self, other: BlockCounts) -> BlockCounts:
        if not isinstance(other, BlockCounts):
            return NotImplemented
        for name in ("dtype", "block"):
            if getattr(self, name) != getattr(other, name):
                raise _bits.mismatch_error(f"{name}s", getattr(self, name), getattr(other, name))
        rows = dict(self.rows)
        for e, row in other.rows.items():
            rows[e] = rows[e] + row if e in rows else row
        return BlockCounts(self.dtype, self.block, rows, self.poisoned + other.poisoned)

    @property
    def n(self) -> int:
        return self.total().n

    def total(self) -> Counts:
        """Return the counts of all values."""
        return Counts.together([self.poisoned, *self.rows.values()])


@usual_arithmetic()
def block_counts(
    x: Any, *, block: int = 32, axis: int = -1, via: Literal["bf16", "fp16"] | None = None
) -> BlockCounts:
    """Count blocks of that many elements along an axis, of a 16-bit tensor or its chunks.

    Other tensors are rounded with `via`, a part at a time (exactly, if they hold such numbers).
    Chunks are separate tensors: no block crosses from one to the next.
    """
    if via is not None and via not in _bits.VIA:
        raise unknown("via", via, _bits.VIA)
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block is a whole number, not {block!r}.")
    if block < 1:
        raise QgateError(f"block {block} is not allowed; it is at least 1.")
    total: BlockCounts | None = None
    for tensor in map(_bits.countable, _bits.as_tensors(x)):
        dtype = _bits.VIA[via] if via is not None else tensor.dtype
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
    name = _bits.short_name(dtype)
    rows: dict[int, Counts] = {}
    poisoned = Counts(name)
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
            occurring = torch.bincount(fields.view(-1), minlength=256).nonzero().view(-1)
            row_of_field = torch.zeros(256, dtype=torch.int32, device=x.device)
            row_of_field[occurring] = torch.arange(
                len(occurring), dtype=torch.int32, device=x.device
            )
            index.bitwise_and_(0xFFFF).add_(row_of_field[fields] << 16)
            counts = torch.bincount(index.view(-1), minlength=len(occurring) << 16)
            for field_number, row in zip(
                occurring.tolist(), counts.view(-1, 2**16).cpu().numpy(), strict=True
            ):
                into = poisoned
                if field_number != 255:
                    into = rows.setdefault(field_number - 127, Counts(name))
                into.add(Counts(name, row))
    return BlockCounts(name, block, rows, poisoned)
