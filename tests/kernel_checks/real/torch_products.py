"""Products of torch: linear, LoRA, MLP, experts, convolutions, FP8 and int8."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import gelu, linear, silu

import qgate
from qgate.testing import grouped_product
from tests.kernel_checks.real.kernel import (
    BF16,
    FP16,
    FP32,
    Fault,
    RealKernel,
    about,
    changed,
    normal,
    term_lost,
    times,
    with_argument,
)  # fmt: skip
from tests.kernel_checks.real.torch_attention import int8_rows

BY_ROW = {fmt: qgate.Quantizer(fmt, granularity="channel", axis=0) for fmt in ("int8", "fp8_e4m3")}
E4M3 = qgate.Quantizer("fp8_e4m3", granularity="tensor")
QUANTIZED = r"argument.*(int8|int4|e4m3|e5m2|fp8|quantized)"
TILE = r"tile|zero|rows? \d+ .*columns? \d+"


# Kernels -----------------------------------------------------------------------------------------


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return linear(x, w) + linear(linear(x, a), b) * 2.0


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(linear(x, w, b))


def experts(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("etk,enk->etn", x, w)


def swiglu_experts(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = torch.bmm(x, gate_up).chunk(2, -1)
    return torch.bmm(silu(gate) * up, down)


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(x, w.transpose(-1, -2), offs=ends.int())


def causal_conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Convolve each channel with the values before it, as Mamba does."""
    return functional.conv1d(x, w, b, padding=w.shape[-1] - 1, groups=x.shape[1])[
        ..., : x.shape[-1]
    ]


def residual(x: Tensor, w: Tensor) -> Tensor:
    return x + linear(x, w)


def fp8_tensor(x: Tensor, w: Tensor) -> Tensor:
    (a, of_a), (b, of_b) = _to_fp8(x, x.abs().amax()), _to_fp8(w, w.abs().amax())
    return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=BF16)


def fp8_rows(x: Tensor, w: Tensor) -> Tensor:
    (a, of_a), (b, of_b) = _to_fp8(x, x.abs().amax(1, True)), _to_fp8(w, w.abs().amax(1, True))
    return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b.t(), out_dtype=BF16)


