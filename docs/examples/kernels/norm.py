"""Check a norm that quantizes its result."""

import torch

import qgate
from qgate.testing import CheckFailure, check_kernel


def norm(x):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6)


def norm_and_quantize(x, rounding="even"):
    return qgate.quantize(norm(x), "mxfp8", rounding=rounding)


x = torch.randn(8, 64)
check_kernel(norm_and_quantize, x, like=norm, output="mxfp8")
try:
    check_kernel(lambda x: norm_and_quantize(x, "zero"), x, like=norm, output="mxfp8")
except CheckFailure as failure:
    assert "the result is truncated, not rounded to the nearest" in failure.cause
