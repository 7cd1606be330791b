"""Survive a kernel that ends the process."""

import os

import torch
from torch.nn.functional import linear

from qgate.testing import CheckFailure, check_kernel


def fragile(x, w):
    if len(x) == 3:
        os._exit(3)
    return linear(x, w)


x, w = torch.randn(12, 64), torch.randn(8, 64)
try:
    check_kernel(fragile, x, w, like=linear, isolate=True)
except CheckFailure as failure:
    words = "fragile ended the process (exit status 3) for 3 of 12 along dimension 0 of argument 0"
    assert failure.cause == words
