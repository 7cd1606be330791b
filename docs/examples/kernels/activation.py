"""Check an activation that quantizes its result."""

import torch
from torch.nn.functional import silu

import qgate
from qgate.testing import CheckFailure, check_kernel


def gated(x, y):
    return silu(x) * y


def gated_and_quantized(x, y):
    return qgate.quantize(gated(x, y), "mxfp4")


x, y = torch.randn(8, 64), torch.randn(8, 64)
check_kernel(gated_and_quantized, x, y, like=gated, output="mxfp4")
try:
    check_kernel(lambda x, y: gated_and_quantized(x, y) * 2, x, y, like=gated, output="mxfp4")
except CheckFailure as failure:
    assert "2 times too high" in failure.cause
