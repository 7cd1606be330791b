"""Check a grouped product, one matrix per expert."""

import torch

import qgate
from qgate.testing import CheckFailure, check_kernel


def experts(x, w):
    return torch.einsum("emk,enk->emn", x, w)


def grouped(x, w):
    return experts(qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8"))


def without_the_last(x, w):
    y = grouped(x, w)
    y[7:] = 0
    return y


x, w = torch.randn(8, 5, 32), torch.randn(8, 6, 32)
options = {"like": experts, "inputs": {0: "mxfp8", 1: "mxfp8"}, "relations": ["prefix"]}
check_kernel(grouped, x, w, **options)
try:
    check_kernel(without_the_last, x, w, **options)
except CheckFailure as failure:
    assert "index 7 of 8 in dimension 0 (the last one) is zero" in failure.cause
