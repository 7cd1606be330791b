"""Check NVFP4 weights with two codes in a byte."""

import torch
from torch.nn.functional import linear

import qgate
from qgate.testing import CheckFailure, check_kernel

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def pack_nibbles(encoded):
    low, high = encoded.codes[:, ::2], encoded.codes[:, 1::2]
    return low | high << 4, encoded.scales, encoded.tensor_scale


def gemm(x, packed, scales, tensor_scale):
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    by_block = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    return linear(x, E2M1[codes.long()] * by_block * tensor_scale)


def pack_high_first(encoded):
    packed, scales, tensor_scale = pack_nibbles(encoded)
    return packed >> 4 | packed << 4, scales, tensor_scale


x, w = torch.randn(4, 64), qgate.encode(torch.randn(6, 64), "nvfp4")
check_kernel(gemm, x, w, like=linear, pack={1: pack_nibbles}, relations=["one", "odd"])
try:
    check_kernel(gemm, x, w, like=linear, pack={1: pack_high_first}, relations=["one"])
except CheckFailure as failure:
    assert "argument 1 has neighboring codes swapped (the order of nibbles)" in failure.cause
