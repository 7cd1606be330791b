"""Defects of quantizers and modules that only some shapes, tensors, sites or calls meet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from qgate.formats import quantizer
from qgate.modes.simulated import casts, products
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, llama, mamba
from tests.campaigns.mutants.planted import ATTENTION, MIXER

Wrong = Callable[[Any, Tensor, Any], Tensor]


def _truncated(plain: Any, x: Tensor, q: Any) -> Tensor:
    other = copy.copy(q)
    other.rounding = "zero"
    return plain(x, other)


def _doubled(plain: Any, x: Tensor, q: Any) -> Tensor:
    return 2 * plain(x, q)


def _plain(_plain: Any, x: Tensor, _q: Any) -> Tensor:
    return x.clone()


def _when(test: Callable[[Tensor, Any], bool], wrong: Wrong) -> Sow:
    """Quantizers are wrong for some tensors only."""

    def wrapped(plain: Any) -> Any:
        return lambda x, q: wrong(plain, x, q) if test(x, q) else plain(x, q)

    return lambda bed: bed.wrap(quantizer, "quantize_tensor", wrapped)


def _in(part: Any, wrong: Wrong) -> Sow:
    """Quantizers are wrong in a part of some tensors."""

    def change(plain: Any, x: Tensor, q: Any) -> Tensor:
        y = plain(x, q)
        y[part] = wrong(plain, x, q)[part]
        return y

    return _when(lambda x, _: x.dim() == 3, change)


def _of_flow(test: Callable[[Tensor], bool]) -> Callable[[Tensor, Any], bool]:
    return lambda x, _: x.dim() == 3 and test(x)


def _zeros_to_one(plain: Any, x: Tensor, q: Any) -> Tensor:
    """A block of zeros gets the smallest number instead of zeros."""
    y = plain(x, q)
    return y.where(x.abs().amax(-1, keepdim=True) > 0, 2.0**-126)


def _nan_to_zero(plain: Any, x: Tensor, q: Any) -> Tensor:
    return plain(x, q).nan_to_num(0.0)


def _neighbors_swapped(y: Tensor) -> Tensor:
    return y.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _nibbles(plain: Any, x: Tensor, q: Any) -> Tensor:
    return _neighbors_swapped(plain(x, q))


def _turned(plain: Any, x: Tensor, q: Any) -> Tensor:
    other = copy.copy(q)
    other.axis = 0
    return plain(x, other)


def _one_module(name: str, wrong: Callable[[Tensor], Tensor]) -> Sow:
    return lambda bed: bed.weight(name, wrong)


def _drifting(name: str) -> Sow:
    """What a module returns grows with every call."""

    def sow(bed: Bed) -> None:
        calls = [0]

        def drift(y: Tensor) -> Tensor:
            calls[0] += 1
            return y * (1 + 1e-6 * calls[0])

        bed.after(name, drift)

    return sow


def _wrong_when(name: str, test: Callable[[Tensor], bool]) -> Sow:
    """A module loses its last column for some inputs."""

    def sow(bed: Bed) -> None:
        module = bed.module(name)
        plain = module.forward

        def forward(x: Tensor, *rest: Any) -> Tensor:
            y = plain(x, *rest)
            if test(x):
                y = y.clone()
                y[..., -1] = 0
            return y

        module.forward = forward

    return sow


def _stale(name: str, factor: float) -> Sow:
    def sow(bed: Bed) -> None:
        bed.module(name).scale *= factor

    return sow


def _stale_output(name: str, factor: float) -> Sow:
    def sow(bed: Bed) -> None:
        bed.module(name).s_out *= factor

    return sow


def _one_row_truncates(plain: Any) -> Any:
    """The kernel for one token truncates."""

    def forward(self: Any, k: Tensor, rounding: Any = None) -> Tensor:
        if rounding == "away":
            return k.detach().trunc().clamp(-128, 127)
        return plain(self, k, rounding)

    return forward


def _weights_of_half_steps(plain: Any) -> Any:
    """Weights are scaled by amax / 127.5."""

    def quantized(self: Any, weight: Tensor) -> Any:
        _, scale = plain(self, weight)
        scale = scale * (127 / 127.5)
        return (weight.detach() / scale).round().clamp(-128, 127), scale

    return quantized


def _a_log_in_halves(bed: Bed) -> None:
    codes = bed.module("backbone.layers.3.mixer").A_codes
    plain = codes.dequantized
    codes.dequantized = lambda: plain().half().float() * 1.001


LLAMA_INPUT, MAMBA_INPUT = ATTENTION + "q_proj:input", MIXER + "in_proj:input"
UP, X_PROJ = "model.layers.2.mlp.up_proj", "backbone.layers.1.mixer.x_proj"
MUTANTS: tuple[Mutant, ...] = (
    # Quantizers that are wrong for some shapes, each in four and in eight bits.
    llama("odd-lengths-truncate", "mxfp4", _when(_of_flow(lambda x: x.shape[1] % 2 == 1), _truncated), LLAMA_INPUT, says="is truncated, not rounded to the nearest.*odd length"),
    llama("odd-lengths-double", "int8", _when(_of_flow(lambda x: x.shape[1] % 2 == 1), _doubled), LLAMA_INPUT, says="power of two.*odd length"),
    mamba("odd-lengths-truncate-in-mamba", "mxfp4", _when(_of_flow(lambda x: x.shape[1] % 2 == 1), _truncated), MAMBA_INPUT, says="truncated.*odd length"),
    llama("one-token-truncates", "mxfp4", _when(_of_flow(lambda x: x.shape[1] == 1), _truncated), LLAMA_INPUT, says="truncated.*only in tensors of one token"),
    llama("one-token-is-left-alone", "fp8_e4m3", _when(_of_flow(lambda x: x.shape[1] == 1), _plain), LLAMA_INPUT, says="is not quantized to fp8_e4m3.*of one token"),
    llama("batches-double", "mxfp4", _when(_of_flow(lambda x: len(x) > 1), _doubled), LLAMA_INPUT, says="power of two.*of several samples"),
    llama("batches-truncate", "mxfp8", _when(_of_flow(lambda x: len(x) > 1), _truncated), LLAMA_INPUT, says="truncated.*of several samples"),
    llama("single-samples-truncate", "mxfp8", _when(_of_flow(lambda x: len(x) == 1), _truncated), LLAMA_INPUT, says="truncated.*of one sample"),
    llama("second-sample-doubled", "mxfp4", _in(slice(1, 2), _doubled), LLAMA_INPUT, says=r"first at \[1, "),
    llama("second-sample-truncated", "int8", _in(slice(1, 2), _truncated), LLAMA_INPUT, says=r"first at \[1, "),
    llama("last-token-doubled", "mxfp4", _in((slice(None), slice(-1, None)), _doubled), LLAMA_INPUT, says=r"first at \[0, "),
    llama("last-token-left-alone", "int8", _in((slice(None), slice(-1, None)), _plain), LLAMA_INPUT, says=r"first at \[0, "),
    llama("large-tensors-truncate", "mxfp4", _when(lambda x, _: x.numel() > 50_000 and x.dim() == 3, _truncated), r"model\.layers\.0\.mlp\.down_proj:input", says="truncated.*above 49,920 elements"),
    llama("large-tensors-double", "int8", _when(lambda x, _: x.numel() > 50_000 and x.dim() == 3, _doubled), r"model\.layers\.0\.mlp\.down_proj:input", says="power of two.*above 49,920 elements"),
    mamba("last-partial-block-doubled", "mxfp4", _when(lambda x, q: x.dim() == 3 and x.shape[-1] % q.block != 0, _doubled), MIXER + "dt_proj:input", says="power of two"),
    # Values that no text has.
    llama("zeros-become-tiny", "mxfp4", _when(_of_flow(lambda x: not x.abs().amax(-1).all()), _zeros_to_one), LLAMA_INPUT, says="where 0 is right for 0"),
    llama("nan-becomes-zero", "mxfp8", _when(_of_flow(lambda x: not x.isfinite().all()), _nan_to_zero), LLAMA_INPUT, says="NaN of the definition became finite"),
    # Weights, one module, one axis, one order.
    llama("nibbles-of-weights-swapped", "mxfp4", _when(lambda x, _: x.dim() == 2, _nibbles), ATTENTION + "q_proj:weight", says="the order of nibbles"),
    llama("weights-along-the-other-axis", "mxfp8", _when(lambda x, _: x.dim() == 2, _turned), ATTENTION + "q_proj:weight", says="has its scales along axis 0, not along -1"),
    llama("one-weight-a-hundredth-off", "mxfp4", _one_module(UP, lambda w: w * 1.01), r"model\.layers\.2\.mlp\.up_proj:weight", says="1.01 times"),
    llama("one-weight-off-by-an-ulp", "int8", _one_module(UP, lambda w: w * (1 + 2.0**-22)), r"model\.layers\.2\.mlp\.up_proj:weight", says="values differ"),
    mamba("weights-of-other-steps", "2-1", lambda bed: bed.wrap(products.IntWeight, "_quantized", _weights_of_half_steps), MIXER + "in_proj:weight", says="127.5|0.99"),
    mamba("a-log-a-thousandth-off", "2-1", _a_log_in_halves, r"backbone\.layers\.3\.mixer\.A_log"),
    # The quantized mixer: static scales, ties, one token, the state.
    mamba("stale-scale-of-u", "2-1", _stale("backbone.layers.2.mixer.u_cast", 1.02), r"backbone\.layers\.2\.mixer\.x_proj:input", says="a scale that is 1.02 times"),
    mamba("stale-scale-of-an-output", "2-4", _stale_output(X_PROJ, 0.5), r"backbone\.layers\.1\.mixer\.x_proj:output", says="scale"),
    mamba("one-token-truncates-in-mamba", "2-1", lambda bed: bed.wrap(casts.Cast, "forward", _one_row_truncates), MIXER + "in_proj:output", says="of one token"),
    # Modules that do not agree with themselves.
    llama("calls-drift", "mxfp4", _drifting("model.layers.3.mlp.gate_proj"), r"model\.layers\.3\.mlp\.gate_proj:output", says="in call 2 of the same input"),
    mamba("calls-drift-in-mamba", "2-1", _drifting("backbone.layers.3.mixer.out_proj"), r"backbone\.layers\.3\.mixer\.out_proj:output", says="in call 2 of the same input"),
    llama("odd-lengths-lose-a-column", "mxfp4", _wrong_when(UP, lambda x: x.shape[1] == 17), r"model\.layers\.2\.mlp\.up_proj:output", says=r"column 255 of 256 \(the last one\) is zero"),
    mamba("strided-inputs-lose-a-column", "2-1", _wrong_when(X_PROJ, lambda x: not x.is_contiguous()), r"backbone\.layers\.1\.mixer\.x_proj:output", says="strided memory"),
    llama("strided-inputs-lose-a-column-in-w4", "w4", _wrong_when(UP, lambda x: not x.is_contiguous()), r"model\.layers\.2\.mlp\.up_proj:output", says="strided memory|transposed memory"),
    llama("larger-batches-lose-a-column", "int8", _wrong_when(UP, lambda x: len(x) > 3), r"model\.layers\.2\.mlp\.up_proj:output", says="in a larger batch"),
)  # fmt: skip
