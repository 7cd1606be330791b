"""Kernels of conch-triton-kernels, in Triton's interpreter."""

from __future__ import annotations

import torch
from conch.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from conch.ops.activation.silu_and_mul import silu_and_mul
from conch.ops.attention.paged_attention import paged_attention
from conch.ops.embedding.rotary_embedding import rotary_embedding
from conch.ops.normalization.gemma_rms_norm import gemma_rms_norm
from conch.ops.normalization.rms_norm import rms_norm
from conch.ops.quantization.gemm import mixed_precision_gemm
from conch.ops.quantization.int8 import scaled_int8_quant
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

import qgate
from tests.kernel_checks.real.interpreter import prepare
from tests.kernel_checks.real.kernel import FP16, Fault, RealKernel, about, normal, times
from tests.kernel_checks.real.torch_others import rms_by_hand

prepare("conch")

INT4_GROUPS = qgate.Quantizer("int4", granularity="block", block=64)
SCALE = 0.03
STATIC_INT8 = qgate.Quantizer("int8", scale=SCALE)
FEW = {"relations": ["one", "odd", "permuted", "zero rows"]}
KERNELS_PAGE = 16


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, w, 1e-6)


def _gemma(x: Tensor, w: Tensor) -> Tensor:
    return gemma_rms_norm(x, w, 1e-6)


def _gemma_by_hand(x: Tensor, w: Tensor) -> Tensor:
    return rms_by_hand(x, 1 + w)


