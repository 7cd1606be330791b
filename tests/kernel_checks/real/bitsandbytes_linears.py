"""Linear layers and 4-bit weights of bitsandbytes on the CPU."""

from __future__ import annotations

import bitsandbytes
import torch
from bitsandbytes.functional import (
    dequantize_4bit,
    dequantize_blockwise,
    quantize_4bit,
    quantize_blockwise,
)
from torch import Tensor
from torch.nn.functional import linear

import qgate
from tests.kernel_checks.real.kernel import (
    Fault,
    Function,
    RealKernel,
    normal,
    term_lost,
    times,
    with_argument,
)  # fmt: skip
from tests.kernel_checks.real.torch_attention import int8_rows

WRONG_DIGITS = (
    "the CPU's `int8_mm_dequant` multiplies by 6.200124e-05, where 1/127² is 6.2000124e-05"
)
GROUP = 64
ROW_INT8 = qgate.Quantizer("int8", granularity="channel", axis=0)
NO_PARTS = {"relations": ["one", "odd", "permuted", "zero rows"]}


def int8_layer(x: Tensor, w: Tensor, training: bool = False) -> Tensor:
    """Quantize activations by row and weights by output channel, as LLM.int8() without outliers.

    A layer in training quantizes weights alone.
    """
    layer = bitsandbytes.nn.Linear8bitLt(w.shape[1], w.shape[0], bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(
        w.clone(), requires_grad=False, has_fp16_weights=False
    )
    with torch.no_grad():
        result: Tensor = layer.train(training).to("cpu")(x)
    return result


def int8_weights(x: Tensor, w: Tensor) -> Tensor:
    return int8_layer(x, w, training=True)


def nf4(w: Tensor, kind: str = "nf4", group: int = GROUP) -> Tensor:
    """Return what decoding of 4-bit codes gives: a table of 16 values times the block's maximum."""
    codes, state = quantize_4bit(w, quant_type=kind, blocksize=group)
    values: Tensor = dequantize_4bit(codes, state)
    return values


def layer_4bit(kind: str, change: Function | None = None, nested: bool = False) -> Function:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        layer = bitsandbytes.nn.Linear4bit(
            w.shape[1], w.shape[0], bias=False, quant_type=kind, compute_dtype=x.dtype
        )
        layer.weight = bitsandbytes.nn.Params4bit(
            w.clone(), requires_grad=False, quant_type=kind, compress_statistics=nested
        )
        layer = layer.to("cpu")
        if change is not None:
            change(layer.weight.quant_state)
        with torch.no_grad():
            result: Tensor = layer(x)
        return result

    return kernel


def decoded(kind: str, group: int = GROUP, change: Function | None = None) -> Function:
    """Decode the weights to their dtype, and multiply."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        values = nf4(w, kind, group)
        return linear(x, values if change is None else change(values))

    return kernel


def definition(kind: str) -> Function:
    """Return the format as its definition: the nearest of 16 values times the block's maximum."""
    table = TABLES[kind]

    def quantized(w: Tensor) -> Tensor:
        blocks = w.float().reshape(-1, GROUP)
        largest = blocks.abs().amax(-1, keepdim=True)
        scaled = blocks / torch.where(largest == 0, torch.ones_like(largest), largest)
        nearest = (scaled[..., None] - table).abs().argmin(-1)
        return (table[nearest] * largest).reshape(w.shape)

    return quantized


def fp4_codes(w: Tensor) -> Tensor:
    """Return the package's values in float32: where a value is halfway, either code occurs."""
    return nf4(w.float(), "fp4")


def blockwise(x: Tensor, w: Tensor) -> Tensor:
    codes, state = quantize_blockwise(w, blocksize=256)
    return linear(x, dequantize_blockwise(codes, state).to(x.dtype))


def _one_scale(state: object) -> None:
    state.absmax[5] *= 1.02  # type: ignore[attr-defined]


def _scales_moved(state: object) -> None:
    state.absmax = state.absmax.roll(1)  # type: ignore[attr-defined]


# NF4 is that of the QLoRA paper.
TABLES = {
    "nf4": torch.tensor([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ]),
}  # fmt: skip
X, W = normal(111, (48, 256), (128, 256), scales=(1, 1 / 16))
HX, HW, FX, FW = X.half(), W.half(), X.float(), W.float()
NF4 = definition("nf4")

KERNELS = [
    RealKernel("Linear8bitLt, fp32", "bitsandbytes", int8_layer, (HX.float(), HW.float()), linear, {0: ROW_INT8, 1: ROW_INT8}, NO_PARTS, bug=WRONG_DIGITS, words=r"1\.0000(18|2)\d* times"),
    RealKernel("Linear8bitLt, fp16", "bitsandbytes", int8_layer, (HX, HW), linear, {0: ROW_INT8, 1: ROW_INT8}, NO_PARTS, bug=WRONG_DIGITS, words=r"1\.0000(18|2)\d* times"),
    RealKernel("Linear8bitLt, bf16", "bitsandbytes", int8_layer, (X, W), linear, {0: ROW_INT8, 1: ROW_INT8}, NO_PARTS, bug=WRONG_DIGITS, words=r"1\.0000(18|2)\d* times"),
    RealKernel("Linear8bitLt in training, fp16", "bitsandbytes", int8_weights, (HX, HW), linear, {1: ROW_INT8}, NO_PARTS, faults=(
        times(int8_weights, 1.002),
        term_lost(int8_weights, 0, 40),
        with_argument("weights quantized to e4m3 first", int8_weights, 1, r"argument 1|twice", lambda w: qgate.quantize(w, "fp8_e4m3")),
    )),
    RealKernel("Linear8bitLt in training, bf16", "bitsandbytes", int8_weights, (X, W), linear, {1: ROW_INT8}, NO_PARTS),
    RealKernel("Linear4bit, NF4, bf16", "bitsandbytes", layer_4bit("nf4"), (X, W), linear, {1: NF4}, NO_PARTS, faults=(
        Fault("FP4 in the place of NF4", layer_4bit("fp4"), r"argument 1"),
        Fault("one of 512 scales 2 % off", layer_4bit("nf4", _one_scale)),
        Fault("scales quantized, too", layer_4bit("nf4", nested=True), r"argument 1.*scale"),
        Fault("scales of the next block", layer_4bit("nf4", _scales_moved), r"argument 1"),
        with_argument("activations in int8", layer_4bit("nf4"), 0, r"argument 0.*(int8|quantized)", int8_rows),
    )),
    RealKernel("Linear4bit, FP4, fp16", "bitsandbytes", layer_4bit("fp4"), (HX, HW), linear, {1: fp4_codes}, NO_PARTS),
    RealKernel("NF4 decoded to bf16", "bitsandbytes", decoded("nf4"), (X, W), linear, {1: NF4}, NO_PARTS, faults=(
        Fault("blocks of 128", decoded("nf4", 128), r"argument 1"),
        Fault("last row of weights zero", decoded("nf4", change=lambda w: w.index_fill(0, torch.tensor([len(w) - 1]), 0)), r"127|zero"),
    )),
    RealKernel("NF4 decoded, fp32", "bitsandbytes", decoded("nf4"), (FX, FW), linear, {1: NF4}, NO_PARTS),
]  # fmt: skip
