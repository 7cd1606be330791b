"""The kernel that quantizes a tensor on its device, and the proof that it gives torch's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qgate.formats._element import ElementFormat
from qgate.formats._literals import E2M1, E4M3
from qgate.formats._scratch import tracing
from qgate.formats.engine.job import Job
from qgate.formats.floats import FloatFormat
from qgate.formats.hif4 import Hif4Format
from qgate.formats.hif8 import HiF8Format
from qgate.formats.integers import IntFormat
from qgate.formats.mx import MxFormat
from qgate.formats.nvfp4 import Nvfp4Format
from qgate.formats.settings import QuantizerSettings
from qgate.kernels import cases, proving
from qgate.kernels.casts import LONGEST, BlockCast, ElementCast, Hif4Cast, MxCast, Nvfp4Cast
from qgate.kernels.shapes import Grid, MemoryLayout, kind_of

Definition = Callable[[Job], Tensor]


def quantize(job: Job, out: Tensor, define: Definition) -> bool:
    """Write the quantized tensor to `out`, as [outer, length, inner]; False without a kernel."""
    if not proving.serves(job.x.device) or tracing():
        return False
    cast = cast_for(job)
    if cast is None:
        return False
    memory = _memory(job)
    way = (job.x.dtype, job.dtype, memory.kind, job.layout.groups == 1, job.q.granularity)
    block = None if job.layout.groups == 1 else memory.block
    if not proving.prove_once(
        (cast, *way, block),
        job.x.device,
        f"{job.q.format.name} of {str(job.x.dtype).removeprefix('torch.')} tensors",
        lambda: _wrong(cast, job, define),
    ):
        return False
    _run(cast, job, out)
    return True


def cast_for(job: Job) -> BlockCast | ElementCast | None:
    """Return the kernel for this tensor, or None."""
    q, fmt = job.q, job.q.format
    if kind_of(job.x.dtype) is None or kind_of(job.dtype) is None or q.rounding == "stochastic":
        return None
    if q.tile is not None:
        return None
    saturates = q.inf == "saturate"
    if fmt.kind == "element":
        if (grid := _grid(fmt, q)) is None or job.zero_point is not None:
            return None
        cast = ElementCast(grid, job.scale is not None)
        return cast if cast.takes(_memory(job)) else None
    if q.block > LONGEST:
        return None
    if isinstance(fmt, MxFormat) and (grid := _grid(fmt.element, q)) is not None:
        limit = 2 ** (q.scale_bits - 1) - 1
        fits = grid.fits_single and not grid.tapered
        return MxCast(grid, fmt.carry(q.scale_rule, 23), limit, saturates) if fits else None
    if (
        isinstance(fmt, Nvfp4Format)
        and fmt.is_plain
        and (fmt.element, fmt.scale_element) == (E2M1, E4M3)
    ):
        return Nvfp4Cast(q.rounding, saturates)
    return Hif4Cast(q.rounding, saturates) if isinstance(fmt, Hif4Format) else None


def _grid(fmt: ElementFormat, q: QuantizerSettings) -> Grid | None:
    """Return the element's values in plain numbers; None for families without a kernel."""
    if q.rounding == "stochastic" or not fmt.signed:
        return None
    if isinstance(fmt, FloatFormat):
        if not fmt.subnormals or fmt.mantissa == 0:
            return None
        lowest = fmt.min_exponent
    elif isinstance(fmt, IntFormat):
        lowest = fmt.max_exponent
    elif isinstance(fmt, HiF8Format):
        lowest = -22
    else:
        return None
    low, high = fmt.bounds(narrow=q.narrow)
    return Grid(
        mantissa=fmt.mantissa,
        lowest=lowest,
        highest=fmt.max_exponent,
        largest=high,
        largest_negative=-low,
        signed_zero=fmt.negative_zero is not None,
        rounding=q.rounding,
        tapered=fmt.tapered,
        saturates=q.saturate,
        to_infinity=fmt.has_inf,
    )


def _memory(job: Job) -> MemoryLayout:
    layout = job.layout
    return MemoryLayout(layout.outer, layout.length, layout.inner, layout.block)


def _run(cast: BlockCast | ElementCast, job: Job, out: Tensor) -> None:
    x = job.data.contiguous()
    if isinstance(cast, ElementCast):
        cast.run(x, out, _memory(job), None if job.scale is None else job.scale.contiguous())
    else:
        cast.run(x, out, _memory(job))


def _wrong(cast: BlockCast | ElementCast, job: Job, define: Definition) -> str:
    """Describe the first difference to the definition on the CPU, which every oracle checks."""
    for x, q in _trials(job):
        expected = define(Job(x, q))
        device_job = Job(x.to(job.x.device), q)
        layout = device_job.layout
        out = layout.empty(device_job.dtype, job.x.device)
        _run(cast, device_job, out)
        if problem := proving.first_difference(layout.restore(out), expected, x):
            return problem
    return ""


def _trials(job: Job) -> Iterator[tuple[Tensor, QuantizerSettings]]:
    """Yield hard tensors with the job's memory layout and options."""
    memory, dtype = _memory(job), job.x.dtype
    q = copy.copy(job.q)
    q.dtype = job.dtype
    if q.granularity != "block":
        yield from _shared(job, q)
        return
    q.axis = 1
    q.scale = None
    yield cases.arrange(cases.numbers(dtype), memory.block, memory.kind), q
    for exponent in (0, -12, 12, -100, 100, -126):
        yield cases.arrange(cases.bell_curve(dtype, exponent), memory.block, memory.kind), q


def _shared(job: Job, q: QuantizerSettings) -> Iterator[tuple[Tensor, QuantizerSettings]]:
    """Yield tensors with one scale in all, or one per channel."""
    every = cases.numbers(job.x.dtype)
    if job.scale is None:
        yield every, q
        return
    finite = every[every.isfinite()]
    for exponent in (0, -12, 12, -100, 100):
        x = cases.bell_curve(job.x.dtype, exponent)
        yield _by_channel(x, job, q), q
    scaled = copy.copy(q)
    for scale in (1.0, 1 / 3, 2.0**-130, 3e38):
        scaled.scale = scale
        if q.granularity == "tensor":
            yield every, scaled
            yield finite, q
        else:
            x = _by_channel(every, job, q)
            scaled = copy.copy(q)
            channels = x.shape[q.axis_of(2)]
            steps = torch.arange(channels, dtype=torch.float32, device="cpu")
            scaled.scale = (1 + steps / channels) * (scale / 2)
            yield x, scaled


def _by_channel(x: Tensor, job: Job, q: QuantizerSettings) -> Tensor:
    """Reshape x so that its channels come first or last, as in the job; set the axis of `q`."""
    if q.granularity == "tensor":
        return x
    first = job.layout.inner == 1
    q.axis = 0 if first else 1
    rows = len(x) // 24
    return x[: rows * 24].view(24, rows) if first else x[: rows * 24].view(rows, 24)
