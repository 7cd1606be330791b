"""Attention of torch on the CPU: flash and math, masks, grouped heads, flex attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qgate
from tests.kernel_checks.real.kernel import (
    FP16,
    Fault,
    RealKernel,
    about,
    changed,
    normal,
    times,
    with_argument,
)  # fmt: skip

SHAPE = (2, 4, 80, 64)
COARSE = r"softmax|e4m3|probabilit"
MASKED = r"depends on|mask|lost|\b79\b"


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, diagonal: int | None = None) -> Tensor:  # fmt: skip
    """Write attention as its definition, with a factor on the scale of the softmax."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 * scale)
    if diagonal is not None:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(diagonal)
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, diagonal=0)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores + mask).softmax(-1) @ v


def grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def backend(which: SDPBackend, **options: Any) -> Callable[..., Tensor]:
    """Return torch's attention by one backend."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        with sdpa_kernel(which):
            return sdpa(q, k, v, mask, **options)

    return kernel


flash, math = backend(SDPBackend.FLASH_ATTENTION), backend(SDPBackend.MATH)
causal_flash = backend(SDPBackend.FLASH_ATTENTION, is_causal=True)


def _scaled(by: float) -> Fault:
    return Fault(
        f"softmax scale {100 * (by - 1):+.3g} %",
        lambda q, k, v: sdpa(q, k, v, scale=q.shape[-1] ** -0.5 * by),
        f"softmax|{about(by)}",
    )


def _allowed(q: Tensor, k: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    change(allowed)
    return allowed


def _last_key(allowed: Tensor) -> None:
    if allowed.shape[1] > 1:
        allowed[:, -1] = False


def _last_key_of_the_last_row(allowed: Tensor) -> None:
    if allowed.shape[1] > 1:
        allowed[-1:, -1] = False


def _padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    more = (*k.shape[:-2], 1, k.shape[-1])
    return sdpa(q, torch.cat([k, k.new_zeros(more)], -2), torch.cat([v, v.new_zeros(more)], -2))


def _p_in_e4m3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (p.to(torch.float8_e4m3fn).float() @ v.float()).to(q.dtype)


def int8_rows(x: Tensor) -> Tensor:
    """Quantize each row to int8 and back, as a kernel does that saves memory."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30) if x.numel() else 1.0
    return ((x.float() / scale).round() * scale).to(x.dtype)


def _e4m3(x: Tensor) -> Tensor:
    return qgate.quantize(x, "fp8_e4m3") if x.numel() else x


def _late_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Forget to scale the accumulator when the second tile has a larger maximum."""
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    first = scores[..., :64]
    largest, top = scores.amax(-1, keepdim=True), first.amax(-1, keepdim=True)
    p = torch.cat([(first - top).exp(), (scores[..., 64:] - largest).exp()], -1)
    total = (scores - largest).exp().sum(-1, keepdim=True)
    return ((p @ v.float()) / total).to(q.dtype)


def _off_by_one(diagonal: int) -> Callable[..., Tensor]:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal)
        return sdpa(q, k, v, mask)

    return kernel


def _heads_in_another_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return sdpa(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1))


HEADS, HALF_HEADS = normal(11, *[SHAPE] * 3), normal(12, *[SHAPE] * 3, dtype=FP16)
MASK = normal(13, (80, 80))[0]
MASK = MASK.masked_fill(torch.ones(80, 80).tril().logical_not(), -10000.0)
GROUPED = normal(14, (2, 8, 48, 64), (2, 2, 48, 64), (2, 2, 48, 64))
SHORT = normal(15, (1, 2, 24, 32), (1, 2, 40, 32), (1, 2, 40, 32))

KERNELS = [
    RealKernel("attention, flash, bf16", "torch", flash, (*HEADS,), attention, faults=(
        *map(_scaled, (1.001, 1.002, 1.005, 1.01, 1.02)), *(times(flash, by) for by in (1.002, 0.998, 1.005)),
        Fault("last key masked", lambda q, k, v: sdpa(q, k, v, _allowed(q, k, _last_key)), MASKED),
        Fault("last key masked for the last row", lambda q, k, v: sdpa(q, k, v, _allowed(q, k, _last_key_of_the_last_row)), MASKED),
        Fault("P in e4m3", _p_in_e4m3, COARSE),
        Fault("Q and K in int8 by row", lambda q, k, v: sdpa(int8_rows(q), int8_rows(k), v), r"argument.*(int8|quantized)"),
        with_argument("V in e4m3", flash, 2, r"argument 2.*(e4m3|fp8)", _e4m3),
        Fault("a key of zeros counted", _padded, r"zero|pad|depends on|mask"),
        Fault("second tile's maximum forgotten", _late_max),
    )),
    RealKernel("attention, flash, causal, bf16", "torch", causal_flash, (*HEADS,), causal, faults=(
        Fault("mask one too wide", _off_by_one(1), "depends on|mask shows one key more"),
        Fault("mask one too narrow", _off_by_one(-1), r"depends on|NaN|not finite|row 0|mask shows one key less"),
        times(causal_flash, 1.003),
        changed("last row zero", causal_flash, r"row|zero|dimension 2 entry|index", lambda y: y[..., -1:, :].zero_()),
    )),
    RealKernel("attention, flash, fp16", "torch", flash, (*HALF_HEADS,), attention, faults=(
        *map(_scaled, (1.001, 1.005)), times(flash, 1.001),
        Fault("P in e4m3", _p_in_e4m3, COARSE),
        Fault("K in int8 by row", lambda q, k, v: sdpa(q, int8_rows(k), v), r"argument 1.*(int8|quantized)"),
    )),
    RealKernel("attention, math, bf16", "torch", math, (*HEADS,), attention, faults=(times(math, 1.004),)),
    RealKernel("attention, math, causal, fp16", "torch", backend(SDPBackend.MATH, is_causal=True), (*HALF_HEADS,), causal),
    RealKernel("attention, flash, mask, bf16", "torch", flash, (*HEADS, MASK), masked, faults=(
        Fault("mask times the scale", lambda q, k, v, mask: flash(q, k, v, mask * q.shape[-1] ** -0.5), r"argument 3|mask"),
    )),
    RealKernel("attention, math, mask, fp16", "torch", math, (*HALF_HEADS, MASK.half()), masked),
    RealKernel("attention, grouped heads, bf16", "torch", backend(SDPBackend.FLASH_ATTENTION, enable_gqa=True), (*GROUPED,), grouped_heads, faults=(
        Fault("heads in another order", _heads_in_another_order),
    )),
    RealKernel("attention, two lengths, bf16", "torch", flash, (*SHORT,), attention),
]  # fmt: skip
