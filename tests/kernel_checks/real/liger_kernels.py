"""Kernels of liger-kernel, in Triton's interpreter."""

from __future__ import annotations

import torch
from liger_kernel.transformers import functional as liger
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import gelu, silu

from tests.kernel_checks.real.interpreter import prepare
from tests.kernel_checks.real.kernel import (
    FP16,
    FP32,
    Fault,
    Function,
    RealKernel,
    normal,
    times,
)  # fmt: skip
from tests.kernel_checks.real.torch_others import (
    cross_entropy,
    groups,
    norm_by_hand,
    rms_by_hand,
    rope,
    softmax,
)  # fmt: skip

prepare("liger_kernel")

FEW = {"relations": ["one", "odd", "permuted"]}


def _rms(eps: float = 1e-6) -> Function:
    return lambda x, w: liger.liger_rms_norm(x.clone(), w, eps)


def _gemma(x: Tensor, w: Tensor) -> Tensor:
    return liger.liger_rms_norm(x.clone(), w, 1e-6, offset=1.0, casting_mode="gemma")


def _gemma_by_hand(x: Tensor, w: Tensor) -> Tensor:
    return rms_by_hand(x, 1 + w)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return liger.liger_layer_norm(x, w, b, 1e-5)


def _group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return liger.liger_group_norm(x, w, b, x.shape[1], 4, 1e-5)


def _gated(a: Tensor, b: Tensor) -> Tensor:
    return silu(a) * b


def _gelu_gated(a: Tensor, b: Tensor) -> Tensor:
    return gelu(a, approximate="tanh") * b


def _cross_entropy(smoothing: float = 0.0) -> Function:
    def kernel(logits: Tensor, targets: Tensor) -> Tensor:
        return liger.liger_cross_entropy(
            logits.clone(), targets, reduction="none", label_smoothing=smoothing
        )

    return kernel


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return liger.liger_rope(x.clone(), x.clone(), cos[None], sin[None])[0]


def _rotary_by_hand(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves; the second half of cosines and sines repeats the first, and is not read."""
    cos, sin = (torch.cat([t[..., : t.shape[-1] // 2]] * 2, -1) for t in (cos, sin))
    return rope(x, cos, sin)


def _rotary_positions_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries as a model lays them out: heads are a view of positions."""
    q = x.clone().transpose(1, 2)
    return liger.liger_rope(q, q.clone(), cos[None], sin[None])[0].transpose(1, 2)


def _positions_first_by_hand(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotary_by_hand(x.transpose(1, 2), cos, sin).transpose(1, 2)


def _add_norm(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    return liger.liger_fused_add_rms_norm(x.clone(), residual.clone(), w, 1e-6)[0]


def _add_norm_by_hand(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    return rms_by_hand(x + residual, w)


def _relu_squared(x: Tensor) -> Tensor:
    return x.relu().square()


def _poly(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    def normed(power: int) -> Tensor:
        y = x**power
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)

    return w[0] * normed(3) + w[1] * normed(2) + w[2] * normed(1) + b


def _sparsemax(x: Tensor) -> Tensor:
    ordered = x.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    size = (ordered * count > sums).sum(-1, keepdim=True).clamp_min(1)
    return (x - sums.gather(-1, size - 1) / size).clamp_min(0)


def _kl(log_p: Tensor, target: Tensor) -> Tensor:
    return functional.kl_div(log_p, target, reduction="none").sum(-1)


X, Y, W, B = normal(91, (24, 128), (24, 128), (128,), (128,), dtype=FP16)
FX, FY, FW, FB = (t.float() for t in (X, Y, W, B))
LOGITS = normal(92, (24, 96), dtype=FP32)[0]
TARGETS = torch.randint(96, (24,), generator=torch.Generator().manual_seed(93))
CHANNELS = normal(94, (3, 16, 24), (16,), (16,), dtype=FP32)
ROPE = (
    *normal(95, (2, 4, 24, 64), dtype=FP16),
    *(torch.cat([t, t], -1) for t in normal(96, (24, 32), (24, 32), dtype=FP16)),
)
POLY = (FX, torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.1]))
rms, entropy = _rms(), _cross_entropy()

KERNELS = [
    RealKernel("rms_norm, fp16", "liger-kernel", rms, (X, W), rms_by_hand, options=FEW, faults=(
        times(rms, 1.002), Fault("eps 1e-3", _rms(1e-3)),
    )),
    RealKernel("rms_norm, fp32", "liger-kernel", rms, (FX, FW), rms_by_hand, options=FEW),
    RealKernel("Gemma's rms_norm, fp16", "liger-kernel", _gemma, (X, W / 8), _gemma_by_hand, options=FEW),
    RealKernel("layer_norm, fp16", "liger-kernel", _layer_norm, (X, W, B), norm_by_hand, options=FEW, faults=(
        Fault("bias left out", lambda x, w, b: _layer_norm(x, w, torch.zeros_like(b)), r"argument 2|bias"),
    )),
    RealKernel("group_norm, fp32", "liger-kernel", _group_norm, (*CHANNELS,), groups, options=FEW),
    RealKernel("swiglu, fp16", "liger-kernel", liger.liger_swiglu, (X, Y), _gated, options=FEW, faults=(
        Fault("gate and up swapped", lambda a, b: liger.liger_swiglu(b, a), r"swapped|argument [01]"),
        times(liger.liger_swiglu, 1.003),
    )),
    RealKernel("geglu, fp16", "liger-kernel", liger.liger_geglu, (X, Y), _gelu_gated, options=FEW),
    RealKernel("softmax, fp16", "liger-kernel", liger.liger_softmax, (X,), softmax, options=FEW, faults=(times(liger.liger_softmax, 1.002),)),
    RealKernel("cross_entropy, fp32", "liger-kernel", entropy, (LOGITS, TARGETS), cross_entropy, options=FEW, faults=(
        Fault("labels smoothed by 0.001", _cross_entropy(0.001)),
    )),
    RealKernel("rotary embedding, fp16", "liger-kernel", _rotary, ROPE, _rotary_by_hand, options=FEW, bug="of one position, contiguous with heads first, only the first sequence is turned: the kernel takes the stride of a dimension of size one", words=r"24 along|position|sequence|argument 0"),
    RealKernel("rotary embedding, positions first, fp16", "liger-kernel", _rotary_positions_first, (ROPE[0].transpose(1, 2).contiguous(), *ROPE[1:]), _positions_first_by_hand, options=FEW, faults=(
        Fault("sign of the sine", lambda x, cos, sin: _rotary_positions_first(x, cos, -sin), r"argument 2|subtracted"),
    )),
    RealKernel("fused residual and rms_norm, fp16", "liger-kernel", _add_norm, (X, Y, W), _add_norm_by_hand, options=FEW, faults=(
        Fault("residual counted twice", lambda x, residual, w: _add_norm(x + residual, residual, w), r"argument 1"),
    )),
    RealKernel("squared relu, fp16", "liger-kernel", liger.liger_relu_squared, (X,), _relu_squared, options=FEW),
    RealKernel("poly_norm, fp32", "liger-kernel", lambda x, w, b: liger.liger_poly_norm(x.clone(), w, b), POLY, _poly, options=FEW, faults=(
        Fault("powers in another order", lambda x, w, b: liger.liger_poly_norm(x.clone(), w.flip(0) * torch.tensor([1.0, 1.0, 1.1]), b), r"argument 1"),
    )),
    RealKernel("sparsemax, fp32", "liger-kernel", liger.liger_sparsemax, (LOGITS,), _sparsemax, options=FEW),
]  # fmt: skip
