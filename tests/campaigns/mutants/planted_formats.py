"""Defects of sweeps and of counting what a format loses: advice and shares, without any mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate import formats
from qgate.capture import running
from qgate.formats import ElementFormat
from qgate.formats._scratch import BoundedCache
from qgate.formats._work import DOUBLE
from qgate.formats.engine import fast_mx
from qgate.formats.floats import FloatFormat
from qgate.gate.measuring import format_rows
from qgate.stats import value_counts
from qgate.sweeps import _sums, advice
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, llama, mamba

# What a sweep does --------------------------------------------------------------------------------


def _advised(steps: int) -> Callable[[Any], Any]:
    """The advice is another exponent than the best one."""

    def wrapped(plain: Any) -> Any:
        def advise(levels: Any, **options: Any) -> Any:
            advised = plain(levels, **options)
            exponent = levels[advised["recommended"]]["exponent"] + steps
            exponents = [level["exponent"] for level in levels]
            index = exponents.index(exponent) if exponent in exponents else advised["recommended"]
            return {**advised, "recommended": index}

        return advise

    return lambda bed: bed.wrap(advice, "advise", wrapped)


def _read_at(steps: int) -> Callable[[Any], Any]:
    def wrapped(plain: Any) -> Any:
        def swept(*args: Any, **ends: float) -> tuple[float, dict[float, float]]:
            best, errors = plain(*args, **ends)
            exponents = list(errors)
            index = min(exponents.index(best) + steps, len(exponents) - 1)
            return best, {**errors, best: errors[exponents[index]]}

        return swept

    return wrapped


def _without_overflow(plain: Any) -> Any:
    """What lies beyond the largest value stays what it is."""
    return lambda fmt, rows: np.where(rows > fmt.max, rows, plain(fmt, rows))


def _truncating(_plain: Any) -> Any:
    return lambda self, x: self.cast(x, DOUBLE, rounding="zero")


def _captured(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Sow:
    """Other tensors under the names of the sites."""
    return lambda bed: bed.wrap(format_rows, "_tensors", lambda plain: lambda *a: change(plain(*a)))


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
            original = plain(*args, **options)
            return dataclasses.replace(original, **change(original))

        return report

    return lambda bed: bed.wrap(formats, "report", wrapped)


def _element(**facts: float) -> Sow:
    """E4M3 with another largest or smallest number."""

    def sow(bed: Bed) -> None:
        for fact, value in facts.items():
            descriptor = getattr(FloatFormat, fact)
            plain = descriptor.func if isinstance(descriptor, cached_property) else descriptor.fget

            def other(self: Any, plain: Any = plain, value: float = value) -> float:
                return value if self.name == "fp8_e4m3" else plain(self)

            bed.patch.setattr(FloatFormat, fact, property(other))
        bed.patch.setattr(fast_mx, "_constants", BoundedCache(64))

    return sow


def _forward_for_backward(bed: Bed) -> None:
    bed.patch.setattr(format_rows, "_gradients", format_rows._tensors)


def _gradients_for_weights(bed: Bed) -> None:
    plain = format_rows._tensors

    def tensors(bench: Any, layer: str) -> dict[str, Tensor]:
        grads = format_rows._gradients(bench, layer)
        return {**plain(bench, layer), **{n: g for n, g in grads.items() if n.endswith(":weight")}}

    bed.patch.setattr(format_rows, "_tensors", tensors)


def _activations_as_gradients(bed: Bed) -> None:
    """Under the names of gradients come the tensors that they belong to."""
    plain = format_rows._gradients

    def gradients(bench: Any, layer: str) -> dict[str, Tensor]:
        tensor_names = plain(bench, layer)
        record = bench._captures["fp32", "plain", "gradients"]
        return {
            name: torch.cat([t.flatten() for t in record.tensors[name]]) for name in tensor_names
        }

    bed.patch.setattr(format_rows, "_gradients", gradients)


def _loss_halved(plain: Any) -> Any:
    return lambda *given: plain(*given) / 2


ATTENTION = r"model\.layers\.0\.self_attn\."
FIRST = ATTENTION + "q_proj:"
_KEPT = (
    "a floating-point format loses nothing by one exponent more: of two scales that are as good, "
    "the accepted one stays recommended"
)

SWEEPS = (
    llama("error-read-a-level-too-low", "fp8_e4m3", lambda bed: bed.wrap(format_rows, "_sweep", _read_at(1)), FIRST + "input", says="relative_mse"),
    llama("error-read-an-offset-too-low", "mxfp4_e2m1", lambda bed: bed.wrap(format_rows, "_sweep", _read_at(1)), FIRST + "input", says="relative_mse"),
    llama("sweep-ignores-overflow", "fp8_e4m3", lambda bed: bed.wrap(_sums, "round_rows", _without_overflow), FIRST + "input", says="exponent -[0-9]+ instead of -3 .* the accepted one now costs"),
    llama("sweep-of-blocks-ignores-overflow", "mxfp4_e2m1", lambda bed: bed.wrap(_sums, "round_rows", _without_overflow), FIRST + "input", says="exponent -4 instead of 0 .* the accepted one now costs"),
    llama("sweep-truncates", "hif8", lambda bed: bed.wrap(ElementFormat, "nearest", _truncating), FIRST + "input", says="relative_mse"),
    llama("weights-swept-for-inputs", "hif8", _captured(_weights_for_inputs), FIRST + "input", says=r"exponent -5 instead of 1 at .*q_proj:input \(format hif8\): the accepted one now costs"),
    llama("half-of-the-elements-counted", "hif8", _counted(lambda x: x.flatten()[: x.numel() // 2]), r"model\.layers\.0\..*"),
    llama("negative-numbers-at-their-complement", "fp8_e4m3", lambda bed: bed.wrap(value_counts, "_count", _signs_folded), FIRST + "input", says="exponent 4 instead of -3"),
    llama("swept-in-blocks-of-16", "mxfp4_e2m1", _swept(block=16), FIRST + "input", says="relative_mse"),
    llama("swept-in-blocks-of-64", "mxfp4_e2m1", _swept(block=64), FIRST + "input", says="relative_mse"),
    llama("blocks-swept-along-the-tokens", "mxfp4_e2m1", _swept(axis=0), FIRST + "input", says="exponent 1 instead of 0"),
    llama("recommended-exponent-one-too-high", "fp8_e4m3", _advised(1), says="exponent", survives=_KEPT),
    llama("recommended-offset-one-too-low", "mxfp4_e2m1", _advised(-1), says="exponent"),
)  # fmt: skip
COUNTS = (
    llama("subnormals-counted-as-flushed", "hif8", _reported(lambda e: {"flushed": e.flushed + e.subnormal}), FIRST + "weight", says="flushed_share"),
    llama("underflow-counted-as-flushed", "mxfp8_e4m3", _reported(lambda e: {"flushed": e.underflow}), FIRST + "weight", says="flushed_share"),
    llama("share-of-half-the-elements", "mxfp4_e2m1", _reported(lambda e: {"zeros": 0, "nonzero": e.finite // 2}), FIRST + "input", says="2x accepted"),
    llama("tensors-reported-as-gradients", "fp8_e4m3", _forward_for_backward, FIRST + "input", says="flushed_share", first=FIRST + "weight"),
    llama("gradients-reported-as-weights", "fp8_e4m3", _gradients_for_weights, FIRST + "weight", says="flushed_share"),
    llama("e4m3-ends-at-240", "mxfp8_e4m3", _element(max=240.0), FIRST + "input", says="saturated_share"),
    llama("e4m3-of-another-bias", "fp8_e4m3", _element(min_exponent=-5), FIRST + "input", says="flushed_share"),
    llama("loss-halved", "fp8_e4m3", lambda bed: bed.wrap(running, "next_token_loss", _loss_halved), FIRST + "weight", says="flushed_share"),
    mamba("every-clipped-element-twice", "mxfp8_e4m3", _reported(lambda e: {"upper": 2 * e.upper, "lower": 2 * e.lower}), r"backbone\.layers\.0\.mixer\.in_proj:input", says="saturated_share"),
    llama("clipped-not-counted", "mxfp8_e4m3", _reported(lambda _: {"upper": 0, "lower": 0}), says="saturated_share"),
    llama("flushed-not-counted", "mxfp4_e2m1", _reported(lambda _: {"flushed": 0}), says="flushed_share"),
    llama("share-of-twice-the-elements", "mxfp4_e2m1", _reported(lambda e: {"zeros": 0, "nonzero": 2 * e.finite}), says="share"),
    llama("tensors-under-the-names-of-gradients", "fp8_e4m3", _activations_as_gradients, says="flushed_share"),
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = (
    *(dataclasses.replace(mutant, suite="scaling") for mutant in SWEEPS),
    *(dataclasses.replace(mutant, suite="overflow") for mutant in COUNTS),
)  # fmt: skip
