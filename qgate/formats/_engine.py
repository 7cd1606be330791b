"""Drives the formats over tensors: checks, scales, chunks, the cast to the result's dtype.

The exact way works in float64 on any input and option. Where a format offers a shortcut (float32
arithmetic for blocks, a table for 16-bit input) it is taken when it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats._block import BlockFormat
from qgate.formats._element import ElementFormat
from qgate.formats._layout import Chunk, layout_of
from qgate.formats._literals import Format
from qgate.formats._parts import Call, Parts
from qgate.formats._scratch import buffer
from qgate.formats._work import (
    DOUBLE,
    FP32_MAX,
    INFINITY,
    INPUTS,
    NATIVE_INTEGER,
    magnitude_bits,
    narrow,
    to_single_grid,
    widen,
)
from qgate.formats.encoded import Encoded
from qgate.formats.quantizer import NanPolicy, Quantizer

_TABLE_PAYS_FROM = 2**14
_TABLES_KEPT = 64
_SCALED_TABLE_PAYS_FROM = 2**19

_tables: dict[object, Tensor] = {}


class Job:
    """One tensor, one quantizer: the layout and what is known of the whole tensor."""

    def __init__(self, x: Tensor, q: Quantizer) -> None:
        check(x, q)
        self.q = q
        self.x = x.detach()
        self.dtype: torch.dtype = q.dtype or x.dtype
        self.double = x.dtype == torch.float64
        self.layout = layout_of(x, q)
        self.data = self.layout.arrange(self.x)
        self.scale: Tensor | None = None
        self.state: Tensor | None = None
        if isinstance(q.format, ElementFormat):
            if q.granularity is not None:
                self.scale = self._scale()
        elif q.format.needs_amax and x.numel():
            bits = self._amax_bits().amax()
            if bits.item() >= INFINITY[x.dtype]:
                bits = self._amax_bits(finite=True).amax()
            self.state = q.format.prepare(widen(bits.reshape(()).view(x.dtype)))

    @property
    def fixed(self) -> bool:
        return self.q.rounding == "stochastic"

    def chunks(self, *, parts_of_groups: bool) -> Iterator[Chunk]:
        return self.layout.chunks(self.x.device, parts_of_groups=parts_of_groups, fixed=self.fixed)

    def calls(self) -> Iterator[tuple[Chunk, Call]]:
        """The chunks for the second pass, each with what its kernel is told."""
        known = self.scale is not None or isinstance(self.q.format, ElementFormat)
        for chunk in self.chunks(parts_of_groups=known):
            state = self.state if self.scale is None else chunk.group(self.scale)
            yield chunk, Call(self.q, DOUBLE, self.double, state, self.x.numel())

    def rows(self, k: int, dtype: torch.dtype) -> Tensor:
        """Room for k numbers per group."""
        layout = self.layout
        return torch.zeros(
            layout.outer, layout.groups, k, layout.inner, dtype=dtype, device=self.x.device
        )

    def shaped(self, rows: Tensor) -> Tensor:
        """[outer, groups, k, inner] as users see it: x's shape with one group per entry."""
        k, shape = rows.shape[2], self.layout.group_shape
        if k == 1:
            return rows.reshape(shape)
        axis = self.q.axis_of(self.x.dim())
        return rows.reshape(*shape[: axis + 1], k, *shape[axis + 1 :])

    def _amax_bits(self, *, finite: bool = False) -> Tensor:
        """The largest (finite) magnitude of each group, as bits of x's dtype."""
        rows = self.rows(1, NATIVE_INTEGER[self.x.dtype])
        for chunk in self.chunks(parts_of_groups=True):
            found = magnitude_bits(chunk.data(self.data))
            if finite:
                found.masked_fill_(found >= INFINITY[self.x.dtype], 0)
            room = chunk.group(rows)
            torch.maximum(room, found.amax(2, keepdim=True), out=room)
        return rows

    def _scale(self) -> Tensor:
        """The scale of each group as float64 [outer, groups, 1, inner]; NaN spoils its group."""
        q, fmt = self.q, self.q.format
        if q.scale is not None:
            return given_scale(q, self)
        bits = self._amax_bits()
        infinity = INFINITY[self.x.dtype]
        spoilt = bits > infinity if q.inf == "saturate" else bits >= infinity
        amax = widen(bits.view(self.x.dtype))
        largest = torch.finfo(torch.float64).max if self.double else FP32_MAX
        scale = amax.clamp(max=largest) / fmt.max
        if not self.double:
            scale = to_single_grid(scale)
        scale = scale.clamp_(min=2.0**-1022 if self.double else 2.0**-149)
        scale = scale.masked_fill_(bits == 0, 1.0)
        return scale.masked_fill_(spoilt, float("nan"))


