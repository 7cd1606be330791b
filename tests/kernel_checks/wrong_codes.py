"""Kernels that make or read codes and scales wrongly, as authors of casts do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from tests.kernel_checks.pairs import (
    BF16,
    FP8_TENSOR,
    FP16,
    INT4,
    INT8,
    Kernel,
    Pair,
    cast,
    normal,
    rowwise,
)

X, W = normal(24, 128), normal(32, 128, scale=0.1)
HALVES = normal(24, 128, dtype=BF16), normal(32, 128, scale=0.1, dtype=BF16)
SMALL = torch.cat([normal(12, 64), normal(12, 64, scale=2.0**-12)])
GROUP = 32


def with_weight(decode: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Kernel:
    """Return a product with a weight that a function quantizes and decodes."""
    return lambda x, w: linear(x.float(), decode(w.float())).to(dtype)


def int8_rows(round_: Callable[[Tensor], Tensor], largest: float = 127.0) -> Callable[[Tensor], Tensor]:  # fmt: skip
    def decoded(w: Tensor) -> Tensor:
        scale = w.abs().amax(-1, keepdim=True) / largest
        scale = torch.where(scale == 0, 1.0, scale)
        return round_(w / scale) * scale

    return decoded


def _wraps(codes: Tensor) -> Tensor:
    return (codes.round() + 128).remainder(256) - 128


def _groups(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return int4 codes in groups of 32, and the scale of each group."""
    groups = w.reshape(len(w), -1, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 7
    scale = torch.where(scale == 0, 1.0, scale)
    return (groups / scale).round().clamp(-8, 7), scale[..., 0]


def int4_groups(index: Callable[[Tensor, int], Tensor], move: Callable[[Tensor], Tensor] = lambda c: c) -> Callable[[Tensor], Tensor]:  # fmt: skip
    """Decode int4 groups with the scales that `index` finds for each column."""

    def decoded(w: Tensor) -> Tensor:
        if w.shape[1] % GROUP or not w.numel():
            return cast(w, INT4)
        codes, scale = _groups(w)
        columns = index(torch.arange(w.shape[1]), scale.shape[1])
        return move(codes.reshape(w.shape)) * scale[:, columns]

    return decoded


def _right_group(columns: Tensor, _count: int) -> Tensor:
    return columns // GROUP


def _next_group(columns: Tensor, count: int) -> Tensor:
    return (columns // GROUP + 1).clamp(max=count - 1)


def _early_group(columns: Tensor, count: int) -> Tensor:
    return ((columns + 1) // GROUP).clamp(max=count - 1)


def _group_of_64(columns: Tensor, _count: int) -> Tensor:
    return columns // 64


def _nibbles(codes: Tensor) -> Tensor:
    return codes.reshape(len(codes), -1, 2).flip(-1).reshape(codes.shape)


def _unsigned(codes: Tensor) -> Tensor:
    """Read nibbles without their sign."""
    return codes.remainder(16)


def affine(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (codes - zero) * scale


CODES = torch.randint(0, 16, (24, 64), generator=torch.Generator().manual_seed(1)).float()
SCALES = normal(24, 1).abs() + 0.1
ZEROS = torch.randint(4, 12, (24, 1), generator=torch.Generator().manual_seed(2)).float()


def fp8(x: Tensor, largest: float = 448.0, top: float = 448.0) -> Tensor:
    """Quantize a tensor to E4M3 with one scale, and saturate where a code would be too large."""
    if not x.numel():
        return x.float()
    scale = x.float().abs().max() / largest
    scale = torch.where(scale == 0, 1.0, scale)
    return (x.float() / scale).clamp(-top, top).to(torch.float8_e4m3fn).float() * scale


def fp8_product(decode: Callable[[Tensor], Tensor], dtype: torch.dtype = BF16) -> Kernel:
    return lambda x, w: linear(decode(x), fp8(w)).to(dtype)


def _read_as_fnuz(x: Tensor) -> Tensor:
    if not x.numel():
        return x
    scale = x.abs().max() / 448
    codes = (x / scale).to(torch.float8_e4m3fn)
    return codes.view(torch.float8_e4m3fnuz).float() * scale


def _with_minimum(least: float) -> Callable[[Tensor], Tensor]:
    def decoded(x: Tensor) -> Tensor:
        if not x.numel():
            return x
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(least)
        return (x / scale).round().clamp(-127, 127) * scale

    return decoded


def nvfp4(x: Tensor, with_global: Callable[[Tensor], Tensor] = lambda s: s) -> Tensor:
    """Quantize to NVFP4; `with_global` changes the scale of the tensor where codes are decoded."""
    if x.shape[-1] % 16 or not x.numel() or not bool(x.any()):
        return cast(x, "nvfp4")
    encoded = qgate.encode(x.float(), "nvfp4")
    assert encoded.tensor_scale is not None
    right = encoded.decode(torch.float32)
    return right * (with_global(encoded.tensor_scale.float()) / encoded.tensor_scale.float())


def _mx_scales(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Quantize to MXFP4 with other block scales: codes are made with the changed ones."""
    if x.shape[-1] % 32 or not x.numel():
        return cast(x, "mxfp4")
    blocks = x.float().reshape(*x.shape[:-1], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(torch.where(amax == 0, 1.0, amax))
    scale = torch.exp2(change(exponent.float() - 1 - 2))
    codes = cast((blocks / scale).clamp(-6, 6), qgate.Quantizer("fp4_e2m1"))
    return (codes * scale).reshape(x.shape)


def _biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    (a, scale_a), (c, scale_c) = rowwise(x), rowwise(w)
    return (linear(a, c) * scale_a * scale_c.reshape(-1) + b).to(BF16)


def _bias_before_scales(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    (a, scale_a), (c, scale_c) = rowwise(x), rowwise(w)
    return ((linear(a, c) + b) * scale_a * scale_c.reshape(-1)).to(BF16)


def _one_scale_of_tokens(x: Tensor, w: Tensor) -> Tensor:
    scale = x.abs().max() / 127 if x.numel() else 1.0
    return linear((x / scale).round() * scale, cast(w, INT8)).to(BF16)


INT8_WEIGHT, INT4_WEIGHT = {1: INT8}, {1: INT4}
TWO: dict[int, Any] = {0: FP8_TENSOR, 1: FP8_TENSOR}
PAIRS = (
    Pair("floor for nearest", "rounded down|rounds down|floor",
         with_weight(int8_rows(torch.round)), with_weight(int8_rows(torch.floor)), (X, W), linear, INT8_WEIGHT),
    Pair("half is added and cut off", "truncated|rounded (down|up)|ties|toward zero",
         with_weight(int8_rows(torch.round)), with_weight(int8_rows(lambda c: (c + 0.5).trunc())), (X, W), linear, INT8_WEIGHT),
    Pair("128 wraps", "codes that wrap", with_weight(int8_rows(lambda c: c.round().clamp(-128, 127), 128.0)),
         with_weight(int8_rows(_wraps, 128.0)), (X, W.abs()), linear, INT8_WEIGHT),
    Pair("saturation at 100", "saturates? (early|at 100)",
         with_weight(int8_rows(lambda c: c.round())), with_weight(int8_rows(lambda c: c.round().clamp(-100, 100))), (X, W), linear, INT8_WEIGHT),
    Pair("codes of 7 bits", "63 of 127 codes|twice the scale|int7|scale .*2",
         with_weight(int8_rows(torch.round)), with_weight(int8_rows(torch.round, 63.0)), (X, W), linear, INT8_WEIGHT),
    Pair("next group", "argument 1 is decoded with .*(next|previous) group",
         with_weight(int4_groups(_right_group), BF16), with_weight(int4_groups(_next_group), BF16), HALVES, linear, INT4_WEIGHT),
    Pair("group one element early", "argument 1 is decoded with .*(element|boundar|one (element|column))",
         with_weight(int4_groups(_right_group)), with_weight(int4_groups(_early_group)), (X, W), linear, INT4_WEIGHT),
    Pair("groups of 64", "argument 1 is decoded with scales of groups of 64, not of 32",
         with_weight(int4_groups(_right_group), FP16), with_weight(int4_groups(_group_of_64), FP16), (X.half(), W.half()), linear, INT4_WEIGHT),
    Pair("nibbles of int4", "argument 1 has neighboring codes swapped",
         with_weight(int4_groups(_right_group), BF16), with_weight(int4_groups(_right_group, _nibbles), BF16), HALVES, linear, INT4_WEIGHT),
    Pair("nibbles without sign", "argument 1 .*(unsigned|without (its|their) sign|negative codes)",
         with_weight(int4_groups(_right_group)), with_weight(int4_groups(_right_group, _unsigned)), (X, W), linear, INT4_WEIGHT),
    Pair("zero point one too high", "argument 2 is read with one added|argument 0 is read without the one",
         affine, lambda c, s, z: affine(c, s, z + 1), (CODES, SCALES, ZEROS), affine),
    Pair("zero point not used", "argument 2 is not used",
         affine, lambda c, s, _z: (c * s).to(BF16), (CODES, SCALES, ZEROS), affine),
    Pair("zero point not scaled", "argument 2 .*(scale|before|argument 1)|multiplication by argument 1 comes before the subtraction of argument 2",
         affine, lambda c, s, z: c * s - z, (CODES, SCALES, ZEROS), affine),
    Pair("scale and zero swapped", "arguments 1 and 2 are swapped",
         affine, lambda c, s, z: affine(c, z, s), (CODES, SCALES, ZEROS), affine),
    Pair("a fnuz cast of codes for 448", "240",
         fp8_product(fp8), fp8_product(lambda x: fp8(x, 448.0, 240.0)), HALVES, linear, TWO),
    Pair("codes read as fnuz", "argument 0 has values 2 times too low",
         fp8_product(fp8, torch.float32), fp8_product(_read_as_fnuz, torch.float32), (X, W), linear, TWO),
    Pair("amax in bf16 after the cast", "scale|times",
         fp8_product(fp8), fp8_product(lambda x: fp8(x) * 1.01), HALVES, linear, TWO),
    Pair("minimum of a scale", "scales? .*(least|minimum|no smaller)",
         lambda x, w: linear(_with_minimum(1e-12)(x), w), lambda x, w: linear(_with_minimum(1e-3)(x), w),
         (SMALL, W[:, :64].contiguous()), linear, {0: INT8}),
    Pair("minimum of a scale, at small values", "scales? .*(least|minimum|no smaller)",
         lambda x, w: linear(_with_minimum(1e-12)(x), w), lambda x, w: linear(_with_minimum(1e-4)(x), w),
         (X, W), linear, {0: INT8}, {"relations": ["small", "permuted"]}),
    Pair("inverted global scale", "argument 1 .*(tensor scale|scale of the tensor)",
         lambda x, w: linear(x, nvfp4(w)), lambda x, w: linear(x, nvfp4(w, lambda s: 1 / s)), (X, W), linear, {1: "nvfp4"}),
    Pair("no global scale", "argument 1 .*(tensor scale|scale of the tensor)",
         lambda x, w: linear(x.float(), nvfp4(w)).to(BF16),
         lambda x, w: linear(x.float(), nvfp4(w, torch.ones_like)).to(BF16), HALVES, linear, {1: "nvfp4"}),
    Pair("bias of E8M0 one less", "argument 1 .*2 times too (high|low)",
         lambda x, w: linear(x.float(), cast(w, "mxfp4")).half(), lambda x, w: linear(x.float(), cast(w, "mxfp4") * 2).half(), (X.half(), W.half()), linear, {1: "mxfp4"}),
    Pair("scales of MXFP4 one power too low", "argument 1 is quantized with half the scale",
         lambda x, w: linear(x, _mx_scales(w, lambda e: e)), lambda x, w: linear(x, _mx_scales(w, lambda e: e - 1)), (X, W), linear, {1: "mxfp4"}),
    Pair("bias before the scales", "argument 2 .*(scale|before|is not used)",
         _biased, _bias_before_scales, (*HALVES, normal(32, dtype=BF16)), linear, {0: INT8, 1: INT8}),
    Pair("one scale of all tokens", "argument 0 has one scale for the tensor, not one per channel",
         lambda x, w: linear(cast(x, INT8), cast(w, INT8)).to(BF16), _one_scale_of_tokens, (normal(24, 128) * torch.linspace(0.2, 3, 24)[:, None], W), linear, {0: INT8, 1: INT8}),
    Pair("weights not quantized, bf16", "argument 1 is not quantized to",
         lambda x, w: linear(cast(x, INT8), cast(w, INT8)).to(BF16), lambda x, w: linear(cast(x, INT8), w.float()).to(BF16), HALVES, linear, {0: INT8, 1: INT8}),
    Pair("E5M2 for E4M3 in bf16", "argument 0 is fp8_e5m2, not fp8_e4m3",
         fp8_product(fp8), fp8_product(lambda x: cast(x, qgate.Quantizer("fp8_e5m2", granularity="tensor"))), HALVES, linear, TWO),
)  # fmt: skip
