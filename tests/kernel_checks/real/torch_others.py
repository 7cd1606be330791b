"""Norms, softmax, losses, rotary embedding and activations of torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import layer_norm, silu

from tests.kernel_checks.real.kernel import (
    BF16,
    Fault,
    RealKernel,
    changed,
    normal,
    times,
    with_argument,
)  # fmt: skip

LESS = "is divided by 191, not by 192"
"""Words for a mean over one value less."""


def rms(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), w, eps)


def rms_by_hand(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return layer_norm(x, (x.shape[-1],), w, b, 1e-5)


def norm_by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5) * w + b


def groups(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.group_norm(x, 4, w, b, 1e-5)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets, reduction="none")


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def gated(a: Tensor, b: Tensor) -> Tensor:
    return silu(a) * b


def add_and_norm(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    return rms(x + residual, w)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def logsumexp(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


def _unbiased(x: Tensor, w: Tensor) -> Tensor:
    squares = x.float().square().sum(-1, keepdim=True) / (x.shape[-1] - 1)
    return (x.float() * torch.rsqrt(squares + 1e-6) * w.float()).to(x.dtype)


def _centered(x: Tensor, w: Tensor) -> Tensor:
    return rms((x.float() - x.float().mean(-1, keepdim=True)).to(x.dtype), w)


def _last_weight(w: Tensor) -> Tensor:
    w[-1:] *= 1.02
    return w


def _norm_unbiased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = x.float()
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)
    return (y * w.float() + b.float()).to(w.dtype)


def _groups_of(count: int) -> object:
    return lambda x, w, b: functional.group_norm(x, count, w, b, 1e-5)


def _wrong_sign(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos - rotate_half(x) * sin


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbors, as GPT-J does, in the place of halves."""
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


def _shifted_labels(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, (targets + 1) % logits.shape[1])


def _without_the_last_class(logits: Tensor, targets: Tensor) -> Tensor:
    masked_logits = logits.clone()
    masked_logits[:, -1:] = torch.where(
        targets[:, None] == logits.shape[1] - 1, masked_logits[:, -1:], -100.0
    )
    return cross_entropy(masked_logits, targets)


def _without_the_last(x: Tensor) -> Tensor:
    x[..., -1:] = -30000.0
    return x


X, W, B = normal(41, (48, 192), (192,), (192,))
HX, HW, HB = X.half(), W.half(), B.half()
ANGLES = torch.arange(40)[:, None] * 10000.0 ** -(torch.arange(0, 64, 2) / 64)
ANGLES = torch.cat([ANGLES, ANGLES], -1)
ROPE = (normal(42, (2, 4, 40, 64))[0], ANGLES.cos().to(BF16), ANGLES.sin().to(BF16))
LOGITS = normal(43, (32, 96), scales=(2.0,))[0]
TARGETS = torch.randint(96, (32,), generator=torch.Generator().manual_seed(44))
Y = normal(45, (48, 192))[0]
CHANNELS = normal(46, (4, 16, 24), (16,), (16,))

KERNELS = [
    RealKernel("rms_norm, bf16", "torch", rms, (X, W), rms_by_hand, faults=(
        Fault("eps 1e-3", lambda x, w: rms(x, w, 1e-3), "eps is 0.001, not 1e-06"),
        Fault("n - 1", _unbiased, LESS),
        with_argument("last weight 2 % off", rms, 1, r"\b191\b", _last_weight),
        Fault("mean subtracted", _centered, "argument 0 is taken without its mean"),
        times(rms, 1.004),
    )),
    RealKernel("rms_norm, fp16", "torch", rms, (HX, HW), rms_by_hand, faults=(Fault("n - 1", _unbiased, LESS), times(rms, 1.001))),
    RealKernel("layer_norm, bf16", "torch", norm, (X, W, B), norm_by_hand, faults=(
        Fault("n - 1", _norm_unbiased, LESS),
        Fault("bias left out", lambda x, w, _b: layer_norm(x, (x.shape[-1],), w, None, 1e-5), r"argument 2|bias"),
    )),
    RealKernel("layer_norm, fp32", "torch", norm, (X.float(), W.float(), B.float()), norm_by_hand, faults=(times(norm, 1.0001),)),
    RealKernel("group_norm, bf16", "torch", groups, (*CHANNELS,), groups, faults=(Fault("two groups in the place of four", _groups_of(2), "depends on rows 0 to 7"),)),
    RealKernel("residual and rms_norm, bf16", "torch", add_and_norm, (X, Y, W), add_and_norm, faults=(
        Fault("residual left out", lambda x, _residual, w: rms(x, w), "argument 1"),
    )),
    RealKernel("softmax, bf16", "torch", softmax, (X,), softmax, faults=(
        with_argument("last column not read", softmax, 0, r"\b191\b", _without_the_last), times(softmax, 1.004),
    )),
    RealKernel("softmax, fp16", "torch", softmax, (HX,), softmax, faults=(times(softmax, 1.001),)),
    RealKernel("logsumexp, bf16", "torch", logsumexp, (X,), logsumexp, faults=(
        with_argument("last column not read", logsumexp, 0, r"\b191\b", _without_the_last),
    )),
    RealKernel("log_softmax, bf16", "torch", log_softmax, (LOGITS,), log_softmax),
    RealKernel("cross_entropy, bf16", "torch", cross_entropy, (LOGITS, TARGETS), cross_entropy, faults=(
        Fault("next label", _shifted_labels, r"argument 1"),
        Fault("last class left out", _without_the_last_class, r"\b95\b"),
    )),
    RealKernel("cross_entropy, fp32", "torch", cross_entropy, (LOGITS.float(), TARGETS), cross_entropy, faults=(times(cross_entropy, 1.0002),)),
    RealKernel("rotary embedding, bf16", "torch", rope, ROPE, rope, faults=(
        Fault("sign of the sine", _wrong_sign, r"argument 2|sign|subtracted"),
        Fault("neighbors in the place of halves", _pairs, "pairs of argument 0 are neighbors"),
        with_argument("cosine of the next position", rope, 1, r"argument 1", lambda cos: cos.roll(1, 0)),
    )),
    RealKernel("silu and product, bf16", "torch", gated, (X, Y), gated, faults=(
        Fault("gate and up swapped", lambda a, b: gated(b, a), r"swapped|argument [01]"), times(gated, 1.005),
    )),
    RealKernel("silu and product, fp16", "torch", gated, (HX, Y.half()), gated, faults=(
        changed("last row of the row before", gated, r"row 47", lambda y: y[-1:].copy_(y[-2:-1]) if len(y) > 1 else None),
    )),
]  # fmt: skip