def check(x: Any, q: Quantizer) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"qgate quantizes torch tensors, not {type(x).__name__}.")
    if x.dtype not in INPUTS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in INPUTS)
        raise TypeError(f"cannot quantize a {x.dtype} tensor; allowed: {allowed}.")
    if x.layout != torch.strided:
        raise TypeError(f"cannot quantize a tensor of layout {x.layout}; call .to_dense() first.")
    if q.granularity in ("channel", "block"):
        q.axis_of(x.dim())
    for name, thing in (("generator", q.generator), ("scale", q.scale)):
        device = getattr(thing, "device", x.device)
        on_cpu_scalar = name == "scale" and isinstance(thing, Tensor) and thing.dim() == 0
        if device.type != x.device.type and not on_cpu_scalar:
            raise QgateError(f"the {name} is on {device} and x on {x.device}; put them together.")


def given_scale(q: Quantizer, job: Job) -> Tensor:
    """The user's scale as float64 [outer, groups, 1, inner], on the grid of the scale's dtype."""
    layout = job.layout
    scale = torch.as_tensor(q.scale, device=job.x.device)
    if not scale.is_floating_point():
        raise TypeError(f"a scale tensor holds floating point numbers, not {scale.dtype}.")
    scale = widen(scale.detach())
    if not job.double:
        scale = to_single_grid(scale)
    if not bool(((scale > 0) & scale.isfinite()).all()):
        bad = scale[~((scale > 0) & scale.isfinite())][0].item()
        raise QgateError(f"scale {bad!r} is not allowed; scales are finite numbers above zero.")
    wanted = torch.Size(layout.group_shape)
    squeezed = [size for size in scale.shape if size != 1]
    if squeezed != [size for size in wanted if size != 1]:
        raise QgateError(
            f"a scale of shape {tuple(scale.shape)} does not fit: granularity {q.granularity!r} of "
            f"a tensor of shape {tuple(layout.shape)} has scales of shape {tuple(wanted)}."
        )
    return scale.reshape(layout.outer, layout.groups, 1, layout.inner)


def quantize(x: Tensor, q: Quantizer) -> Tensor:
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        from qgate.formats._gradient import StraightThrough

        check(x, q)
        result: Tensor = StraightThrough.apply(x, q)
        return result
    return forward(Job(x, q))


def forward(job: Job) -> Tensor:
    layout = job.layout
    out = torch.empty(
        layout.outer, layout.length, layout.inner, dtype=job.dtype, device=job.x.device
    )
    if out.numel():
        if (table := _table_for(job)) is not None:
            _look_up(job, table, out)
        else:
            for chunk, call in job.calls():
                _quantize_chunk(chunk.data(job.data), chunk.data(out), call)
    return layout.restore(out)


def _quantize_chunk(x: Tensor, out: Tensor, call: Call) -> None:
    if not call.q.format.shortcut(x, out, call):
        parts = call.q.format.split(widen(x), call)
        out.copy_(combine(parts.elements, parts.scale, out.dtype, call))


def combine(elements: Tensor, scale: Tensor, dtype: torch.dtype, call: Call) -> Tensor:
    """elements * scale, rounded once to dtype."""
    if call.double and dtype != torch.float64:
        return narrow(call.multiply(elements, scale), dtype)
    return narrow(elements * scale, dtype)


def _table_for(job: Job) -> Tensor | None:
    """What each of the 65,536 numbers of a 16-bit dtype becomes, where one scale serves all."""
    q, x, fmt = job.q, job.x, job.q.format
    if x.dtype.itemsize != 2 or job.fixed or not isinstance(fmt, ElementFormat):
        return None
    if job.scale is not None:
        pays = job.scale.numel() == 1 and x.numel() >= _SCALED_TABLE_PAYS_FROM
        return _tabulate(q, job.scale, x.dtype, job.dtype, x.device) if pays else None
    if x.numel() < _TABLE_PAYS_FROM:
        return None
    key = (fmt, q.rounding, q.saturate, q.narrow, x.dtype, job.dtype, x.device)
    if key not in _tables:
        while len(_tables) >= _TABLES_KEPT:
            _tables.pop(next(iter(_tables)), None)
        _tables[key] = _tabulate(q, None, x.dtype, job.dtype, x.device)
    return _tables[key]


