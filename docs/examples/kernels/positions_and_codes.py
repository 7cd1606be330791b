"""Check kernels whose arguments are positions or codes of 8 bits."""

import torch
from torch.nn.functional import cross_entropy

import qgate
from qgate.testing import CheckFailure, check_kernel


def losses(logits, labels):
    return cross_entropy(logits, labels, reduction="none")


def gemm(a, b):
    return a.float() @ b.float().T


logits, labels = torch.randn(24, 50), torch.arange(24) % 7
report = check_kernel(losses, logits, labels, like=losses)
assert report.left_out["cuts of dimension 1 of argument 0"] == "argument 1 holds positions in it"

x, w = torch.randn(12, 64), torch.randn(8, 64)
a, b = x.to(torch.float8_e4m3fn), w.to(torch.float8_e5m2)
check_kernel(gemm, a, b, like=lambda a, b: a @ b.T)
check_kernel(
    lambda x, w: gemm(qgate.quantize(x, "mxfp8"), w),
    x,
    b,
    like=lambda x, w: x @ w.T,
    inputs=["mxfp8"],
)


def scaling(x, w):
    y = gemm(x, w)
    x.mul_(2)
    return y


try:
    check_kernel(scaling, x, w, like=lambda x, w: x @ w.T)
except CheckFailure as failure:
    assert failure.cause == "scaling changes argument 0 in place; the reference does not"
