"""Name the arithmetic of a matrix product, and hold a kernel to one."""

import torch
from torch.nn.functional import linear

from qgate.arithmetics.known import PRODUCTS
from qgate.testing import CheckFailure, check_kernel

FP8 = torch.float8_e4m3fn


def fast_gemm(a, b):  # what a Hopper GPU gives with use_fast_accum=True
    return PRODUCTS["hopper-fp8-fast"].sums(a, b, (FP8, FP8))


a, b = (torch.randn(16, 1024).abs().to(FP8) for _ in range(2))
report = check_kernel(fast_gemm, a, b, like=linear)
print(report)
assert report.conventions["arithmetic"] == "Hopper FP8, fast accumulation"
assert "% too small on these inputs, against exact sums" in report.notes[0]

try:
    check_kernel(fast_gemm, a, b, like=linear, arithmetic="hopper-fp8-slow")
except CheckFailure as failure:
    assert "it follows Hopper FP8, fast accumulation" in failure.cause
