"""One tensor and one quantizer: the checks, the layout in groups that share a scale, the scales.

Every tensor is viewed as [outer, length, inner]; groups are runs of `block` elements along the
middle, the last of which may be shorter, or tiles. Chunks are [outer, blocks, block, inner] views
of a size that fits the cache, with whole groups, or with parts of groups after their scales are
made.
`Job` is the first pass over a tensor; the second goes through `Job.contexts`, chunk by chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats._scratch import tracing
from qgate.formats._work import DOUBLE, CastContext, ScaledChunk, ordinary_number, single, widen
from qgate.formats.choosing import ChoosingFormat
from qgate.formats.definition import CLEARLY_LESS
from qgate.formats.engine import scales
from qgate.formats.engine.checking import check
from qgate.formats.engine.dtypes import INFINITY, NATIVE_INTEGER, magnitude_bits
from qgate.formats.groups import Groups, rows_of
from qgate.formats.settings import QuantizerSettings
from qgate.kernels import proving
from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate.kernels import reductions as reductions
else:
    reductions = LateModule("qgate.kernels.reductions")


_CHUNK_PER_THREAD = 2**18  # bytes of input
_CHUNK_ON_DEVICE = 2**25
_LONG_CHUNK = 2**19  # elements, where figures of blocks take as long as the elements
_COUNTING_PAYS_FROM = 2**17

Pair = tuple[int, int]


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
    long: bool = False

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
            return split_tiles(x, self.tile)
        if self.listed is not None:
            return split_groups(x, self.listed)
        if self.moved is not None:
            x = x.movedim(self.moved, 0)
        return x.reshape(self.outer, self.length, self.inner)

    def restore(self, t: Tensor) -> Tensor:
        """Undo `arrange`; the result is contiguous."""
        if self.tile is not None:
            return join_tiles(t, self.shape, self.tile)
        if self.listed is not None:
            return join_groups(t, self.shape, self.listed)
        if self.moved is None:
            return t.view(self.shape)
        shape = list(self.shape)
        shape.insert(0, shape.pop(self.moved))
        return t.reshape(shape).movedim(0, self.moved).contiguous()

    def chunks(
        self, device: torch.device, *, parts_of_groups: bool, fixed: bool
    ) -> Iterator[Chunk]:
        """Cut into chunks; with `fixed` their sizes do not depend on the number of threads."""
        if 0 in (self.outer, self.length, self.inner):
            return
        room = _LONG_CHUNK if self.long else _CHUNK_PER_THREAD // self.itemsize
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
        tile, counts = fitted(shape, q.tile)
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


class Job:
    """One tensor and one quantizer: the layout, and the figures of the whole tensor."""

    def __init__(self, x: Tensor, q: QuantizerSettings, *, counting: bool = False) -> None:
        """With `counting` the format's own rounding replaces a random one, so that nothing is
        drawn from a generator."""
        check(x, q)
        self.q = q.deterministic() if counting else q
        q = self.q
        self.x = x.detach().resolve_neg()
        self.dtype: torch.dtype = q.dtype or x.dtype
        self.double = x.dtype == torch.float64
        self.layout = layout_of(x, q)
        self.layout.long = isinstance(q.format, ChoosingFormat)
        self.data = self.layout.arrange(self.x)
        self.scale: Tensor | None = None
        self.zero_point: Tensor | None = None
        self.amax_bits: Tensor | None = None
        if q.zero_point == "minmax":
            self.scale, self.zero_point = scales.fit_zero_points(*self._ends(), q)
        elif q.format.kind == "element" and q.granularity is not None:
            self.scale = self._scale()
            if q.zero_point is not None:
                zero_point = scales.zero_point_from_option(q, x.device)
                self.zero_point = self.per_group("zero point", zero_point)

    @cached_property
    def state(self) -> Tensor | None:
        """The state that a block format has of the whole tensor, or of the row of each group."""
        fmt, x = self.q.format, self.x
        if fmt.kind == "element" or not fmt.needs_amax or not x.numel():
            return None
        finite = x.device.type != "cpu"  # asking first would wait for the device
        groups = self._amax_bits(finite=finite)
        if not finite and groups.amax().item() >= INFINITY[x.dtype]:
            finite_groups = self._amax_bits(finite=True)
        else:
            finite_groups, self.amax_bits = groups, None if finite else groups
        if fmt.by_blocks:
            return fmt.prepare(finite_groups.view(x.dtype))
        if fmt.by_rows:
            rows = finite_groups.amax(1, keepdim=True)
            state = fmt.prepare(rows.view(x.dtype))
            return None if state is None else state.expand(groups.shape)
        return fmt.prepare(finite_groups.amax().view(x.dtype))

    @property
    def fixed(self) -> bool:
        return self.q.rounding == "stochastic"

    def chunks(self, *, parts_of_groups: bool) -> Iterator[Chunk]:
        return self.layout.chunks(self.x.device, parts_of_groups=parts_of_groups, fixed=self.fixed)

    def contexts(self) -> Iterator[tuple[Chunk, CastContext]]:
        """Cut into chunks for the second pass, each with the context of its cast."""
        scales_exist = self.scale is not None or self.q.format.kind == "element"
        draws = self.q.draws_of(self.x) if self.q.rounding == "stochastic" else None
        draws = None if draws is None else self.layout.arrange(draws)
        for chunk in self.chunks(parts_of_groups=scales_exist):
            state = self.state if self.scale is None else self.scale
            if state is not None and state.dim() == 4:
                state = chunk.group(state)
            amax = None if self.amax_bits is None else chunk.group(self.amax_bits)
            zero = None if self.zero_point is None else chunk.group(self.zero_point)
            size = self.x.numel()
            width = self.layout.tile[1] if self.layout.tile is not None else 0
            q = self.q if draws is None else self.q.drawing(chunk.data(draws))
            yield chunk, CastContext(q, DOUBLE, self.double, state, size, amax, zero, width)

    def rows(self, k: int, dtype: torch.dtype) -> Tensor:
        """Allocate k zeros per group."""
        layout = self.layout
        return torch.zeros(
            layout.outer, layout.groups, k, layout.inner, dtype=dtype, device=self.x.device
        )

    def shaped(self, rows: Tensor) -> Tensor:
        """Reshape [outer, groups, k, inner] for users: x's shape with one entry per group."""
        k, shape = rows.shape[2], self.layout.group_shape
        if k == 1:
            return rows.reshape(shape)
        axis = self.q.axis_of(self.x.dim())
        return rows.reshape(*shape[: axis + 1], k, *shape[axis + 1 :])

    def per_group(self, label: str, given: Tensor) -> Tensor:
        """Return what the user gave for each group as [outer, groups, 1, inner]."""
        layout = self.layout
        group_shape = torch.Size(layout.group_shape)
        squeezed = [size for size in given.shape if size != 1]
        if squeezed != [size for size in group_shape if size != 1]:
            raise QgateError(
                f"a {label} of shape {tuple(given.shape)} does not fit: granularity "
                f"{self.q.granularity!r} of a tensor of shape {tuple(layout.shape)} has {label}s "
                f"of shape {tuple(group_shape)}."
            )
        return given.reshape(layout.outer, layout.groups, 1, layout.inner)

    def _amax_bits(self, *, finite: bool = False) -> Tensor:
        """Return the largest (finite) magnitude of each group, as bits of x's dtype."""
        layout, native = self.layout, NATIVE_INTEGER[self.x.dtype]
        kernels = self.x.device.type in proving.DEVICES and not finite and not tracing()
        if kernels and layout.outer * layout.groups * layout.inner == 1:
            largest = reductions.largest(self.data)
            if largest is not None:
                return largest.to(native).view(1, 1, 1, 1)
        rows = None
        for chunk in self.chunks(parts_of_groups=True):
            magnitudes = magnitude_bits(chunk.data(self.data))
            if finite:
                magnitudes.masked_fill_(magnitudes >= INFINITY[self.x.dtype], 0)
            if chunk.slices is None:
                return magnitudes.amax(2, keepdim=True)
            rows = self.rows(1, native) if rows is None else rows
            row = chunk.group(rows)
            torch.maximum(row, magnitudes.amax(2, keepdim=True), out=row)
        return self.rows(1, native) if rows is None else rows

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Return the largest and the negated smallest number of each group, at least 0.

        The bits of positive numbers have their order as integers; those of negative ones are
        negative.
        """
        dtype, native = self.x.dtype, NATIVE_INTEGER[self.x.dtype]
        high, low = self.rows(1, native), self.rows(1, native)
        for chunk in self.chunks(parts_of_groups=True):
            bits = chunk.data(self.data).view(native)
            for rows, part in ((high, bits), (low, bits ^ torch.iinfo(native).min)):
                row = chunk.group(rows)
                torch.maximum(row, part.amax(2, keepdim=True), out=row)
        return high.view(dtype), low.view(dtype)

    def _scale(self) -> Tensor:
        """Return the scale of each group as float64 [outer, groups, 1, inner]."""
        q, fmt = self.q, self.q.format.element
        if q.scale is not None:
            return self.per_group("scale", scales.scale_from_option(q, self.x))
        bits = self._amax_bits()
        if not self.double and not fmt.tapered:
            number = ordinary_number(bits.view(self.x.dtype))
            if number is not None:
                return bits.new_full(bits.shape, single(number / fmt.max), dtype=torch.float64)
        scale = scales.of_amax(bits.view(self.x.dtype), q)
        return better_scale(self, scale, bits) if fmt.tapered else scale


def split(job: Job) -> Iterator[tuple[Chunk, CastContext, Tensor, ScaledChunk]]:
    """Split each chunk into elements and scale, for `report` and for gradients."""
    for chunk, context in job.contexts():
        wide = widen(chunk.data(job.data))
        yield chunk, context, wide, job.q.format.split(wide, context)


def better_scale(job: Job, aligned: Tensor, amax_bits: Tensor) -> Tensor:
    """Return `definition.better_scales` of a job, as [outer, groups, 1, inner].

    A group with NaN or Inf keeps the scale that it has.
    """
    amax = widen(amax_bits.view(job.x.dtype))
    unit = DOUBLE.power(torch.frexp(amax)[1].to(torch.int64) - 1)
    unit = unit.masked_fill(amax == 0, 1.0)
    counts = job.x.dtype.itemsize == 2 and aligned.numel() == 1 and not tracing()
    sums = _counted_errors if counts and job.x.numel() >= _COUNTING_PAYS_FROM else _summed_errors
    plain, scaled = sums(job, aligned, unit)
    keeps = (scaled < plain * CLEARLY_LESS) | (amax_bits >= INFINITY[job.x.dtype])
    return aligned.where(keeps, torch.ones_like(aligned))


def _summed_errors(job: Job, aligned: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    plain, scaled = (job.rows(1, torch.float64) for _ in range(2))
    for chunk in job.chunks(parts_of_groups=True):
        x, size = widen(chunk.data(job.data)), chunk.group(unit)
        for scale, sums in ((None, plain), (chunk.group(aligned), scaled)):
            chunk.group(sums).add_(_squares(job, x, scale, size).sum(2, keepdim=True))
    return plain, scaled


def _counted_errors(job: Job, aligned: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the errors of one group of 16-bit numbers from how often each of them occurs."""
    counts = torch.zeros(2**16, dtype=torch.int64, device=job.x.device)
    for chunk in job.chunks(parts_of_groups=True):
        codes = chunk.data(job.data).reshape(-1).view(torch.int16).to(torch.int32) + 2**15
        counts += torch.bincount(codes, minlength=2**16)
    occurring = counts.nonzero().reshape(-1)
    numbers = (occurring - 2**15).to(torch.int16).view(job.x.dtype)
    x = widen(numbers).view(1, 1, -1, 1)
    weights = counts[occurring].to(torch.float64).view(1, 1, -1, 1)
    squares = (_squares(job, x, scale, unit) for scale in (None, aligned))
    plain, scaled = ((square * weights).sum(2, keepdim=True) for square in squares)
    return plain, scaled


