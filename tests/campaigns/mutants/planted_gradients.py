"""Defects of the backward pass: the model computes what it did, and learns something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qgate.capture.running import run
from qgate.formats import Quantizer, quantizer
from qgate.gate.measuring.bench import Bench
from qgate.models.mamba import scanning
from qgate.modes.simulated import casts, mixer
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, llama, mamba
from tests.campaigns.mutants.planted import altered

Change = Callable[[Tensor], Tensor]


def _arriving(name: str, change: Change) -> Sow:
    """Another gradient arrives at what a module returns."""

    def hooked(y: Tensor) -> Tensor:
        if y.requires_grad:
            y.register_hook(change)
        return y

    return lambda bed: bed.after(name, hooked)


def _reading(module: Any, change: Change) -> None:
    """What a linear layer reads as its quantized weight, with its graph."""
    plain = type(module)
    read = plain.weight.fget
    weight = property(lambda self: change(read(self)))
    module.__class__ = type(plain.__name__, (plain,), {"weight": weight})


def _of_weight(name: str, change: Change) -> Sow:
    """Another gradient arrives at a quantized weight."""

    def hooked(w: Tensor) -> Tensor:
        if w.requires_grad:
            w.register_hook(change)
        return w

    return lambda bed: _reading(bed.module(name), hooked)


def _no_kernel(name: str) -> Sow:
    return lambda bed: _reading(bed.module(name), lambda w: w.detach())


def _crossed(first: str, second: str) -> Sow:
    """The gradient of each weight goes to the other one."""

    def sow(bed: Bed) -> None:
        one, two = bed.module(first), bed.module(second)
        for module, other in ((one, two), (two, one)):
            far = other._parameters["weight"]
            _reading(module, lambda w, far=far: w.detach() + (far - far.detach()))  # type: ignore[misc]

    return sow


def _half_flushed(grad: Tensor) -> Tensor:
    """Without a loss scale, in float16, on a machine that has no subnormal numbers."""
    half = grad.half()
    return half.masked_fill(half.abs() < 2.0**-14, 0.0).to(grad.dtype)


def _clamped(bed: Bed) -> None:
    """What is beyond the largest value takes no gradient, though the modes say it does."""
    altered(lambda q, _: setattr(q, "saturated_grad", "zero"))(bed)


def _clamped_at_the_edge(bed: Bed) -> None:
    """The same, and the largest magnitude, which made the scale, counts as beyond."""
    _clamped(bed)

    def wrapped(plain: Any) -> Any:
        return lambda parts, q: plain(dataclasses.replace(parts, ratios=parts.ratios * 1.005), q)

    bed.wrap(quantizer, "saturated", wrapped)


def _twice_quantized(plain: Any) -> Any:
    """The gradient of a quantized tensor is quantized as well, on its way and once more."""
    first, second = Quantizer("fp8_e5m2"), Quantizer("fp8_e4m3", granularity="tensor")

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return plain(ctx, *(second(first(grad)) for grad in grads))

    return staticmethod(backward)


def _cut(plain: Any) -> Any:
    """The gradient of what a cast clips and that of all else change places."""
    return lambda x, value, kept=None: plain(x, value, None if kept is None else ~kept)


def _without_codes(plain: Any) -> Any:
    """A cast to codes without a straight-through estimator: rounding has no gradient."""

    def forward(self: Any, k: Tensor, rounding: Any = None) -> Tensor:
        return plain(self, k, rounding).detach()

    return forward


def _scan_forgets(plain: Any) -> Any:
    """The gradient of the quantized scan ends at token 64, as truncation through time does."""

    def forward(self: Any, **given: Any) -> Any:
        past = {n: torch.cat([given[n][:, :64].detach(), given[n][:, 64:]], 1) for n in ("u", "dt")}
        return plain(self, **{**given, **past})

    return forward


def _of_reference(plain: Any) -> Any:
    """FP32 is compared with itself."""
    return lambda self, model, *forced: plain(self, self.model.in_basis(model.basis), *forced)


def _last_sample_only(plain: Any) -> Any:
    """Gradients of weights are not added up over the samples."""

    def backward_run(self: Bench, model: Any, *forced: Any) -> Any:
        record = plain(self, model, *forced)
        if model is self.model or not forced:
            return record
        last = run(model, list(record.tensors), samples=self.model.inputs[1:2], gradients=True,
                   forced=self._forcing(model.basis, slice(1, 2)))  # fmt: skip
        weights = {n: g for n, g in last.gradients.items() if n.endswith(":weight")}
        return dataclasses.replace(record, gradients={**record.gradients, **weights})

    return backward_run


def _no_gradient_of(place: int) -> Callable[[Any], Any]:
    """The scan's own backward, that of FP32 too, leaves one of its inputs out."""

    def wrapped(plain: Any) -> Any:
        def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> Any:
            gradients = list(plain(ctx, dy, dstate))
            gradients[place] = torch.zeros_like(gradients[place])
            return tuple(gradients)

        return staticmethod(backward)

    return wrapped


