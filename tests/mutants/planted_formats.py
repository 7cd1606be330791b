"""Defects of sweeps and of counting what a format loses: advice and shares, without any mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qgate import formats
from qgate.analysis import advice, sweeping
from qgate.capture import running
from qgate.formats import ElementFormat
from qgate.formats.engine import census
from qgate.formats.floats import FloatFormat
from qgate.pipeline import format_rows
from qgate.stats import value_counts
from tests.mutants.bed import Bed
from tests.mutants.mutant import Mutant, Sow, llama, mamba

# What a sweep does --------------------------------------------------------------------------------


def _advised(steps: int) -> Callable[[Any], Any]:
    """The advice is the level that many places below the best one."""

    def wrapped(plain: Any) -> Any:
        def advise(levels: Any, **options: Any) -> Any:
            made = plain(levels, **options)
            place = made["recommended"] + steps
            return {**made, "recommended": min(max(place, 0), len(levels) - 1)}

        return advise

    return lambda bed: bed.wrap(advice, "advise", wrapped)


def _read_at(steps: int) -> Callable[[Any], Any]:
    def wrapped(plain: Any) -> Any:
        def error_at(swept: Any, exponent: float) -> float:
            places = [level["exponent"] for level in swept.levels]
            place = min(places.index(exponent) + steps, len(places) - 1)
            return float(plain(swept, places[place]))

        return error_at

    return wrapped


def _without_overflow(plain: Any) -> Any:
    """What lies beyond the largest value stays what it is."""
    return lambda self, x: torch.where(x.abs() > self.max, x, plain(self, x))


def _truncating(plain: Any) -> Any:
    return lambda self, x: plain(self, x - torch.remainder(x, 2.0**-8))


def _captured(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Sow:
    """Other tensors under the names of the sites."""
    return lambda bed: bed.wrap(
        format_rows, "capture_sites", lambda plain: lambda *a: change(plain(*a))
    )


def _weights_for_inputs(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: found[name.replace(":input", ":weight")] for name in found}


def _counted(change: Callable[[Tensor], Tensor]) -> Sow:
    return lambda bed: bed.wrap(
        value_counts, "_count", lambda plain: lambda x, dtype: plain(change(x), dtype)
    )


def _swept(**options: Any) -> Sow:
    """Blocks of another size, or along another axis."""

    def wrapped(plain: Any) -> Any:
        return lambda x, fmt, **rest: plain(x, fmt, **rest, **options)

    return lambda bed: bed.wrap(format_rows, "sweep", wrapped)


def _signs_folded(plain: Any) -> Any:
    """Negative numbers are counted at the magnitude of their complement."""

    def count(x: Tensor, dtype: torch.dtype) -> Any:
        bits = x.to(dtype).view(torch.int16)
        return plain(torch.where(bits < 0, ~bits, bits).view(dtype), dtype)

    return count


# What is counted ----------------------------------------------------------------------------------


def _reported(change: Callable[[Any], dict[str, int]]) -> Sow:
    def wrapped(plain: Any) -> Any:
        def report(*args: Any, **options: Any) -> Any:
            found = plain(*args, **options)
            return dataclasses.replace(found, **change(found))

        return report

    return lambda bed: bed.wrap(formats, "report", wrapped)


def _element(**facts: float) -> Sow:
    """E4M3 with another largest or smallest number."""

    def sow(bed: Bed) -> None:
        for fact, value in facts.items():
            plain = getattr(FloatFormat, fact).fget

            def other(self: Any, plain: Any = plain, value: float = value) -> float:
                return value if self.name == "fp8_e4m3" else plain(self)

            bed.patch.setattr(FloatFormat, fact, property(other))

    return sow


def _forward_for_backward(bed: Bed) -> None:
    bed.patch.setattr(format_rows, "_gradients", format_rows._tensors)


def _backward_for_forward(bed: Bed) -> None:
    plain = format_rows._tensors

    def tensors(bench: Any, layer: str) -> dict[str, Tensor]:
        grads = format_rows._gradients(bench, layer)
        return {**plain(bench, layer), **{n: g for n, g in grads.items() if n.endswith(":weight")}}

    bed.patch.setattr(format_rows, "_tensors", tensors)


def _activations_as_gradients(bed: Bed) -> None:
    """Under the names of gradients come the tensors that they belong to."""
    plain = format_rows._gradients

    def gradients(bench: Any, layer: str) -> dict[str, Tensor]:
        record = bench._captures["fp32", "plain", "gradients"]
        return {name: torch.cat([t.flatten() for t in record.tensors[name]]) for name in plain(bench, layer)}

    bed.patch.setattr(format_rows, "_gradients", gradients)


def _saturated_if_equal(plain: Any) -> Any:
    """The largest number itself counts as clipped."""
    return lambda wide, parts, q: plain(wide * (1 + 1e-6), parts, q)


def _loss_halved(plain: Any) -> Any:
    return lambda *given: plain(*given) / 2


UP = r"model\.layers\.2\.mlp\.up_proj"
SWEEPS = (
    *(llama(f"advice{n}-{f}", f, _advised(n)) for n in (-1,1) for f in ("fp8_e4m3","hif8","mxfp8_e4m3","mxfp4_e2m1")),
    *(llama(f"level{n}-{f}", f, lambda bed,n=n: bed.wrap(format_rows,"_error_at",_read_at(n))) for n in (-1,1) for f in ("fp8_e4m3","hif8","mxfp8_e4m3","mxfp4_e2m1")),
    *(llama(f"nosat-{f}", f, lambda bed: bed.wrap(ElementFormat, "nearest", _without_overflow)) for f in ("fp8_e4m3","hif8","mxfp8_e4m3","mxfp4_e2m1")),
    *(llama(f"trunc-{f}", f, lambda bed: bed.wrap(ElementFormat, "nearest", _truncating)) for f in ("fp8_e4m3","hif8","mxfp8_e4m3","mxfp4_e2m1")),
    *(llama(f"weights-{f}", f, _captured(_weights_for_inputs)) for f in ("fp8_e4m3","hif8","mxfp8_e4m3","mxfp4_e2m1")),
    *(llama(f"half-{f}", f, _counted(lambda x: x[: len(x)//2])) for f in ("fp8_e4m3","hif8")),
    *(llama(f"abs-{f}", f, lambda bed: bed.wrap(value_counts, "_count", _signs_folded)) for f in ("fp8_e4m3","hif8")),
    *(llama(f"block{n}-{f}", f, _swept(block=n)) for n in (16,64) for f in ("mxfp8_e4m3","mxfp4_e2m1")),
    *(llama(f"axis0-{f}", f, _swept(axis=0)) for f in ("mxfp8_e4m3","mxfp4_e2m1")),
)
F=("fp8_e4m3", "hif8", "mxfp8_e4m3", "mxfp4_e2m1")
COUNTS = (
    *(llama(f"satuncounted-{f}", f, _reported(lambda e: {"saturated": 0})) for f in F),
    *(llama(f"flushed-as-normal-{f}", f, _reported(lambda e: {"flushed": 0})) for f in F),
    *(llama(f"subn-flushed-{f}", f, _reported(lambda e: {"flushed": e.flushed+e.subnormal})) for f in F),
    *(llama(f"underflow-for-flushed-{f}", f, _reported(lambda e: {"flushed": e.underflow})) for f in F),
    *(llama(f"total-half-{f}", f, _reported(lambda e: {"elements": e.elements//2})) for f in F),
    *(llama(f"total-double-{f}", f, _reported(lambda e: {"elements": e.elements*2})) for f in F),
    *(llama(f"fwd-for-bwd-{f}", f, _forward_for_backward) for f in F),
    *(llama(f"bwd-for-fwd-{f}", f, _backward_for_forward) for f in F),
    *(llama(f"act-as-grad-{f}", f, _activations_as_gradients) for f in F),
    *(llama(f"max240-{f}", f, _element(max=240.0)) for f in ("fp8_e4m3","mxfp8_e4m3")),
    *(llama(f"minsub-{f}", f, _element(min_exponent=-5)) for f in ("fp8_e4m3","mxfp8_e4m3")),
    *(llama(f"equal-{f}", f, lambda bed: bed.wrap(census,"saturated",_saturated_if_equal)) for f in F),
    *(llama(f"loss-halved-{f}", f, lambda bed: bed.wrap(running,"next_token_loss",_loss_halved)) for f in F),
)
MUTANTS = tuple([dataclasses.replace(m, suite="scaling") for m in SWEEPS]+[dataclasses.replace(m, suite="overflow") for m in COUNTS])
