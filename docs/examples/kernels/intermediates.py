"""Forbid results between operators that are rounded to 16 bits."""

import torch
from torch.nn.functional import silu

from qgate.testing import CheckFailure, check_kernel


def gated(x, y):
    return silu(x) * y


x, y = torch.randn(2, 24, 64).bfloat16()
report = check_kernel(gated, x, y, like=gated)
assert report.conventions["arithmetic"] == "the results of silu rounded to bfloat16"
try:
    check_kernel(gated, x, y, like=gated, intermediates="float32")
except CheckFailure as failure:
    assert "forbids the results of silu rounded to bfloat16" in failure.cause
