"""How a tensor's elements fall into groups that share a scale, and cache-sized chunks of them.

Every tensor is seen as [outer, length, inner]; groups are runs of `block` elements along the
middle, the last of which may be shorter. Chunks are [outer, blocks, block, inner] views with whole
groups, or parts of groups once their scales are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.formats.quantizer import Quantizer

_CHUNK_PER_THREAD = 2**18  # bytes of input
_CHUNK_ON_DEVICE = 2**25


@dataclass(frozen=True)
class Chunk:
    """One chunk of a layout: slices into the whole blocks, or into the short last ones."""

    layout: Layout
    tail: bool
    outer: slice
    blocks: slice
    block: slice
    inner: slice

    def data(self, t: Tensor) -> Tensor:
        """This chunk of an [outer, length, inner] tensor."""
        whole = self.layout.whole * self.layout.block
        if self.tail:
            view = t[:, whole:].unsqueeze(1)
        else:
            view = t[:, :whole].unflatten(1, (self.layout.whole, self.layout.block))
        return view[self.outer, self.blocks, self.block, self.inner]

    def group(self, t: Tensor) -> Tensor:
        """This chunk of an [outer, blocks, k, inner] tensor with one row per group."""
        view = t[:, self.layout.whole :] if self.tail else t[:, : self.layout.whole]
        return view[self.outer, self.blocks, :, self.inner]


@dataclass(frozen=True)
class Layout:
    shape: torch.Size
    itemsize: int
    outer: int
    length: int
    inner: int
    block: int
    groups: int
    """Along the middle, a short last one included."""
    group_shape: tuple[int, ...]
    moved: int | None = None
    """The axis that was put first, if one was."""

    @property
    def whole(self) -> int:
        """Blocks of full length."""
        return self.length // self.block

    def arrange(self, x: Tensor) -> Tensor:
        """x as [outer, length, inner], a view where it can be one."""
        if self.moved is not None:
            x = x.movedim(self.moved, 0)
        return x.reshape(self.outer, self.length, self.inner)

    def restore(self, t: Tensor) -> Tensor:
        """The inverse of `arrange`, contiguous."""
        if self.moved is None:
            return t.reshape(self.shape)
        shape = list(self.shape)
        shape.insert(0, shape.pop(self.moved))
        return t.reshape(shape).movedim(0, self.moved).contiguous()

    def chunks(
        self, device: torch.device, *, parts_of_groups: bool, fixed: bool
    ) -> Iterator[Chunk]:
        """All chunks; `fixed` makes their order and sizes independent of the number of threads."""
        if 0 in (self.outer, self.length, self.inner):
            return
        room = _CHUNK_PER_THREAD // self.itemsize
        if not fixed:
            room *= min(torch.get_num_threads(), 16)
        if device.type != "cpu" and not fixed:
            room = _CHUNK_ON_DEVICE
        whole_length = self.whole * self.block
        for tail in (False, True):
            size = self.length - whole_length if tail else self.block
            count = (1 if self.length > whole_length else 0) if tail else self.whole
            if count == 0:
                continue
            inner = self.inner if parts_of_groups else min(self.inner, max(room // size, 1))
            inner_step = min(inner, room)
            block_step = max(room // inner_step, 1) if parts_of_groups else size
            block_step = min(block_step, size)
            blocks_step = min(max(room // (inner_step * block_step), 1), count)
            outer_step = max(room // (inner_step * block_step * blocks_step), 1)
            for o in range(0, self.outer, outer_step):
                for n in range(0, count, blocks_step):
                    for b in range(0, size, block_step):
                        for i in range(0, self.inner, inner_step):
                            yield Chunk(
                                self,
                                tail,
                                slice(o, o + outer_step),
                                slice(n, n + blocks_step),
                                slice(b, b + block_step),
                                slice(i, i + inner_step),
                            )


def layout_of(x: Tensor, q: Quantizer) -> Layout:
    shape, n, size = x.shape, x.numel(), x.itemsize
    if q.granularity in (None, "tensor"):
        return Layout(shape, size, 1, n, 1, max(n, 1), 1, ())
    axis = q.axis_of(x.dim())
    sizes = list(shape) or [1]
    before, length, after = math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
    if q.granularity == "block":
        groups = -(-length // q.block)
        group_shape = (*sizes[:axis], groups, *sizes[axis + 1 :])
        return Layout(shape, size, before, length, after, q.block, groups, group_shape)
    rest = before * after
    if after == 1 and axis != 0:
        return Layout(shape, size, 1, rest, length, max(rest, 1), 1, (length,))
    return Layout(shape, size, length, rest, 1, max(rest, 1), 1, (length,), moved=axis or None)
