"""Check a cache that is written and read."""

import torch

import qgate
from qgate.testing import CheckFailure, check_kernel

int8 = qgate.Quantizer("int8", granularity="channel", axis=0)


def write_and_read(x, cache, first=0):
    cache[first : first + len(x)] = int8(x)
    return cache


def written(x, cache):
    return torch.cat([x, cache[len(x) :]])


x, cache = torch.randn(6, 32), torch.zeros(10, 32)
check_kernel(write_and_read, x, cache, like=written, inputs={0: int8})
try:
    check_kernel(lambda x, c: write_and_read(x, c, 1), x, cache, like=written, inputs={0: int8})
except CheckFailure as failure:
    assert "rows 0 to 6 of 10 hold others: row 0 what 6 should, 1 what 0 should" in failure.cause
