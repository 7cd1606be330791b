"""The kernel that quantizes a tensor on its device, and the proof that it gives torch's bits."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qgate.formats._element import ElementFormat
from qgate.formats._literals import E2M0, E2M1, E4M3
from qgate.formats._scratch import tracing
from qgate.formats._work import single
from qgate.formats.choosing import ChoosingFormat
from qgate.formats.engine.checking import check
from qgate.formats.engine.job import Job, Layout, layout_of
from qgate.formats.engine.scales import version_of
from qgate.formats.floats import FloatFormat
from qgate.formats.hif4 import Hif4Format
from qgate.formats.hif8 import HiF8Format
from qgate.formats.integers import IntFormat
from qgate.formats.mx import MxFormat
from qgate.formats.nvfp4 import nvfp4_format
from qgate.formats.settings import QuantizerSettings
from qgate.kernels import cases, proving
from qgate.kernels.casts import (
    FITS,
    LONGEST,
    BlockCast,
    ChoosingCast,
    ElementCast,
    Hif4Cast,
    MxCast,
    Nvfp4Cast,
)
from qgate.kernels.shapes import Grid, MemoryLayout, kind_of

if TYPE_CHECKING:
    from qgate.kernels.casts import Run

Definition = Callable[[Job], Tensor]

SMALL = 2**16
"""Elements below which torch alone is used for the first `_PATIENCE` calls of a kind: it takes 0.3
to 5 ms for each on an H200, and compiling and proving a kernel takes one or two seconds."""
_PATIENCE = 256
_PLANS = 256
_plans: WeakKeyDictionary[QuantizerSettings, dict[Hashable, KernelPlan]] = WeakKeyDictionary()
_waiting: dict[Hashable, int] = {}


def quantize(x: Tensor, q: QuantizerSettings, define: Definition) -> Tensor | None:
    """Quantize a tensor by the kernel of its device; None where there is none or torch is quicker.

    What it decides for a shape it keeps, so that later calls only launch.
    """
    if type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_dynamo_compiling():
        return None
    if x.is_nested or x.layout != torch.strided or not proving.serves(x.device) or tracing():
        return None
    plans = _plans.get(q)
    if plans is None:
        plans = _plans.setdefault(q, {})
    key = (x.shape, x.dtype, x.device)
    plan = plans.get(key)
    if plan is None or plan.proofs is not proving.verdicts():
        check(x, q)
        if len(plans) >= _PLANS:
            plans.clear()
        plan = plans[key] = KernelPlan(x, q)
    return plan.run(x, define)


class KernelPlan:
    """Decisions of one quantizer for tensors of one shape, dtype and device."""

    def __init__(self, x: Tensor, q: QuantizerSettings) -> None:
        self.q, self.proofs = weakref.proxy(q), proving.verdicts()
        self.layout = layout_of(x, q)
        self.dtype: torch.dtype = q.dtype or x.dtype
        self.cast = cast_for(x, q, self.layout) if x.numel() else None
        self.proved = False
        self.arranged = self.layout.moved is None
        self.run_cast: Run | None = None
        self._scales: tuple[Any, int, Tensor] | None = None

    def run(self, x: Tensor, define: Definition) -> Tensor | None:
        cast = self.cast
        if cast is None or not (self.proved or self._prove(x, define)):
            return None
        if x.is_neg():
            x = x.resolve_neg()
        scales = (
            self._given(x)
            if isinstance(cast, ElementCast) and cast.scaled and not cast.own
            else None
        )
        if self.run_cast is None:
            self.run_cast = cast.prepare(memory_of(self.layout), x.dtype, self.dtype)
        if self.arranged:
            out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
            self.run_cast(x if x.is_contiguous() else x.contiguous(), out, scales)
            return out
        data = self.layout.arrange(x.detach()).contiguous()
        out = torch.empty(data.shape, dtype=self.dtype, device=x.device)
        self.run_cast(data, out, scales)
        return self.layout.restore(out)

    def _prove(self, x: Tensor, define: Definition) -> bool:
        """Prove the kernel before its first use; false for small tensors that are not many."""
        cast, q = self.cast, self.q
        assert cast is not None
        memory = memory_of(self.layout)
        ties = cast.ties(memory, x.dtype) if isinstance(cast, ElementCast) else 0
        way = (cast, ties, _way(x, self.dtype, memory, q))
        if not proving.is_known(way, x.device):
            if x.numel() < SMALL:
                _waiting[way] = _waiting.get(way, 0) + 1
                if _waiting[way] < _PATIENCE:
                    return False
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
        work = f"{q.format.name} of {str(x.dtype).removeprefix('torch.')} tensors"
        job = ProofTemplate(x.dtype, self.dtype, x.device, memory, q)
        self.proved = proving.prove_once(way, x.device, work, lambda: _wrong(cast, job, define))
        if not self.proved:
            self.cast = None
        return self.proved

    def _given(self, x: Tensor) -> Tensor:
        """Return the scales of a call in float32: given ones are checked once, until they change.

        Those in float32 on the device are used where they are, so that a graph sees later changes.
        """
        scale = self.q.scale
        if scale is None:
            scale_made = Job(x, self.q).scale
            assert scale_made is not None
            return scale_made.to(torch.float32).contiguous()
        version = version_of(scale)
        if self._scales is not None and self._scales[0] is scale and self._scales[1] == version:
            return self._scales[2]
        check(x, self.q)
        job = Job(x, self.q)
        assert job.scale is not None
        if isinstance(scale, Tensor) and scale.dtype == torch.float32 and scale.device == x.device:
            used = job.per_group("scale", scale.detach()).contiguous()
        else:
            used = job.scale.to(torch.float32).contiguous()
        self._scales = (scale, version, used) if version is not None else None
        return used


class ProofTemplate(NamedTuple):
    """Properties that the tensors of a proof have in common with the user's."""

    dtype: torch.dtype
    out: torch.dtype
    device: torch.device
    memory: MemoryLayout
    q: QuantizerSettings


