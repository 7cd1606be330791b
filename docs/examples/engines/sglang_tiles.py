"""Check SGLang's product of FP8 tiles of 128x128, with a stand-in for its kernel."""

import torch
from torch.nn.functional import linear

from qgate.testing import CheckFailure, check_kernel, tiles

# from sgl_kernel import fp8_blockwise_scaled_mm


def fp8_blockwise_scaled_mm(a, b, scale_a, scale_b, out_dtype):  # stand-in
    x = a.float() * scale_a.repeat_interleave(128, 1)[:, : a.shape[1]]
    w = (
        b.t().float()
        * scale_b.t()
        .repeat_interleave(128, 0)
        .repeat_interleave(128, 1)[: b.shape[1], : b.shape[0]]
    )
    return (x @ w.t()).to(out_dtype)


def pack(rows, columns):
    """Return a function that casts to FP8 with one scale per tile of this size."""

    def cast(x):
        high, wide = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
        padded = x.new_zeros(high * rows, wide * columns)
        padded[: x.shape[0], : x.shape[1]] = x
        blocks = padded.view(high, rows, wide, columns)
        amax = blocks.abs().amax((1, 3), keepdim=True)
        scale = torch.where(amax > 0, amax / 448, 1.0)
        codes = (blocks / scale).view_as(padded)[: x.shape[0], : x.shape[1]]
        return codes.to(torch.float8_e4m3fn), scale[:, 0, :, 0]

    return cast


def blockwise(a, scale_a, w, scale_w):
    return fp8_blockwise_scaled_mm(a, w.t(), scale_a, scale_w.t(), torch.float32)


def scales_of_other_tiles(a, scale_a, w, scale_w):
    return blockwise(a, scale_a, w, scale_w.roll(1, 1))


torch.manual_seed(0)
x, w = torch.randn(4, 256), torch.randn(256, 256)
x[:, 128:] *= 8
w[:, 128:] *= 8
options = {
    "like": linear,
    "inputs": {0: tiles("fp8_e4m3", 1, 128), 1: tiles("fp8_e4m3", 128, 128)},
    "pack": {0: pack(1, 128), 1: pack(128, 128)},
    "relations": ["one"],
}
check_kernel(blockwise, x, w, **options)
try:
    check_kernel(scales_of_other_tiles, x, w, **options)
except CheckFailure as failure:
    assert "scales_of_other_tiles is wrong" in failure.cause
