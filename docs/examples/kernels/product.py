"""Check a product; one lost term of its sum is named."""

import torch
from torch.nn.functional import linear

import qgate
from qgate.testing import CheckFailure, check_kernel


def gemm(x, w, lost=None):
    left = qgate.quantize(x, "nvfp4").clone()
    if lost is not None:
        left[:, lost : lost + 1] = 0
    return linear(left, qgate.quantize(w, "nvfp4"))


x, w = torch.randn(8, 1024), torch.randn(12, 1024)
options = {"like": linear, "inputs": {0: "nvfp4", 1: "nvfp4"}, "relations": ["odd"]}
check_kernel(gemm, x, w, **options)
try:
    check_kernel(lambda x, w: gemm(x, w, lost=77), x, w, **options)
except CheckFailure as failure:
    assert "term 77 of the sum over 1,024" in failure.cause
    assert "is lost" in failure.cause
