"""Functions compiled by torch for the CPU. Each shape is compiled anew, so few are derived."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.kernel_checks.real import torch_attention, torch_others, torch_products
from tests.kernel_checks.real.kernel import Fault, RealKernel, times

SAME_SHAPE = {"relations": ["permuted"]}
TWO_SHAPES = {"relations": ["one", "permuted"]}
linear_gelu, mlp = torch.compile(torch_products.linear_gelu), torch.compile(torch_products.mlp)
norm, attention = torch.compile(torch_others.rms_by_hand), torch.compile(torch_attention.attention)
flex = torch.compile(flex_attention)


def _erf_of_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b), approximate="tanh")


tanh_gelu = torch.compile(_erf_of_tanh)

KERNELS = [
    RealKernel("gelu of linear, compiled, bf16", "torch, compiled", linear_gelu, (torch_products.X, torch_products.W, torch_products.B), torch_products.linear_gelu, options=TWO_SHAPES, faults=(
        Fault("tanh in the place of erf", tanh_gelu), times(linear_gelu, 1.004),
    )),
    RealKernel("SwiGLU MLP, compiled, bf16", "torch, compiled", mlp, (*torch_products.MLP,), torch_products.mlp, options=TWO_SHAPES, faults=(times(mlp, 1.003),)),
    RealKernel("rms_norm, compiled, bf16", "torch, compiled", norm, (torch_others.X, torch_others.W), torch_others.rms_by_hand, options=TWO_SHAPES, faults=(times(norm, 1.003),)),
    RealKernel("attention, compiled, bf16", "torch, compiled", attention, (*torch_attention.SHORT,), torch_attention.attention, options=SAME_SHAPE, faults=(times(attention, 1.004),)),
    RealKernel("flex attention, compiled, bf16", "torch, compiled", flex, (*torch_attention.SHORT,), torch_attention.attention, options=SAME_SHAPE, faults=(
        Fault("softmax scale +0.5 %", lambda q, k, v: flex(q, k, v, scale=q.shape[-1] ** -0.5 * 1.005)),
    )),
]  # fmt: skip
