"""Check a fused kernel that quantizes between its products."""

import torch
from torch.nn.functional import linear, silu

from qgate.testing import CheckFailure, check_kernel, quantized


def reference(x, w1, w2):
    h = silu(linear(x, w1))
    return linear(quantized("h", h, "int8", granularity="channel", axis=0), w2)


def fused(x, w1, w2, rows=-1):  # your kernel
    a = x @ w1.T
    h = a * torch.sigmoid(a)
    largest = h.abs().amax() if rows is None else h.abs().amax(rows, keepdim=True)
    scale = largest.clamp_min(1e-30) / 127
    return ((h / scale).round() @ w2.T) * scale


x, w1, w2 = torch.randn(24, 64), torch.randn(96, 64) / 8, torch.randn(40, 96) / 10
report = check_kernel(fused, x, w1, w2, like=reference)
assert report.conventions["stage h"] == "scale amax/127"
try:
    check_kernel(lambda *args: fused(*args, rows=None), x, w1, w2, like=reference)
except CheckFailure as failure:
    words = "stage h has one scale for the tensor, not one per channel of axis 0"
    assert words in failure.cause
