"""Check a kernel that rounds at random."""

import torch

import qgate
from qgate.testing import CheckFailure, check_kernel

at_random, nearest = qgate.Quantizer("mxfp4", rounding="stochastic"), qgate.Quantizer("mxfp4")
x = torch.randn(24, 64)
check_kernel(at_random, x, like=lambda x: x, output=at_random)
try:
    check_kernel(nearest, x, like=lambda x: x, output=at_random)
except CheckFailure as failure:
    assert "does not round at random: 64 seeds give the same bits" in failure.cause
