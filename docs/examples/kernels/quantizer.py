"""Check a quantizer: the reference is the identity, the result is in the format."""

import torch

import qgate
from qgate.testing import CheckFailure, check_kernel


def quantize(x, block=32):
    return qgate.quantize(x, "mxfp8", block=block)


x = torch.randn(8, 96)
check_kernel(quantize, x, like=lambda x: x, output="mxfp8")
try:
    check_kernel(lambda x: quantize(x, 16), x, like=lambda x: x, output="mxfp8")
except CheckFailure as failure:
    assert "the result has blocks of 16, not of 32" in failure.cause
