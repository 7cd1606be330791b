"""Check a dequantizer that takes INT8 codes and scales."""

import torch

import qgate
from qgate.testing import CheckFailure, check_kernel


def dequantize(codes, scales):
    return codes.float() * scales


def packed(encoded):
    return encoded.codes, encoded.scales.reshape(-1, 1)


def shifted(encoded):
    codes, scales = packed(encoded)
    return codes, scales.roll(1, 0)


x = qgate.encode(torch.randn(6, 64), "int8", granularity="channel", axis=0)
check_kernel(dequantize, x, like=lambda x: x, pack={0: packed})
try:
    check_kernel(dequantize, x, like=lambda x: x, pack={0: shifted})
except CheckFailure as failure:
    assert "every scale moved to the next group" in failure.cause
