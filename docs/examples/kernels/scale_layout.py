"""Check block scales in the layout that tensor cores read."""

import torch
from torch.nn.functional import linear, pad

import qgate
from qgate.formats.scale_layouts import TILES_OF_128X4
from qgate.testing import CheckFailure, check_kernel


def elements(encoded):
    return encoded.codes.view(torch.float8_e4m3fn).float()


def gemm(x, codes, memory):  # 4 rows of tiles of 32, 4 blocks
    tiles = memory.reshape(-1, codes.shape[1] // 128, 32, 4, 4).permute(0, 3, 2, 1, 4)
    exponents = tiles.reshape(-1, codes.shape[1] // 32)[: len(codes)] - 127.0
    return linear(x, codes * exponents.exp2().repeat_interleave(32, 1))


def swizzled(encoded):
    return elements(encoded), TILES_OF_128X4.store(encoded.scales)


def as_they_are(encoded):
    scales = encoded.scales
    return elements(encoded), pad(scales.reshape(-1), (0, -scales.numel() % 512))


x, w = torch.randn(4, 128), qgate.encode(torch.randn(72, 128) * torch.randn(72, 1).exp(), "mxfp8")
check_kernel(gemm, x, w, like=linear, pack={1: swizzled}, relations=["one"])
try:
    check_kernel(gemm, x, w, like=linear, pack={1: as_they_are}, relations=["one"])
except CheckFailure as failure:
    words = "argument 1 is decoded with scales stored row by row, read in tiles of 128x4"
    assert words in failure.cause
