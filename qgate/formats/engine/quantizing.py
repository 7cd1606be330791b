"""Apply a format to a tensor, chunk by chunk, and cast the result.

The exact way works in float64 on any input and option. Where a format offers a shortcut (float32
arithmetic for blocks, a table for 16-bit input) it is taken when it gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgate.formats._block import Format
from qgate.formats._scratch import BoundedCache, buffer
from qgate.formats._work import DOUBLE, CastContext, widen
from qgate.formats.engine import fast_element, fast_mx, fast_nvfp4, on_device, rotation
from qgate.formats.engine.dtypes import combine
from qgate.formats.engine.job import Job, check, split
from qgate.formats.engine.scales import saturated
from qgate.formats.mx import MxFormat
from qgate.formats.nvfp4 import Nvfp4Format
from qgate.formats.settings import QuantizerSettings
from qgate.kernels import proving

_TABLE_PAYS_FROM = 2**14
_SCALED_TABLE_PAYS_FROM = 2**19

_tables = BoundedCache(64)


def quantize(x: Tensor, q: QuantizerSettings) -> Tensor:
    if q.rotation is not None:
        check(x, q)
        return rotation.quantize_rotated(x, q, quantize)
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        check(x, q)
        result: Tensor = StraightThrough.apply(x, q)  # type: ignore[no-untyped-call]
        return result
    return forward(Job(x, q))


def forward(job: Job, *, kernels: bool = True) -> Tensor:
    """Quantize by a kernel where the device has one, else by torch."""
    layout = job.layout
    out = layout.empty(job.dtype, job.x.device)
    kernels = kernels and job.x.device.type in proving.DEVICES
    if out.numel() and not (kernels and on_device.quantize(job, out, by_definition)):
        if (table := _table_for(job)) is not None:
            _look_up(job, table, out)
        else:
            for chunk, context in job.contexts():
                _quantize_chunk(job.q.format, chunk.data(job.data), chunk.data(out), context)
    return layout.restore(out)


def by_definition(job: Job) -> Tensor:
    """Quantize by torch alone, which kernels have to agree with."""
    return forward(job, kernels=False)


def _quantize_chunk(fmt: Format, x: Tensor, out: Tensor, context: CastContext) -> None:
    if not _shortcut(fmt, x, out, context):
        parts = fmt.split(widen(x), context)
        out.copy_(combine(parts.elements, parts.scale, out.dtype, context))


def _shortcut(fmt: Format, x: Tensor, out: Tensor, context: CastContext) -> bool:
    """Write the quantized chunk to `out` in a faster way; False where that is not exact."""
    if fmt.kind == "element":
        return fast_element.shortcut(fmt, x, out, context)
    if isinstance(fmt, MxFormat):
        return fast_mx.shortcut(fmt, x, out, context)
    return isinstance(fmt, Nvfp4Format) and fast_nvfp4.shortcut(fmt, x, out, context)


def _table_for(job: Job) -> Tensor | None:
    """Return the result for each number of a 16-bit dtype, where one scale serves all."""
    q, x, fmt = job.q, job.x, job.q.format
    if x.dtype.itemsize != 2 or job.fixed or fmt.kind == "block":
        return None
    if job.scale is not None:
        pays = job.scale.numel() == 1 and x.numel() >= _SCALED_TABLE_PAYS_FROM
        return _tabulate(job, job.scale) if pays else None
    if x.numel() < _TABLE_PAYS_FROM:
        return None
    key = (fmt, q.rounding, q.saturate, q.narrow, x.dtype, job.dtype, x.device)
    return _tables.get(key, lambda: _tabulate(job, None))


def _tabulate(job: Job, scale: Tensor | None) -> Tensor:
    q, device = job.q, job.x.device
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    table = torch.empty(2**16, 1, 1, 1, dtype=job.dtype, device=device)
    x = every.view(job.x.dtype).view(-1, 1, 1, 1)
    context = CastContext(q, DOUBLE, False, scale, zero_point=job.zero_point)
    _quantize_chunk(q.format, x, table, context)
    return table.view(-1)


def _look_up(job: Job, table: Tensor, out: Tensor) -> None:
    source, target = job.data.reshape(-1).view(torch.int16), out.view(-1)
    step = 2**17 * min(torch.get_num_threads(), 16) if out.device.type == "cpu" else 2**26
    for start in range(0, len(target), step):
        piece = source[start : start + step]
        index = buffer("codes", piece.shape, torch.int32, piece.device).copy_(piece).add_(2**15)
        torch.index_select(table, 0, index, out=target[start : start + step])


class StraightThrough(torch.autograd.Function):
    """A quantization with the gradient of the identity, zero where x saturated unless passed."""

    @staticmethod
    def forward(x: Tensor, q: QuantizerSettings) -> Tensor:
        return forward(Job(x, q))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, QuantizerSettings], output: Tensor) -> None:
        del output
        x, q = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(inside_range(x, q) if q.saturated_grad == "zero" else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype)
        return (grad if inside is None else grad.masked_fill(~inside, 0.0)), None


def inside_range(x: Tensor, q: QuantizerSettings) -> Tensor:
    """Find where x does not saturate; NaN never does."""
    job = Job(x, q, counting=True)
    layout = job.layout
    inside = layout.empty(torch.bool, x.device)
    for chunk, _, _, parts in split(job):
        chunk.data(inside).copy_(~saturated(parts, q))
    return layout.restore(inside)