def _to_fp8(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.where(amax == 0, 1.0, amax.float() / 448)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and a scale for each row."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return (x.float() / scale).round().to(torch.int8), scale


def int8_product(x: Tensor, w: Tensor) -> Tensor:
    (a, of_a), (b, of_b) = to_int8(x), to_int8(w)
    return (torch._int_mm(a, b.t()).float() * of_a * of_b.t()).to(x.dtype)


def int8_packed(x: Tensor, w: Tensor) -> Tensor:
    """Multiply by int8 weights whose scales are rounded to the activations' dtype."""
    if x.shape[-1] % 16 or not x.numel():
        raise ValueError("K must be a multiple of 16")  # of others torch reads beyond the weights
    codes, scale = to_int8(w)
    return torch.ops.aten._weight_int8pack_mm(x, codes, scale.squeeze(1).to(x.dtype))


def int8_decoded(x: Tensor, w: Tensor) -> Tensor:
    """Multiply by int8 weights that are decoded to the activations' dtype first."""
    codes, scale = to_int8(w)
    return linear(x, (codes.float() * scale).to(x.dtype))


# Faults ------------------------------------------------------------------------------------------


def _int8_with(change: object) -> object:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        codes, scale = to_int8(w)
        codes, scale = change(codes, scale)  # type: ignore[operator]
        return linear(x, (codes.float() * scale).to(x.dtype))

    return kernel


def _one_scale(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale.clone()
    scale[5:6] *= 1.01
    return codes, scale


def _e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).to(x.dtype)


def _mlp_in_e5m2(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(_e5m2(silu(linear(x, gate))) * linear(x, up), down)


def _mlp_gelu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(gelu(linear(x, gate)) * linear(x, up), down)


def _mlp_gate(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(x, gate) * 1.005) * linear(x, up), down)


def _hidden(by: float) -> object:
    def kernel(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = silu(linear(x, gate)) * linear(x, up)
        hidden[..., 17:18] *= by
        return linear(hidden, down)

    return kernel


def _without_the_last_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    short_bias = b.clone()
    short_bias[-1:] = 0
    return linear(x, w, short_bias)


def _stale_residual(x: Tensor, w: Tensor) -> Tensor:
    return x.roll(1, 0) + linear(x, w)


def _last_row_of_x(x: Tensor) -> Tensor:
    x[-1:] = 0
    return x


def _swap_halves(y: Tensor) -> Tensor:
    return torch.cat([*y.chunk(2, -1)][::-1], -1)


def _last_tile(y: Tensor) -> None:
    y[-16:, -16:] = 0


def _late_groups(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    ends = ends.clone()
    ends[1] += 1
    return grouped(x, w, ends)


def _next_expert(x: Tensor, w: Tensor) -> Tensor:
    return experts(x, w.roll(1, 0))


def _scales_of_the_next_row(x: Tensor, w: Tensor) -> Tensor:
    (a, of_a), (b, of_b) = to_int8(x), to_int8(w)
    return (torch._int_mm(a, b.t()).float() * of_a * of_b.roll(1, 0).t()).to(x.dtype)


def _saturated_sums(x: Tensor, w: Tensor) -> Tensor:
    """Stop the integer sums at 17 bits."""
    (a, of_a), (b, of_b) = to_int8(x), to_int8(w)
    sums = torch._int_mm(a, b.t()).clamp(-65536, 65535)
    return (sums.float() * of_a * of_b.t()).to(x.dtype)


def _fp8_of_the_first_row(x: Tensor, w: Tensor) -> Tensor:
    (a, of_a), (b, of_b) = _to_fp8(x, x.abs().amax(1, True)), _to_fp8(w, w.abs().amax(1, True))
    return torch._scaled_mm(
        a, b.t(), scale_a=of_a[:1].expand(len(x), 1).contiguous(), scale_b=of_b.t(), out_dtype=BF16
    )


def _late_conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.conv1d(x, w, b, padding=w.shape[-1] - 1, groups=x.shape[1])[
        ..., 1 : x.shape[-1] + 1
    ]


def _lora_scale(by: float) -> object:
    return lambda x, w, a, b: linear(x, w) + linear(linear(x, a), b) * by


X, W, B = normal(21, (48, 256), (128, 256), (128,))
W = W / 16
HX, HW, HB = (tensor.half() for tensor in (X, W, B))
MLP = normal(22, (32, 128), (96, 128), (96, 128), (128, 96), scales=(1, 0.09, 0.09, 0.1))
LORA = normal(23, (48, 256), (128, 256), (16, 256), (128, 16), scales=(1, 0.06, 0.06, 0.25))
LONG_X, LONG_W = normal(24, (16, 2048), (48, 2048))
EX, EW = normal(25, (4, 24, 64), (4, 48, 64))
ENDS = torch.tensor([9, 9, 25, 40])
GX, GW = normal(26, (40, 64), (4, 48, 64))
CX, CW, CB = normal(27, (2, 32, 40), (32, 1, 4), (32,))

KERNELS = [
    RealKernel("linear, bf16", "torch", linear, (X, W), linear, faults=(
        times(linear, 1.002), times(linear, 0.998), term_lost(linear, 0, 201),
        with_argument("activations in int8 by row", linear, 0, QUANTIZED, int8_rows),
        with_argument("weights in e4m3", linear, 1, QUANTIZED, lambda w: qgate.quantize(w, BY_ROW["fp8_e4m3"]) if w.numel() else w),
        changed("last tile of 16x16 zero", linear, TILE, _last_tile),
        changed("halves of the columns swapped", linear, r"columns.* hold", _swap_halves),
        with_argument("last row not read", linear, 0, TILE, _last_row_of_x),
    )),
    RealKernel("linear with a bias, bf16", "torch", linear, (X, W, B), linear, faults=(
        Fault("bias left out in the last column", _without_the_last_bias, r"\b127\b"),
        Fault("bias left out", lambda x, w, _b: linear(x, w), r"argument 2|bias"),
        Fault("bias counted twice", lambda x, w, b: linear(x, w, b) + b, r"argument 2|bias"),
        times(linear, 1.003),
    )),
    RealKernel("linear with a bias, fp16", "torch", linear, (HX, HW, HB), linear, faults=(
        times(linear, 1.001),
        Fault("bias in e4m3", lambda x, w, b: linear(x, w, b.to(torch.float8_e4m3fn).half()), "argument 2"),
    )),
    RealKernel("linear, 2,048 terms, bf16", "torch", linear, (LONG_X, LONG_W / 45), linear, faults=(
        term_lost(linear, 0, 1500),
        Fault("last 16 of 2,048 terms left out", lambda x, w: linear(x[..., :-16], w[..., :-16]), r"2032 to 2047"),
    )),
    RealKernel("linear, fp32", "torch", linear, (*normal(33, (48, 256), (128, 256), dtype=FP32, scales=(1, 0.06)),), linear, faults=(
        with_argument("weights in bf16", linear, 1, r"argument 1.*(bf16|bfloat16|rounded)", lambda w: w.bfloat16().float()),
        times(linear, 1.0001),
    )),
    RealKernel("gelu of linear, bf16", "torch", linear_gelu, (X, W, B), linear_gelu, faults=(
        Fault("tanh in the place of erf", lambda x, w, b: gelu(linear(x, w, b), approximate="tanh")),
        Fault("quick gelu", lambda x, w, b: (lambda y: y * (1.702 * y).sigmoid())(linear(x, w, b))),
        Fault("relu", lambda x, w, b: linear(x, w, b).relu()),
        times(linear_gelu, 1.004),
    )),
    RealKernel("SwiGLU MLP, bf16", "torch", mlp, (*MLP,), mlp, faults=(
        times(mlp, 1.002), times(mlp, 1.005),
        Fault("one of 96 hidden values lost", _hidden(0.0), r"\b17\b"),
        Fault("one of 96 hidden values 10 % low", _hidden(0.9), r"\b17\b"),
        Fault("silu in e5m2", _mlp_in_e5m2, r"e5m2"),
        Fault("gelu in the place of silu", _mlp_gelu),
        Fault("gate 0.5 % too high", _mlp_gate, about(1.005)),
        Fault("gate and up swapped", lambda x, gate, up, down: mlp(x, up, gate, down), r"swapped|argument"),
    )),
    RealKernel("SwiGLU MLP, fp16", "torch", mlp, tuple(tensor.half() for tensor in MLP), mlp, faults=(
        times(mlp, 1.001), Fault("gate 0.5 % too high", _mlp_gate, about(1.005)),
    )),
    RealKernel("LoRA, bf16", "torch", lora, (*LORA,), lora, faults=(
        Fault("scale of the adapter 2 % off", _lora_scale(2.04), f"{about(1.02)}|argument [23]"),
        Fault("adapter left out", lambda x, w, _a, _b: linear(x, w), "argument [23]"),
        times(lora, 1.003),
    )),
    RealKernel("residual after linear, bf16", "torch", residual, (X[:, :128].contiguous(), W[:, :128].contiguous()), residual, faults=(
        Fault("residual of the row before", _stale_residual, r"argument 0|rows?.* hold"),
    )),
    RealKernel("experts by einsum, bf16", "torch", experts, (EX, EW / 8), experts, faults=(
        Fault("weights of the next expert", _next_expert, r"argument 1|hold"),
        times(experts, 1.002),
    )),
    RealKernel("SwiGLU experts by bmm, bf16", "torch", swiglu_experts, (EX, (EW / 8).transpose(1, 2).contiguous(), normal(28, (4, 24, 64))[0] / 5), swiglu_experts),
    RealKernel("grouped_mm, bf16", "torch", grouped, (GX, GW / 8, ENDS), grouped_product, faults=(
        Fault("second group one row longer", _late_groups, r"group|argument 2"),
    )),
    RealKernel("causal conv1d by channel, bf16", "torch", causal_conv, (CX, CW, CB), causal_conv, faults=(
        Fault("one position late", _late_conv, r"hold|depends on"),
        Fault("weights reversed", lambda x, w, b: causal_conv(x, w.flip(-1), b), r"argument 1"),
    )),
    RealKernel("conv1d, bf16", "torch", functional.conv1d, (normal(29, (2, 32, 40))[0], normal(30, (48, 32, 3))[0] / 10), functional.conv1d, faults=(times(functional.conv1d, 1.002),)),
    RealKernel("conv2d, fp16", "torch", functional.conv2d, (normal(31, (2, 16, 12, 12), dtype=FP16)[0], normal(32, (24, 16, 3, 3), dtype=FP16)[0] / 12), functional.conv2d, faults=(times(functional.conv2d, 1.001),)),
    RealKernel("_scaled_mm, FP8 by tensor", "torch", fp8_tensor, (X, W), linear, {0: E4M3, 1: E4M3}, faults=(
        times(fp8_tensor, 1.002),
        Fault("weights in e5m2", lambda x, w: fp8_tensor(x, qgate.quantize(w, "fp8_e5m2") if w.numel() else w), r"argument 1.*(e5m2|twice)"),
    )),
    RealKernel("_scaled_mm, FP8 by row", "torch", fp8_rows, (X, W), linear, {0: BY_ROW["fp8_e4m3"], 1: BY_ROW["fp8_e4m3"]}, faults=(
        Fault("scale of the first row for all", _fp8_of_the_first_row, r"argument 0.*scale"),
        times(fp8_rows, 1.003),
    )),
    RealKernel("int8 product, fp16", "torch", int8_product, (HX, HW), linear, {0: BY_ROW["int8"], 1: BY_ROW["int8"]}, faults=(
        Fault("scales of the next row", _scales_of_the_next_row, r"argument 1.*scale"),
        Fault("sums stop at 17 bits", _saturated_sums),
        times(int8_product, 1.001),
    )),
    RealKernel("int8 weights, packed, bf16", "torch", int8_packed, (X, W), linear, {1: BY_ROW["int8"]}, faults=(
        with_argument("activations in int8, too", int8_packed, 0, r"argument 0.*(int8|quantized)", int8_rows),
    )),
    RealKernel("int8 weights decoded to bf16", "torch", int8_decoded, (X, W), linear, {1: BY_ROW["int8"]}, faults=(
        Fault("one of 128 scales 1 % off", _int8_with(_one_scale), r"\b5\b"),
        Fault("scales of the next row", _int8_with(lambda codes, scale: (codes, scale.roll(1, 0))), r"argument 1.*scale"),
        Fault("weights in int4", lambda x, w: linear(x, qgate.quantize(w, qgate.Quantizer("int4", granularity="channel", axis=0)) if w.numel() else w), r"int4"),
        Fault("codes one too high", _int8_with(lambda codes, scale: (codes.clamp_max(126) + 1, scale)), r"zero point|code"),
        term_lost(int8_decoded, 0, 100), times(int8_decoded, 1.002),
    )),
]  # fmt: skip
