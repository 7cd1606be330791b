"""Parts of transformers' models: norms, rotary embedding, attention, MLP, activations."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_neighbors
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.pytorch_utils import Conv1D

from tests.kernel_checks.real import torch_attention, torch_others
from tests.kernel_checks.real.kernel import (
    FP16,
    Fault,
    Function,
    RealKernel,
    about,
    normal,
    times,
    with_argument,
)  # fmt: skip
from tests.kernel_checks.real.torch_attention import attention, int8_rows
from tests.kernel_checks.real.torch_others import rms_by_hand, rope
from tests.kernel_checks.real.torch_products import mlp


def _norm(kind: type = LlamaRMSNorm, eps: float = 1e-6) -> Function:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        module = kind(w.shape[0], eps=eps).to(w.dtype)
        module.weight.data = w.clone()
        with torch.no_grad():
            result: Tensor = module(x)
        return result

    return kernel


def _gemma(x: Tensor, w: Tensor) -> Tensor:
    return rms_by_hand(x, 1 + w)


def _gated_norm(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    sizes = (w.shape[0],) * (1 + ("group_size" in signature(MambaRMSNormGated).parameters))
    module = MambaRMSNormGated(*sizes, eps=1e-6).to(w.dtype)  # releases before 5 have no groups
    module.weight.data = w.clone()
    with torch.no_grad():
        result: Tensor = module(x, gate)
    return result


def _rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=0)[0]


def _rotary_neighbors(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    return rotate_neighbors(x, sin[None], cos[None])


def _neighbors_by_hand(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    sin, cos = (t.repeat_interleave(2, -1)[:, None] for t in (sin, cos))
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def _eager(scale: float = 1.0) -> Function:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module = SimpleNamespace(
            num_key_value_groups=q.shape[1] // max(k.shape[1], 1), training=False
        )
        y, _ = eager_attention_forward(module, q, k, v, None, q.shape[-1] ** -0.5 * scale)
        return y.transpose(1, 2)

    return kernel


def _eager_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    module = SimpleNamespace(num_key_value_groups=1, training=False)
    y, _ = eager_attention_forward(module, q, k, v, mask[None, None], q.shape[-1] ** -0.5)
    return y.transpose(1, 2)


def _llama_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    config = SimpleNamespace(
        hidden_size=gate.shape[1],
        intermediate_size=gate.shape[0],
        hidden_act="silu",
        mlp_bias=False,
    )  # a LlamaConfig refuses sizes that are odd
    module = LlamaMLP(config).to(x.dtype)
    for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        getattr(module, name).weight.data = weight.clone()
    with torch.no_grad():
        result: Tensor = module(x)
    return result


def _conv1d(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    module = Conv1D(w.shape[1], w.shape[0]).to(x.dtype)
    module.weight.data, module.bias.data = w.clone(), b.clone()
    with torch.no_grad():
        result: Tensor = module(x)
    return result


def _addmm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


def _gelu_by_hand(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_by_hand(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _norm_of_norm(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    return rms_by_hand(x * silu(gate), w)


def _gate_after(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    return (rms_by_hand(x.float(), w.float()) * silu(gate.float())).to(x.dtype)


def _sums_in_bf16(x: Tensor, w: Tensor) -> Tensor:
    """Add the squares one after another in bf16."""
    total = torch.zeros_like(x[..., :1])
    for column in range(x.shape[-1]):
        total = total + x[..., column : column + 1].square()
    return (x.float() * torch.rsqrt(total.float() / x.shape[-1] + 1e-6)).to(x.dtype) * w


X, W = torch_others.X, torch_others.W
COS, SIN = torch_others.ROPE[1:]
HEADS, MASK = torch_attention.HEADS, torch_attention.MASK
NEIGHBORS = (
    normal(71, (2, 24, 4, 32))[0],
    COS[:24, :16].sub(0).contiguous(),
    SIN[:24, :16].contiguous(),
)
MLP = normal(72, (32, 128), (96, 128), (96, 128), (128, 96), scales=(1, 0.09, 0.09, 0.1))
CONV = normal(73, (48, 192), (192, 96), (96,), scales=(1, 1 / 14, 1))
GROUPED = torch_attention.GROUPED
llama_norm, eager = _norm(), _eager()

KERNELS = [
    RealKernel("LlamaRMSNorm, bf16", "transformers", llama_norm, (X, W), rms_by_hand, faults=(
        Fault("eps 1e-3", _norm(eps=1e-3)),
        Fault("eps 1e-4", _norm(eps=1e-4)),
        Fault("n - 1", torch_others._unbiased, "is divided by [0-9]+, not by"),
        Fault("squares added in bf16", _sums_in_bf16, r"bf16|bfloat16"),
        with_argument("last weight 2 % off", llama_norm, 1, r"\b191\b", torch_others._last_weight),
        Fault("mean subtracted", torch_others._centered),
        times(llama_norm, 1.005),
    )),
    RealKernel("LlamaRMSNorm, fp16", "transformers", llama_norm, (X.half(), W.half()), rms_by_hand, faults=(times(llama_norm, 1.002),)),
    RealKernel("GemmaRMSNorm, bf16", "transformers", _norm(GemmaRMSNorm), (X, W / 8), _gemma, faults=(
        Fault("weight without the one", llama_norm, r"argument 1"),
    )),
    RealKernel("MambaRMSNormGated, bf16", "transformers", _gated_norm, (X, torch_others.Y, W), _norm_of_norm, faults=(
        Fault("gate after the norm", _gate_after),
    )),
    RealKernel("rotary embedding of Llama, bf16", "transformers", _rotary, (normal(74, (2, 4, 40, 64))[0], COS, SIN), rope, faults=(
        Fault("sign of the sine", torch_others._wrong_sign, r"argument 2|sign|subtracted"),
        with_argument("cosine of the next position", _rotary, 1, r"argument 1", lambda cos: cos.roll(1, 0)),
        with_argument("sine 0.3 % too high", _rotary, 2, f"{about(1.003)}|argument 2", lambda sin: (sin.float() * 1.003).to(sin.dtype)),
    )),
    RealKernel("rotary embedding of Llama, fp16", "transformers", _rotary, (normal(74, (2, 4, 40, 64), dtype=FP16)[0], COS.half(), SIN.half()), rope),
    RealKernel("rotary embedding of GPT-J, bf16", "transformers", _rotary_neighbors, (NEIGHBORS[0], NEIGHBORS[2], NEIGHBORS[1]), _neighbors_by_hand),
    RealKernel("eager attention of Llama, bf16", "transformers", eager, (*HEADS,), attention, faults=(
        Fault("softmax scale +0.5 %", _eager(1.005), f"softmax|{about(1.005)}"),
        Fault("Q and K in int8 by row", lambda q, k, v: eager(int8_rows(q), int8_rows(k), v), r"argument.*(int8|quantized)"),
        times(eager, 1.004),
    )),
    RealKernel("eager attention of Llama, grouped heads, fp16", "transformers", eager, tuple(t.half() for t in GROUPED), torch_attention.grouped_heads),
    RealKernel("eager attention of Llama, mask, bf16", "transformers", _eager_masked, (*HEADS, MASK), torch_attention.masked, faults=(
        Fault("mask left out", lambda q, k, v, _mask: eager(q, k, v), r"argument 3|mask"),
    )),
    RealKernel("LlamaMLP, bf16", "transformers", _llama_mlp, (*MLP,), mlp, faults=(
        Fault("gate and up swapped", lambda x, gate, up, down: _llama_mlp(x, up, gate, down), r"swapped|argument [12]"),
        with_argument("a row of down lost", _llama_mlp, 3, r"\b40\b", lambda w: w.index_fill(0, torch.arange(40, 41), 0) if len(w) > 40 else w),
        times(_llama_mlp, 1.003),
    )),
    RealKernel("LlamaMLP, fp16", "transformers", _llama_mlp, tuple(t.half() for t in MLP), mlp),
    RealKernel("Conv1D of GPT-2, bf16", "transformers", _conv1d, (*CONV,), _addmm),
    RealKernel("gelu_new, bf16", "transformers", ACT2FN["gelu_new"], (X,), _gelu_by_hand, faults=(
        Fault("erf in the place of tanh", functional.gelu),
    )),
    RealKernel("quick_gelu, fp16", "transformers", ACT2FN["quick_gelu"], (X.half(),), _quick_by_hand),
]  # fmt: skip
