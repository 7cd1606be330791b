"""Check the gradients of a kernel, one right and one wrong."""

import torch
from torch.nn.functional import linear

import qgate
from qgate.testing import CheckFailure, check_kernel


class Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8")
        ctx.save_for_backward(x, w)
        return linear(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x * 1.01


x, w = torch.randn(24, 64), torch.randn(20, 64)
options = {"like": linear, "inputs": {0: "mxfp8", 1: "mxfp8"}}
check_kernel(Gemm.apply, x, w, **options)
try:
    check_kernel(Gemm.apply, x, w, **options, backward=True)
except CheckFailure as failure:
    assert "the gradient of argument 1 of apply is wrong: the result is 1.01 times" in failure.cause
