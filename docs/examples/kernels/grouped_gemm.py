"""Check a grouped GEMM: rows sorted by expert, and where each group ends."""

import torch

import qgate
from qgate.testing import CheckFailure, check_kernel, grouped_product


def grouped_gemm(x, w, ends, first=lambda start: start):
    x, w = qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8")
    y, starts = x.new_zeros(len(x), w.shape[1]), [0, *ends.tolist()[:-1]]
    for group, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        y[first(start) : end] = x[first(start) : end] @ w[group].T
    return y


def offset_late(x, w, ends):
    return grouped_gemm(x, w, ends, lambda start: start + (start > 0))


options = {"like": grouped_product, "inputs": {0: "mxfp8", 1: "mxfp8"}}
x, w = torch.randn(32, 64), torch.randn(4, 24, 64)
for sizes in [(8, 8, 8, 8), (0, 11, 9, 12), (13, 0, 0, 19), (1, 1, 30, 0)]:
    check_kernel(grouped_gemm, x, w, torch.tensor(sizes).cumsum(0), **options)
try:
    check_kernel(offset_late, x, w, torch.tensor([8, 16, 24, 32]), **options)
except CheckFailure as failure:
    assert "1 of 8 rows of group 1, from 8, are zero" in failure.cause