def _way(x: Tensor, out: torch.dtype, memory: MemoryLayout, q: QuantizerSettings) -> Hashable:
    """Return what a proof holds for, beside the cast."""
    one = memory.groups == 1
    fits = memory.length <= FITS, memory.short
    return (x.dtype, out, memory.kind, one and (q.granularity, fits), None if one else memory.block)


def cast_for(x: Tensor, q: QuantizerSettings, layout: Layout) -> BlockCast | ElementCast | None:
    """Return the kernel for this tensor, or None."""
    fmt = q.format
    if kind_of(x.dtype) is None or kind_of(q.dtype or x.dtype) is None:
        return None
    if layout.is_filled or q.rounding == "stochastic":
        return None
    saturates = q.inf == "saturate"
    if fmt.kind == "element":
        if (grid := _grid(fmt, q)) is None or q.zero_point is not None:
            return None
        scaled = q.granularity is not None
        own = scaled and q.scale is None and not grid.tapered and grid.is_single
        cast = ElementCast(grid, scaled, own, own and saturates)
        return cast if cast.takes(memory_of(layout)) else None
    if q.block > LONGEST:
        return None
    if isinstance(fmt, MxFormat) and (grid := _grid(fmt.element, q)) is not None:
        limit = 2 ** (q.scale_bits - 1) - 1
        fits = grid.fits_single and not grid.tapered
        return MxCast(grid, fmt.carry(q.scale_rule, 23), limit, saturates) if fits else None
    if (two_level := nvfp4_format(fmt)) is not None and fmt.element == E2M1:
        scale = two_level.scale_element
        if not isinstance(scale, FloatFormat) or scale.mantissa != 3:
            return None
        return Nvfp4Cast(q.rounding, saturates, two_level.bound, scale.max, scale.min_exponent)
    if isinstance(fmt, ChoosingFormat):
        is_usual = not fmt.by_rows and fmt.scale_element == E4M3 and q.block == fmt.default_block
        return _choosing_cast(fmt, saturates) if is_usual and q.rounding == "even" else None
    return Hif4Cast(q.rounding, saturates) if isinstance(fmt, Hif4Format) else None


def _choosing_cast(fmt: ChoosingFormat, saturates: bool) -> ChoosingCast | None:
    first, second = fmt.grids
    grids = [
        (grid.element.mantissa_bits, grid.element.min_exponent)
        if isinstance(grid.element, FloatFormat) and grid.element.exponent_bits > 1
        else (-1, 0)
        for grid in fmt.grids
    ]
    if any(
        bits == 0 and grid.element != E2M0 for (bits, _), grid in zip(grids, fmt.grids, strict=True)
    ):
        return None  # ties go to even codes, not to even multiples of a step
    return ChoosingCast(
        "even", saturates, fmt.bound, 448.0, -6, (grids[0], grids[1]),
        (second.largest, second.factor, single(second.unit), single(1 / second.unit),
         second.element.max),
        first.largest, not isinstance(second.element, FloatFormat), fmt.error == "mse",
        fmt.second_wins,
    )  # fmt: skip


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


