"""Check FP8 weights with one scale per tile of 128x128."""

import torch
from torch.nn.functional import linear

from qgate.testing import CheckFailure, check_kernel, tiles


def pack_tiles(w, size=128):
    scales = torch.ones(-(-w.shape[0] // size), -(-w.shape[1] // size))
    codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
            amax = w[part].abs().amax()
            scales[row, column] = amax / 448 if amax > 0 else 1.0
            codes[part] = (w[part] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def gemm(x, codes, scales, size=128):
    spread = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return linear(x, codes.float() * spread[: codes.shape[0], : codes.shape[1]])


x, w = torch.randn(4, 200), torch.randn(150, 200)
options = {"like": linear, "inputs": {1: tiles("fp8_e4m3", 128, 128)}, "relations": ["one"]}
check_kernel(gemm, x, w, pack={1: pack_tiles}, **options)


def pack_tiles_of_64(w):
    codes, scales = pack_tiles(w, 64)
    return codes, scales[::2, ::2].contiguous()


try:
    check_kernel(gemm, x, w, pack={1: pack_tiles_of_64}, **options)
except CheckFailure as failure:
    assert "gemm is wrong" in failure.cause