def _tabulate(
    q: Quantizer,
    scale: Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    table = torch.empty(2**16, 1, 1, 1, dtype=out_dtype, device=device)
    _quantize_chunk(every.view(dtype).view(-1, 1, 1, 1), table, Call(q, DOUBLE, False, scale))
    return table.view(-1)


def _look_up(job: Job, table: Tensor, out: Tensor) -> None:
    source, target = job.data.reshape(-1).view(torch.int16), out.view(-1)
    step = 2**17 * min(torch.get_num_threads(), 16) if out.device.type == "cpu" else 2**26
    for start in range(0, len(target), step):
        piece = source[start : start + step]
        index = buffer("codes", piece.shape, torch.int32, piece.device).copy_(piece).add_(2**15)
        torch.index_select(table, 0, index, out=target[start : start + step])


def encode(x: Tensor, q: Quantizer, nan: NanPolicy) -> Encoded:
    check(x, q)
    x, element = x.detach(), element_of(q.format)
    holes = x.isnan() if nan != "error" else None
    if holes is not None:
        x = x.masked_fill(holes, 0.0)
    elif isinstance(q.format, ElementFormat) and q.format.nan_code is None:
        count = int(x.isnan().sum())
        if count:
            raise QgateError(
                f"{q.format.name} has no NaN and x has {count}; "
                "encode(..., nan='max') or nan='zero' stores that instead."
            )
    job = Job(x, q)
    layout = job.layout
    codes = torch.empty(
        layout.outer, layout.length, layout.inner, dtype=element.code_dtype(), device=x.device
    )
    stored: dict[str, Tensor] = {}
    if isinstance(q.format, BlockFormat):
        stored = {name: job.rows(k, torch.uint8) for name, k in q.format.stored.items()}
    for chunk, _, _, parts in split(job):
        chunk.data(codes).copy_(element.to_codes(parts.elements, DOUBLE))
        for name, rows in stored.items():
            chunk.group(rows).copy_(parts.stored[name])
    codes = layout.restore(codes)
    if holes is not None and nan == "max":
        largest = element.to_codes(torch.full((1,), element.max, dtype=torch.float64), DOUBLE)
        codes[holes] = largest.to(codes.device)
    if job.scale is not None:
        stored["scales"] = narrow(job.scale, torch.float64 if job.double else torch.float32)
    state = job.state
    if state is not None and isinstance(q.format, BlockFormat):
        state = narrow(q.format.tensor_scale(state), torch.float32)
    shaped = {name: job.shaped(rows) for name, rows in stored.items()}
    return Encoded(
        q, codes, job.dtype, shaped.get("scales"), state, shaped.get("micro"), double=job.double
    )


def decode(e: Encoded, dtype: torch.dtype | None) -> Tensor:
    q, dtype = e.quantizer, dtype or e.dtype
    element, layout = element_of(q.format), layout_of(e.codes, q)
    data = layout.arrange(e.codes)
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    stored = {}
    rows_of = q.format.stored if isinstance(q.format, BlockFormat) else {"scales": 1}
    for name, shaped in (("scales", e.scales), ("micro", e.micro)):
        if shaped is not None:
            stored[name] = shaped.reshape(layout.outer, layout.groups, rows_of[name], layout.inner)
    state = None if e.tensor_scale is None else widen(e.tensor_scale)
    for chunk in layout.chunks(data.device, parts_of_groups=False, fixed=False):
        rows = {name: chunk.group(value) for name, value in stored.items()}
        call = Call(q, DOUBLE, e.double, state)
        elements = element.from_codes(chunk.data(data), DOUBLE)
        if rows:
            scale = q.format.unscale(rows, call)[:, :, : elements.shape[2]]
            value = combine(elements, scale, dtype, call)
        else:
            value = narrow(elements, dtype)
        chunk.data(out).copy_(value)
    return layout.restore(out)


def element_of(fmt: Format) -> ElementFormat:
    return fmt if isinstance(fmt, ElementFormat) else fmt.element


def split(job: Job) -> Iterator[tuple[Chunk, Call, Tensor, Parts]]:
    """Each chunk as float64 with its elements and scale: what `report` and gradients look at."""
    for chunk, call in job.calls():
        wide = widen(chunk.data(job.data))
        yield chunk, call, wide, job.q.format.split(wide, call)


def saturated(wide: Tensor, parts: Parts, q: Quantizer) -> Tensor:
    """Where x lies beyond the largest value at its scale; False for NaN."""
    low, high = element_of(q.format).bounds(narrow=q.narrow)
    return (wide > high * parts.scale) | (wide < low * parts.scale)
