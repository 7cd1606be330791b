"""A matrix product in Triton, to record what `tl.dot` returns on a device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _product(
    a, b, y, depth,
    rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, imprecise: tl.constexpr,
    apart: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, rows), tl.arange(0, columns), tl.arange(0, block)
    sums = tl.zeros((rows, columns), tl.float32)
    for start in range(0, depth, block):
        x = tl.load(a + m[:, None] * depth + start + k[None, :])
        w = tl.load(b + n[None, :] * depth + start + k[:, None])
        if half:
            sums += tl.dot(x, w, out_dtype=tl.float16)
        elif apart:
            sums += tl.dot(x, w, max_num_imprecise_acc=imprecise)
        else:
            sums = tl.dot(x, w, sums, max_num_imprecise_acc=imprecise)
    tl.store(y + m[:, None] * columns + n[None, :], sums)


def dot(
    a: Tensor, b: Tensor, block: int, imprecise: int = 0, apart: bool = False, half: bool = False
) -> Tensor:
    """Return the float32 product of `a` [M, K] and `b` [N, K].

    block       places of K of one `tl.dot`
    imprecise   `max_num_imprecise_acc`: products of FP8 that are added before a sum in float32
    apart       sums of blocks are added outside of `tl.dot`
    half        sums of a block are float16, and added outside of `tl.dot`
    """
    y = torch.empty(len(a), len(b), device=a.device)
    _product[(1,)](a, b, y, a.shape[1], len(a), len(b), block, imprecise, apart, half)
    return y
