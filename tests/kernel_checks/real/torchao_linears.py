"""Linear layers and casts of torchao: int8, int4, FP8, NVFP4 and MX."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerTensor,
    quantize_,
)
from torchao.quantization.quant_primitives import (
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
)

import qgate
from qgate.expected.derived import RELATIONS
from tests.kernel_checks.real.kernel import (
    Fault,
    Function,
    RealKernel,
    changed,
    normal,
    term_lost,
    times,
    with_argument,
)  # fmt: skip
from tests.kernel_checks.real.torch_attention import int8_rows
from tests.kernel_checks.right_kernels import torchao_int8

INT8 = qgate.Quantizer("int8", granularity="channel", axis=0)
E4M3 = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)
INT8_GROUPS, INT4_GROUPS = (
    qgate.Quantizer(fmt, granularity="block", block=32) for fmt in ("int8", "int4")
)
INT4 = qgate.Quantizer("int4", granularity="channel", axis=0)
ONE_E4M3 = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def layer(config: object) -> Function:
    """Return a linear layer whose weights torchao quantizes by a configuration."""

    def kernel(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        module = torch.nn.Linear(w.shape[1], w.shape[0], bias=b is not None, dtype=w.dtype)
        module.weight = torch.nn.Parameter(w.clone(), requires_grad=False)
        if b is not None:
            module.bias = torch.nn.Parameter(b.clone(), requires_grad=False)
        network = torch.nn.Sequential(module)
        quantize_(network, config)
        with torch.no_grad():
            result: Tensor = network(x)
        return result

    return kernel


def _wrong_weights(kernel: Function, change: Function) -> Function:
    """Quantize the weights, and change what was stored before the layer runs."""

    def faulty(x: Tensor, w: Tensor) -> Tensor:
        module = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
        module.weight = torch.nn.Parameter(w.clone(), requires_grad=False)
        network = torch.nn.Sequential(module)
        quantize_(network, kernel)
        change(network[0].weight)
        with torch.no_grad():
            result: Tensor = network(x)
        return result

    return faulty


def _one_scale(weight: Tensor) -> None:
    weight.scale.data[3:4] *= 1.02


def _scales_moved(weight: Tensor) -> None:
    weight.scale.data.copy_(weight.scale.data.roll(1, 0))


def _groups_moved(weight: Tensor) -> None:
    weight.scale.data.copy_(weight.scale.data.roll(1, -1))


def _codes_raised(weight: Tensor) -> None:
    weight.qdata.data.copy_(weight.qdata.data.clamp_max(126) + 1)


def _mx(x: Tensor, fmt: torch.dtype = torch.float8_e4m3fn, block: int = 32) -> Tensor:
    if not x.numel():
        return x.float()
    scale, codes = to_mx(x.contiguous(), fmt, block)
    return to_dtype(codes, scale, fmt, block, torch.float32)


def _fp8_rows_of_torchao(x: Tensor) -> Tensor:
    if not x.numel():
        return x.float()
    block = [1] * (x.dim() - 1) + [x.shape[-1]]
    scale = _choose_scale_float8(x.float(), block, torch.float8_e4m3fn)
    codes = _quantize_affine_float8(x.float(), scale, torch.float8_e4m3fn)
    return _dequantize_affine_float8(codes, scale, torch.float32)


X, W, B = normal(61, (48, 256), (128, 256), (128,))
W = W / 16
HX, HW = X.half(), W.half()
WEIGHTS = Int8WeightOnlyConfig()
int8_weights, dynamic = layer(WEIGHTS), layer(Int8DynamicActivationInt8WeightConfig())
fp8_weights = layer(Float8WeightOnlyConfig(granularity=PerTensor()))
int4_groups = layer(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
int8_groups = layer(IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(32)))
ZERO_ROWS = "a row of zeros becomes NaN (pytorch/ao#4713)"
NO_ZEROS = [relation for relation in RELATIONS if relation != "zero rows"]
SCALES = r"argument 1.*scale|scale.*argument 1"

KERNELS = [
    RealKernel("FP8 cast by row, fp32", "torchao", _fp8_rows_of_torchao, (X.float(),), lambda x: x, options={"output": E4M3}, bug=ZERO_ROWS, words=r"for zero rows.*NaN|NaN.*zero rows"),
    RealKernel("int8 weights, bf16", "torchao", int8_weights, (X, W), linear, {1: INT8}, faults=(
        Fault("one of 128 scales 2 % off", _wrong_weights(WEIGHTS, _one_scale), r"\b3\b"),
        Fault("scales of the next row", _wrong_weights(WEIGHTS, _scales_moved), SCALES),
        Fault("codes one too high", _wrong_weights(WEIGHTS, _codes_raised), r"zero point|code"),
        with_argument("activations in int8, too", int8_weights, 0, r"argument 0.*(int8|quantized)", int8_rows),
        term_lost(int8_weights, 0, 31), times(int8_weights, 1.002), times(int8_weights, 1.005),
        with_argument("weights in int4", int8_weights, 1, "int4", lambda w: qgate.quantize(w, INT4)),
        changed("last column zero", int8_weights, r"\b127\b.*zero", lambda y: y[..., -1:].zero_()),
    )),
    RealKernel("int8 weights, fp16", "torchao", int8_weights, (HX, HW), linear, {1: INT8}, faults=(
        Fault("one of 128 scales 2 % off", _wrong_weights(WEIGHTS, _one_scale), r"\b3\b"),
        times(int8_weights, 1.001),
    )),
    RealKernel("int8 weights with a bias, bf16", "torchao", int8_weights, (X, W, B), linear, {1: INT8}, faults=(
        Fault("bias left out", lambda x, w, _b: int8_weights(x, w), r"argument 2|bias"),
    )),
    RealKernel("int8 weights in groups of 32, bf16", "torchao", int8_groups, (X, W), linear, {1: INT8_GROUPS}, faults=(
        Fault("groups of 64", layer(IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(64))), r"\b64\b|blocks of|groups of"),
        Fault("scales of the next group", _wrong_weights(IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(32)), _groups_moved), SCALES),
    )),
    RealKernel("int8 activations and weights, bf16", "torchao", dynamic, (X, W), linear, {0: INT8, 1: INT8}, faults=(
        times(dynamic, 1.003),
        Fault("activations not quantized", int8_weights, r"argument 0"),
        with_argument("weights quantized twice, in fp8 first", dynamic, 1, r"argument 1|twice", lambda w: qgate.quantize(w, E4M3)),
    )),
    RealKernel("int8 activations and weights, fp16", "torchao", dynamic, (HX, HW), linear, {0: INT8, 1: INT8}, faults=(times(dynamic, 1.002),)),
    RealKernel("FP8 weights by tensor, bf16", "torchao", fp8_weights, (X, W), linear, {1: ONE_E4M3}, faults=(
        times(fp8_weights, 1.003),
        Fault("weights in e5m2", layer(Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2, granularity=PerTensor())), "e5m2"),
        Fault("scale by row", layer(Float8WeightOnlyConfig()), r"argument 1"),
    )),
    RealKernel("FP8 weights by row, bf16", "torchao", layer(Float8WeightOnlyConfig()), (X, W), linear, {1: E4M3}, {"relations": NO_ZEROS}, faults=(
        Fault("scales of the next row", _wrong_weights(Float8WeightOnlyConfig(), _scales_moved), SCALES),
    )),
    RealKernel("FP8 weights by row, some zero, bf16", "torchao", layer(Float8WeightOnlyConfig()), (X, W), linear, {1: E4M3}, {"relations": ["zero rows"]}, bug=ZERO_ROWS, words=r"for zero rows.*NaN"),
    RealKernel("int4 weights in groups of 32, bf16", "torchao", int4_groups, (X, W), linear, {1: INT4_GROUPS}, faults=(
        Fault("groups of 64", layer(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64))), r"\b64\b|blocks of|groups of"),
        term_lost(int4_groups, 0, 77),
    )),
    RealKernel("int4 weights by row, fp16", "torchao", layer(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0))), (HX, HW), linear, {1: INT4}),
    RealKernel("NVFP4 weights, bf16", "torchao", layer(NVFP4WeightOnlyConfig()), (X, W), linear, {1: "nvfp4"}, faults=(
        Fault("without the scale of the tensor", layer(NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False)), r"argument 1|scale"),
    )),
    RealKernel("MXFP8 cast", "torchao", _mx, (X,), lambda x: x, options={"output": "mxfp8"}, faults=(
        Fault("e5m2", lambda x: _mx(x, torch.float8_e5m2), "e5m2"),
        times(_mx, 1.001, r"times"),
    )),
    RealKernel("MXFP8 product, fp32", "torchao", lambda x, w: linear(_mx(x), _mx(w)), (X.float(), W.float()), linear, {0: "mxfp8", 1: "mxfp8"}, faults=(
        Fault("weights in blocks of 64", lambda x, w: linear(_mx(x), _mx(w, block=64) if w.shape[-1] % 64 == 0 else _mx(w)), r"argument 1.*(64|block)"),
    )),
    RealKernel("int8 cast by row", "torchao", torchao_int8, (X,), lambda x: x, options={"output": INT8}, faults=(
        Fault("unsigned range", lambda x: torchao_int8(x.abs()), ""),
    )),
]  # fmt: skip
