"""See a loop over rows that ends after its first tile."""

import torch
from torch.nn.functional import linear

from qgate.testing import CheckFailure, check_kernel


def one_tile(x, w):  # a loop over rows that ends after the first tile
    y = linear(x, w)
    y[128:] = 0
    return y


x, w = torch.randn(24, 64), torch.randn(20, 64)
report = check_kernel(linear, x, w, like=linear)
assert report.largest == {"argument 0": [257, 257], "argument 1": [257, 257]}
try:
    check_kernel(one_tile, x, w, like=linear)
except CheckFailure as failure:
    assert "rows 128 to 256 of 257 (to the end) are zero" in failure.cause