def _in(name: str) -> str:
    return name.replace(".", r"\.")


DOWN = "model.layers.2.mlp.down_proj"
MUTANTS: tuple[Mutant, ...] = tuple(
    dataclasses.replace(mutant, suite="gradients")
    for mutant in (
        llama("gradient-halved", "int8", _arriving(DOWN, lambda g: g / 2), _in(DOWN) + ":weight", first=_in(DOWN) + ":weight .* the result is 0.5 times the expected"),
        llama("gradient-of-the-wrong-sign", "int8", _of_weight(DOWN, torch.neg), _in(DOWN) + ":weight", first=_in(DOWN) + ":weight .* has the opposite sign"),
        llama("weight-without-backward", "mxfp4", _no_kernel(DOWN), _in(DOWN) + ":weight"),
        llama("gradients-of-neighbors-swapped", "int8", _crossed("model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"), r"model\.layers\.2\.mlp\.up_proj:weight", says=r"model\.layers\.1\.mlp\.up_proj:weight"),
        llama("detached-in-a-block", "mxfp8", lambda bed: bed.after("model.layers.3.mlp", Tensor.detach), r"model\.layers\.3\.mlp\.down_proj:weight"),
        llama("float16-flushes-gradients", "mxfp8", _arriving("model.layers.3.mlp.up_proj", _half_flushed), r"model\.layers\.3\.mlp\.up_proj:weight"),
        llama("clipped-values-take-no-gradient", "mxfp8", _clamped, r"model\.layers\.4\..*"),
        llama("largest-value-takes-no-gradient", "int8", _clamped_at_the_edge, r"model\.layers\.4\..*"),
        llama("gradient-quantized-twice", "mxfp8", lambda bed: bed.wrap(quantizer.StraightThrough, "backward", _twice_quantized), r"model\.layers\.4\..*"),
        llama("last-sample-only", "int8", lambda bed: bed.wrap(Bench, "_backward_run", _last_sample_only), r"model\.layers\.4\.mlp\.down_proj:weight"),
        mamba("clipped-and-kept-values-swapped", "2-1", lambda bed: bed.wrap(casts, "straight_through", _cut), r"backbone\.layers\.4\..*"),
        mamba("cast-without-gradient", "2-1", lambda bed: bed.patch.setattr(type(bed.module("backbone.layers.2.mixer.u_cast")), "forward", _without_codes(type(bed.module("backbone.layers.2.mixer.u_cast")).forward)), r"backbone\.layers\.4\..*"),
        mamba("truncated-through-time", "2-1", lambda bed: bed.wrap(mixer.HalfScan, "forward", _scan_forgets), r"backbone\.layers\.4\..*"),
        llama("gradients-of-the-reference", "int8", lambda bed: bed.wrap(Bench, "_backward_run", _of_reference), says="relative_mse"),
        mamba("scan-without-gradient-of-c", "2-1", lambda bed: bed.wrap(scanning._Chunked, "backward", _no_gradient_of(4)), r"backbone\.layers\.\d\.mixer\.(x|dt)_proj:weight"),
    )
)  # fmt: skip