def _silu_by_hand(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def _gelu_by_hand(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.clone().flatten(1)
    positions = torch.arange(len(x))
    cache = torch.cat([cos, sin], -1)
    return rotary_embedding(positions, heads, heads.clone(), x.shape[-1], cache)[0].view(x.shape)


def _rotary_by_hand(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _decode(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    """Attend with one query per sequence to pages of 16 positions, as conch's decoder does."""
    if k.shape[1] % KERNELS_PAGE or not k.numel():
        raise ValueError("whole pages of 16 positions are needed")
    pages, lengths = k.shape[1] // KERNELS_PAGE, torch.full((len(k),), k.shape[1])
    keys, values = (
        t.reshape(len(k) * pages, KERNELS_PAGE, *t.shape[2:]).contiguous() for t in (k, v)
    )
    table = torch.arange(len(k) * pages).view(len(k), pages)
    return paged_attention(
        q, keys, values, table.int(), lengths.int(), scale=q.shape[-1] ** -0.5 * scale
    )


def _decode_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhd,blhd->bhl", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhl,blhd->bhd", scores.softmax(-1), v)


def _int4(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return int4 codes from 0 to 15 and a scale in the weights' dtype for each group."""
    blocks = w.reshape(len(w), -1, group)
    scales = (blocks.abs().amax(-1, keepdim=True).float() / 7).to(w.dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (blocks.float() / scales.float()).round().clamp(-8, 7).int() + 8
    return codes.reshape(w.shape), scales.squeeze(-1)


def _pack(codes: Tensor) -> Tensor:
    """Pack eight codes along K into each int32, K first."""
    by_word = codes.long().t().reshape(codes.shape[1] // 8, 8, codes.shape[0])
    words = (by_word << (4 * torch.arange(8))[:, None]).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


def _gemm(x: Tensor, w: Tensor, group: int = 64, bias: int = 8, moved: int = 0) -> Tensor:
    if x.shape[-1] % group or not x.numel() or not w.numel():
        raise ValueError("K must be a multiple of the group")
    codes, scales = _int4(w, group)
    scales = scales.roll(moved, 0).t().contiguous()
    return mixed_precision_gemm(x.contiguous(), _pack(codes), scales, None, 4, bias, group)


def _gemm_of_any_length(x: Tensor, w: Tensor) -> Tensor:
    """Run the same GEMM at another K, with other tensors behind the activations in memory."""
    codes, scales = _int4(w, w.shape[1])
    memory = torch.ones(x.numel() + 8192, dtype=x.dtype)
    memory[: x.numel()] = x.flatten()
    packed = _pack(codes)
    words = torch.full((packed.numel() + 8192,), 0x12345678, dtype=torch.int32)
    words[: packed.numel()] = packed.flatten()
    return mixed_precision_gemm(
        memory[: x.numel()].view(x.shape), words[: packed.numel()].view(packed.shape),
        scales.t().contiguous(), None, 4, 8, w.shape[1],
    )  # fmt: skip


def _int8_cast(x: Tensor) -> Tensor:
    codes, scale = scaled_int8_quant(x.contiguous(), torch.tensor([SCALE]))
    return codes.float() * scale


X, W = normal(81, (24, 192), (192,), dtype=FP16)
PAIR = normal(82, (24, 256), dtype=FP16)[0]
ROPE = normal(83, (20, 4, 64), (20, 32), (20, 32), dtype=FP16)
DECODE = normal(84, (3, 4, 64), (3, 32, 4, 64), (3, 32, 4, 64), dtype=FP16)
LONGER = normal(87, (2, 2, 32), (2, 112, 2, 32), (2, 112, 2, 32), dtype=FP16)
A, B = normal(85, (16, 256), (64, 256), dtype=FP16, scales=(1, 0.1))
SHORT_A, SHORT_B = normal(86, (16, 96), (64, 96), dtype=FP16, scales=(1, 0.1))

KERNELS = [
    RealKernel("GEMM of int4 weights, K = 96, fp16", "conch-triton-kernels", _gemm_of_any_length, (SHORT_A, SHORT_B), linear, {1: qgate.Quantizer("int4", granularity="channel", axis=0)}, {"relations": ["one"]}, bug="the GEMM reads beyond K where K is no multiple of its block", words=r"K|sum|term|beyond|NaN|finite|depends"),
    RealKernel("int8 cast with a given scale, fp16", "conch-triton-kernels", _int8_cast, (X,), lambda x: x, options={"output": STATIC_INT8, "relations": ["one", "odd"]}, bug="the cast to int8 cuts off where it should round", words=r"truncated"),
    RealKernel("rms_norm, fp16", "conch-triton-kernels", _rms, (X, W), rms_by_hand, options=FEW, faults=(
        times(_rms, 1.002),
        Fault("eps 1e-3", lambda x, w: rms_norm(x, w, 1e-3)),
    )),
    RealKernel("rms_norm, fp32", "conch-triton-kernels", _rms, (X.float(), W.float()), rms_by_hand, options=FEW, faults=(times(_rms, 1.0001),)),
    RealKernel("Gemma's rms_norm, fp16", "conch-triton-kernels", _gemma, (X, W / 8), _gemma_by_hand, options=FEW, faults=(Fault("weight without the one", _rms, r"argument 1"),)),
    RealKernel("silu_and_mul, fp16", "conch-triton-kernels", silu_and_mul, (PAIR,), _silu_by_hand, options=FEW, faults=(
        Fault("gate and up swapped", lambda x: silu_and_mul(torch.cat(x.chunk(2, -1)[::-1], -1)), r"argument 0|hold|swapped"),
    )),
    RealKernel("gelu_tanh_and_mul, fp32", "conch-triton-kernels", gelu_tanh_and_mul, (PAIR.float(),), _gelu_by_hand, options=FEW),
    RealKernel("rotary embedding, fp16", "conch-triton-kernels", _rotary, (*ROPE,), _rotary_by_hand, options=FEW, faults=(
        Fault("positions one late", lambda x, cos, sin: _rotary(x, cos.roll(-1, 0), sin.roll(-1, 0)), r"argument [12]"),
        Fault("sign of the sine", lambda x, cos, sin: _rotary(x, cos, -sin), r"argument 2|subtracted"),
    )),
    RealKernel("paged attention, fp16", "conch-triton-kernels", _decode, (*DECODE,), _decode_by_hand, options={"relations": ["one", "permuted"]}, faults=(
        Fault("softmax scale +1 %", lambda q, k, v: _decode(q, k, v, 1.01), f"softmax|{about(1.01)}"),
        Fault("second page read from the next sequence", lambda q, k, v: _decode(q, torch.cat([k[:, :16], k[:, 16:].roll(1, 0)], 1), v), r"argument 1|depends on"),
    )),
    RealKernel("paged attention, seven pages, fp16", "conch-triton-kernels", _decode, (*LONGER,), _decode_by_hand, options={"relations": ["one", "permuted"]}, faults=(
        times(_decode, 1.005),
    )),
    RealKernel("GEMM of int4 weights, fp16", "conch-triton-kernels", _gemm, (A, B), linear, {1: INT4_GROUPS}, {"relations": ["one", "odd", "permuted"]}, faults=(
        Fault("zero point 7 in the place of 8", lambda x, w: _gemm(x, w, bias=7), r"argument 1.*(code|zero point)"),
        Fault("groups of 128", lambda x, w: _gemm(x, w, 128), r"\b128\b|blocks of|groups of|of each 2 groups"),
        Fault("scales of the next row", lambda x, w: _gemm(x, w, moved=1), r"argument 1.*scale"),
    )),
]  # fmt: skip
