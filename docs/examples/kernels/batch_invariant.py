"""Hold a kernel to the same bits for a row in any batch."""

import torch
from torch.nn.functional import linear

from qgate.testing import CheckFailure, check_kernel


def by_row(x, w):
    return (x[:, None, :] * w).sum(-1) if len(x) else linear(x, w)


def split_for_short_batches(x, w):
    if len(x) >= 8:
        return by_row(x, w)
    return by_row(x[:, :48], w[:, :48]) + by_row(x[:, 48:], w[:, 48:])


x, w = torch.randn(12, 96), torch.randn(20, 96)
check_kernel(by_row, x, w, like=linear, invariant=True)
check_kernel(split_for_short_batches, x, w, like=linear)
try:
    check_kernel(split_for_short_batches, x, w, like=linear, invariant=True)
except CheckFailure as failure:
    assert "is not batch-invariant" in failure.cause