def _squares(job: Job, x: Tensor, scale: Tensor | None, unit: Tensor) -> Tensor:
    """Square errors in units of a power of two, so that those of float64 numbers stay finite."""
    fmt = job.q.format
    assert fmt.kind == "element"
    parts = fmt.split(x, CastContext(job.q.deterministic(), DOUBLE, job.double, scale))
    return ((parts.elements * parts.scale - x) / unit).square()


def fitted(shape: torch.Size, tile: Pair) -> tuple[Pair, Pair]:
    """Return a tile no larger than the tensor, and the number of tiles down and across."""
    height, width = shape[-2:]
    rows, columns = max(min(tile[0], height), 1), max(min(tile[1], width), 1)
    return (rows, columns), (-(-height // rows), -(-width // columns))


def split_tiles(x: Tensor, tile: Pair) -> Tensor:
    """Return each tile as [tile, element, 1], short ones filled with zeros."""
    (rows, columns), (down, across) = fitted(x.shape, tile)
    short = (0, across * columns - x.shape[-1], 0, down * rows - x.shape[-2])
    filled, matrices = torch.nn.functional.pad(x, short), math.prod(x.shape[:-2])
    tiles = filled.reshape(matrices, down, rows, across, columns).transpose(2, 3)
    return tiles.reshape(matrices * down * across, rows * columns, 1)


def join_tiles(t: Tensor, shape: torch.Size, tile: Pair) -> Tensor:
    """Undo `split_tiles` of a tensor of this shape."""
    (rows, columns), (down, across) = fitted(shape, tile)
    *leading, height, width = shape
    tiles = t.view(math.prod(leading), down, across, rows, columns)
    filled = tiles.transpose(2, 3).reshape(*leading, down * rows, across * columns)
    return filled[..., :height, :width].contiguous()


def split_groups(x: Tensor, groups: Groups) -> Tensor:
    """Return the elements of each group as [group, element, 1], short ones filled with zeros."""
    moved = x.movedim(groups.axes, (-2, -1))
    table, _ = rows_of(groups, *moved.shape[-2:])
    flat = moved.reshape(math.prod(moved.shape[:-2]), math.prod(moved.shape[-2:]))
    filled = torch.nn.functional.pad(flat, (0, 1))
    return filled[:, torch.from_numpy(table).to(x.device)].reshape(-1, table.shape[1], 1)


def join_groups(t: Tensor, shape: torch.Size, groups: Groups) -> Tensor:
    """Undo `split_groups` of a tensor of this shape."""
    row, column = groups.along(len(shape))
    leading = [size for axis, size in enumerate(shape) if axis not in (row, column)]
    _, places = rows_of(groups, shape[row], shape[column])
    flat = t.reshape(math.prod(leading), -1)[:, torch.from_numpy(places).to(t.device)]
    matrices = flat.reshape(*leading, shape[row], shape[column])
    return matrices.movedim((-2, -1), groups.axes).contiguous()
