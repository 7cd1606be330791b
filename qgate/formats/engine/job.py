"""One tensor and one quantizer: checked, laid out in groups, its scales found.

This is the first pass over a tensor; the second goes through `Job.calls`, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats._element import ElementFormat
from qgate.formats._literals import Format
from qgate.formats.engine.layout import Chunk, layout_of
from qgate.formats.engine.parts import Call, Parts
from qgate.formats.engine.scale_choice import better_scale
from qgate.formats.engine.scratch import tracing
from qgate.formats.engine.work import (
    DOUBLE,
    FP32_MAX,
    INFINITY,
    INPUTS,
    NATIVE_INTEGER,
    magnitude_bits,
    to_single_grid,
    widen,
)
from qgate.formats.quantizer import Quantizer
from qgate.kernels import magnitudes


class Job:
    """One tensor, one quantizer: the layout and what is known of the whole tensor."""

    def __init__(self, x: Tensor, q: Quantizer, *, looking: bool = False) -> None:
        """`looking` is for counting only: random rounding gives way to the format's own, so that
        nothing is drawn from a generator."""
        check(x, q)
        self.q = q.deterministic() if looking else q
        q = self.q
        self.x = x.detach().resolve_neg()
        self.dtype: torch.dtype = q.dtype or x.dtype
        self.double = x.dtype == torch.float64
        self.layout = layout_of(x, q)
        self.data = self.layout.arrange(self.x)
        self.scale: Tensor | None = None
        if isinstance(q.format, ElementFormat) and q.granularity is not None:
            self.scale = self._scale()

    @cached_property
    def state(self) -> Tensor | None:
        """What a block format has to know of the whole tensor."""
        fmt, x = self.q.format, self.x
        if isinstance(fmt, ElementFormat) or not fmt.needs_amax or not x.numel():
            return None
        finite = x.device.type != "cpu"  # asking first would wait for the device
        bits = self._amax_bits(finite=finite).amax()
        if not finite and bits.item() >= INFINITY[x.dtype]:
            bits = self._amax_bits(finite=True).amax()
        return fmt.prepare(widen(bits.reshape(()).view(x.dtype)))

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
        if rows.numel() == 1 and not finite and not tracing():
            largest = magnitudes.largest(self.data)
            if largest is not None:
                return largest.to(rows.dtype).view(rows.shape)
        for chunk in self.chunks(parts_of_groups=True):
            found = magnitude_bits(chunk.data(self.data))
            if finite:
                found.masked_fill_(found >= INFINITY[self.x.dtype], 0)
            room = chunk.group(rows)
            torch.maximum(room, found.amax(2, keepdim=True), out=room)
        return rows

    def _scale(self) -> Tensor:
        """The scale of each group as float64 [outer, groups, 1, inner]; NaN spoils its group."""
        q, fmt = self.q, element_of(self.q.format)
        if q.scale is not None:
            return given_scale(q, self)
        bits = self._amax_bits()
        infinity = INFINITY[self.x.dtype]
        spoilt = bits > infinity if q.inf == "saturate" else bits >= infinity
        amax = widen(bits.view(self.x.dtype))
        largest = torch.finfo(torch.float64).max if self.double else FP32_MAX
        # Divided by a tensor: torch multiplies by the reciprocal of a number on some devices.
        scale = amax.clamp(max=largest) / amax.new_tensor(fmt.max)
        if not self.double:
            scale = to_single_grid(scale)
        scale = scale.clamp_(min=2.0**-1022 if self.double else 2.0**-149)
        scale = scale.masked_fill_(bits == 0, 1.0)
        scale = scale.masked_fill_(spoilt, float("nan"))
        return better_scale(self, scale, bits) if fmt.tapered else scale


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
        if device != x.device and not on_cpu_scalar:
            raise QgateError(f"the {name} is on {device} and x on {x.device}; put them together.")


def given_scale(q: Quantizer, job: Job) -> Tensor:
    """The user's scale as float64 [outer, groups, 1, inner], on the grid of the scale's dtype."""
    layout = job.layout
    scale = q.scale
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=torch.float64, device=job.x.device)
    scale = scale.to(job.x.device)
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


def element_of(fmt: Format) -> ElementFormat:
    return fmt if isinstance(fmt, ElementFormat) else fmt.element


def split(job: Job) -> Iterator[tuple[Chunk, Call, Tensor, Parts]]:
    """Each chunk as float64 with its elements and scale: what `report` and gradients look at."""
    for chunk, call in job.calls():
        wide = widen(chunk.data(job.data))
        yield chunk, call, wide, job.q.format.split(wide, call)


def saturated(parts: Parts, q: Quantizer) -> Tensor:
    """Find where x, rounded without a bound, is beyond the largest value at its scale.

    Inf is; NaN is not, nor is an element of a group whose scale is NaN or zero.
    """
    element = element_of(q.format)
    low, high = element.bounds(narrow=q.narrow)
    upper = parts.ratios >= element.saturates_from(q.rounding, high)
    lower = parts.ratios <= -element.saturates_from(q.rounding, -low)
    return (upper | lower) & (parts.scale > 0)
