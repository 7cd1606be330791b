"""Layouts of tensors in groups that share a scale, and chunks that go through the cache.

Every tensor is viewed as [outer, length, inner]; groups are runs of `block` elements along the
middle, the last of which may be shorter, or tiles. Chunks are [outer, blocks, block, inner] views
of a size that fits the cache, with whole groups, or with parts of groups after their scales are
made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qgate.formats.settings import QuantizerSettings
from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate.formats.engine import tiles as tiles
    from qgate.formats.groups import Groups
else:
    tiles = LateModule("qgate.formats.engine.tiles")

_CHUNK_PER_THREAD = 2**18  # bytes of input
_CHUNK_ON_DEVICE = 2**25
_LONG_CHUNK = 2**19
"""Elements of a chunk per thread where figures of blocks take as long as their elements."""


@dataclass
class Chunk:
    """One chunk of a layout: slices into the whole blocks, or into the short last ones.

    Without slices it is all of a tensor without short blocks.
    """

    layout: Layout
    tail: bool = False
    slices: tuple[slice, slice, slice, slice] | None = None

    def data(self, t: Tensor) -> Tensor:
        """Return this chunk of an [outer, length, inner] tensor."""
        layout = self.layout
        if self.slices is None:
            return t.view(layout.outer, layout.whole, layout.block, layout.inner)
        whole = layout.whole * layout.block
        if self.tail:
            view = t[:, whole:].unsqueeze(1)
        else:
            view = t[:, :whole].unflatten(1, (layout.whole, layout.block))
        return view[self.slices]

    def group(self, t: Tensor) -> Tensor:
        """Return this chunk of an [outer, blocks, k, inner] tensor with one row per group."""
        if self.slices is None:
            return t
        outer, blocks, _, inner = self.slices
        view = t[:, self.layout.whole :] if self.tail else t[:, : self.layout.whole]
        return view[outer, blocks, :, inner]


@dataclass
class Layout:
    shape: torch.Size
    itemsize: int
    outer: int
    length: int
    inner: int
    block: int
    groups: int
    """Number of groups along the middle, a short last one included."""
    group_shape: tuple[int, ...]
    moved: int | None = None
    """The axis that was moved to the front, if any."""
    tile: tuple[int, int] | None = None
    """Rows and columns of tiles, each a row of `length` elements, short ones filled with zeros."""
    listed: Groups | None = None
    """Groups by a function, each a row of `length` elements, short ones filled with zeros."""

    @property
    def is_filled(self) -> bool:
        """True if short groups are filled with zeros."""
        return self.tile is not None or self.listed is not None

    @property
    def whole(self) -> int:
        """Number of blocks of full length."""
        return self.length // self.block

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a result as [outer, length, inner]."""
        return torch.empty(self.outer, self.length, self.inner, dtype=dtype, device=device)

    def arrange(self, x: Tensor) -> Tensor:
        """View x as [outer, length, inner], copied only where necessary or in tiles."""
        if self.tile is not None:
            return tiles.split_tiles(x, self.tile)
        if self.listed is not None:
            return tiles.split_groups(x, self.listed)
        if self.moved is not None:
            x = x.movedim(self.moved, 0)
        return x.reshape(self.outer, self.length, self.inner)

    def restore(self, t: Tensor) -> Tensor:
        """Undo `arrange`; the result is contiguous."""
        if self.tile is not None:
            return tiles.join_tiles(t, self.shape, self.tile)
        if self.listed is not None:
            return tiles.join_groups(t, self.shape, self.listed)
        if self.moved is None:
            return t.view(self.shape)
        shape = list(self.shape)
        shape.insert(0, shape.pop(self.moved))
        return t.reshape(shape).movedim(0, self.moved).contiguous()

    def chunks(
        self, device: torch.device, *, parts_of_groups: bool, fixed: bool, long: bool = False
    ) -> Iterator[Chunk]:
        """Cut into chunks; with `fixed` their sizes do not depend on the number of threads."""
        if 0 in (self.outer, self.length, self.inner):
            return
        room = _LONG_CHUNK if long else _CHUNK_PER_THREAD // self.itemsize
        if not fixed:
            room *= min(torch.get_num_threads(), 16)
        if device.type != "cpu" and not fixed:
            room = _CHUNK_ON_DEVICE
        whole_length = self.whole * self.block
        if whole_length == self.length and self.outer * self.length * self.inner <= room:
            yield Chunk(self)
            return
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
            for o, n, b, i in itertools.product(
                _slices(self.outer, outer_step),
                _slices(count, blocks_step),
                _slices(size, block_step),
                _slices(self.inner, inner_step),
            ):
                yield Chunk(self, tail, (o, n, b, i))


def _slices(end: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, end, step)]


def layout_of(x: Tensor, q: QuantizerSettings) -> Layout:
    shape, n, size = x.shape, x.numel(), x.itemsize
    if q.granularity in (None, "tensor"):
        return Layout(shape, size, 1, n, 1, max(n, 1), 1, ())
    if q.tile is not None:
        tile, counts = tiles.fitted(shape, q.tile)
        length, group_shape = math.prod(tile), (*shape[:-2], *counts)
        outer = math.prod(group_shape)
        return Layout(shape, size, outer, length, 1, length, 1, group_shape, tile=tile)
    if q.groups is not None:
        group_shape = q.groups.scales_shape(shape)
        length, outer = q.groups.width(shape), math.prod(group_shape)
        return Layout(shape, size, outer, length, 1, length, 1, group_shape, listed=q.groups)
    sizes = list(shape) or [1]
    axis = len(sizes) - 1 if q.axis is None else q.axis_of(x.dim())
    before, length, after = math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
    if q.granularity == "block":
        groups = -(-length // q.block)
        group_shape = (*sizes[:axis], groups, *sizes[axis + 1 :])
        return Layout(shape, size, before, length, after, q.block, groups, group_shape)
    per_channel = before * after
    if after == 1 and axis != 0:
        return Layout(shape, size, 1, per_channel, length, max(per_channel, 1), 1, (length,))
    return Layout(
        shape, size, length, per_channel, 1, max(per_channel, 1), 1, (length,), moved=axis or None
    )