def memory_of(layout: Layout) -> MemoryLayout:
    return MemoryLayout(layout.outer, layout.length, layout.inner, layout.block)


def run(cast: BlockCast | ElementCast, job: Job, out: Tensor) -> None:
    """Quantize a job's tensor to `out`, as [outer, length, inner], with its scales if need be."""
    x = job.data.contiguous()
    scale_given = isinstance(cast, ElementCast) and not cast.own and job.scale is not None
    scales = (
        job.scale.to(torch.float32).contiguous() if scale_given and job.scale is not None else None
    )
    cast.prepare(memory_of(job.layout), x.dtype, out.dtype)(x, out, scales)


def _wrong(cast: BlockCast | ElementCast, job: ProofTemplate, define: Definition) -> str:
    """Describe the first difference to the definition on the CPU, which every oracle checks."""
    for x, q in _trials(cast, job):
        expected = define(Job(x, q))
        q_there = copy.copy(q)
        if isinstance(q.scale, Tensor):
            q_there.scale = q.scale.to(job.device)
        device_job = Job(x.to(job.device), q_there)
        layout = device_job.layout
        out = layout.empty(device_job.dtype, job.device)
        run(cast, device_job, out)
        if problem := proving.first_difference(layout.restore(out), expected, x):
            return problem
    return ""


def _trials(
    cast: BlockCast | ElementCast, job: ProofTemplate
) -> Iterator[tuple[Tensor, QuantizerSettings]]:
    """Yield hard tensors with the job's memory layout and options."""
    memory, dtype = job.memory, job.dtype
    q = copy.copy(job.q)
    q.dtype = job.out
    if isinstance(cast, ElementCast) and q.granularity != "block":
        yield from _shared(cast, job, q)
        return
    q.axis = 1
    q.scale = None
    yield cases.arrange(cases.numbers(dtype), memory.block, memory.kind), q
    for exponent in (0, -12, 12, -100, 100, -126):
        yield cases.arrange(cases.bell_curve(dtype, exponent), memory.block, memory.kind), q


def _shared(
    cast: ElementCast, job: ProofTemplate, q: QuantizerSettings
) -> Iterator[tuple[Tensor, QuantizerSettings]]:
    """Yield tensors with one scale in all, or one per channel, for few compilations."""
    every = cases.numbers(job.dtype)
    if not cast.scaled:
        yield every, q
        return
    scale_made, scale_given = copy.copy(q), copy.copy(q)
    scale_made.scale = None
    if job.q.scale is None:
        yield _by_channel(every[every.isfinite()], job, scale_made), scale_made
        yield _by_channel(cases.patterns(job.dtype), job, scale_made), scale_made
        for exponent in (0, -12, 12, -100, 100):
            yield _by_channel(cases.bell_curve(job.dtype, exponent), job, scale_made), scale_made
    if cast.own:
        return
    for scale in (1.0, 1 / 3, 2.0**-130, 3e38):
        scale_given = copy.copy(scale_given)
        x = _by_channel(cases.patterns(job.dtype), job, scale_given)
        scale_given.scale = scale
        if q.granularity == "channel":
            channels = x.shape[scale_given.axis_of(2)]
            steps = torch.arange(channels, dtype=torch.float32, device="cpu")
            scale_given.scale = (1 + steps / channels) * (scale / 2)
        yield x, scale_given


def _by_channel(x: Tensor, job: ProofTemplate, q: QuantizerSettings) -> Tensor:
    """Arrange x with channels as in the job, first or last, and set the axis of `q`.

    Rows are as long as the job's, or longer than what fits a program.
    """
    length = min(job.memory.length, 3 * FITS + 16)
    if q.granularity != "channel":
        return x if job.memory.length > FITS else x[:: max(len(x) // length, 1)][:length]
    first = job.memory.inner == 1
    q.axis = 0 if first else 1
    if not first:
        return x[: len(x) // 24 * 24].view(-1, 24)
    rows = max(len(x) // (16 * length) * 16, 1)
    return x.repeat(-(-rows * length // len(x)))[: rows * length].view(rows, length)
