"""Kernels whose scales belong to other groups, or lie elsewhere in memory, than theirs should.

The right ones are written after the public rules: SageAttention's scales by thread and warp and its
smoothing of K (sageattention/triton/quant_per_thread.py), the tiles of block scales of cuBLAS and
CUTLASS, and DeepGEMM's packed columns (deep_gemm/utils/layout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention

import qgate
from qgate.formats.groups import key_threads, query_threads
from qgate.formats.scale_layouts import (
    BY_COLUMN,
    PACKED_BY_COLUMN,
    TILES_OF_8X4,
    TILES_OF_128X4,
    ScaleLayout,
)
from qgate.testing import quantized
from tests.kernel_checks.pairs import EXAMPLE, Kernel, Pair, normal

Q_THREADS = qgate.Quantizer("int8", groups=query_threads(32))
K_THREADS = qgate.Quantizer("int8", groups=key_threads(64))
BY_THREAD = {0: Q_THREADS, 1: K_THREADS}
Q, K, V = (normal(1, 1, 64, 16) for _ in range(3))
SHARED = K + 3 * normal(1, 1, 1, 16)
"""Keys with a large component that all tokens share."""


def fragments(x: Tensor, warp: int, *inner: int) -> Tensor:
    """Split tokens into warps, and these as threads hold them: [..., warp, i, *inner, d]."""
    whole = pad(x, (0, 0, 0, -x.shape[-2] % warp))
    return whole.unflatten(-2, (-1, warp // torch.Size(inner).numel(), *inner))


def int8(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes with ties away from zero, and scales with 1e-7 added."""
    scale = amax / 127 + 1e-7
    ratios = x / scale
    return (ratios + 0.5 * torch.where(ratios >= 0, 1.0, -1.0)).trunc(), scale


def joined(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(*like.shape[:-2], -1, like.shape[-1])[..., : like.shape[-2], :]


def queries(x: Tensor, read: Kernel = lambda scale: scale) -> Tensor:
    """Quantize by the threads that hold every eighth query of a warp of 32."""
    tokens = fragments(x, 32, 8)
    codes, scale = int8(tokens, tokens.abs().amax((-3, -1), keepdim=True))
    return joined(codes * read(scale), x)


def keys(x: Tensor, read: Kernel = lambda scale: scale) -> Tensor:
    """Quantize by the threads that hold two neighbors of every eight keys of 64."""
    tokens = fragments(x, 64, 4, 2)
    codes, scale = int8(tokens, tokens.abs().amax((-4, -2, -1), keepdim=True))
    return joined(codes * read(scale), x)


def by_warp(x: Tensor, tokens: int = 32) -> Tensor:
    whole = fragments(x, tokens, 1)
    codes, scale = int8(whole, whole.abs().amax((-3, -2, -1), keepdim=True))
    return joined(codes * scale, x)


def attention(of_queries: Kernel = queries, of_keys: Kernel = keys) -> Kernel:
    return lambda q, k, v: scaled_dot_product_attention(of_queries(q), of_keys(k), v)


def next_group(scale: Tensor) -> Tensor:
    """Take the scale of the group before in the order of memory."""
    return scale.reshape(*scale.shape[:2], -1).roll(1, -1).reshape(scale.shape)


def first_threads(scale: Tensor) -> Tensor:
    """Take the scale with the number of the warp, not of the thread."""
    flat = scale.reshape(*scale.shape[:2], -1)
    warps = torch.arange(scale.shape[2]).reshape(-1, *[1] * (scale.dim() - 3))
    return flat[..., warps].expand(scale.shape)


def one_row_on(x: Tensor) -> Tensor:
    """Quantize with the thread of the next row."""
    moved = torch.cat([x[..., :1, :] * 0, x], -2)
    return queries(moved)[..., 1:, :]


def smoothed(k: Tensor, *dims: int) -> Tensor:
    return k - k.mean(dims, keepdim=True)


def smooth_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = quantized("k", smoothed(k, -2), K_THREADS)
    return scaled_dot_product_attention(q, k, v)


def with_means(*dims: int) -> Kernel:
    return attention(of_keys=lambda k: keys(smoothed(k, *dims)))


# Products with scales in memory -------------------------------------------------------------------

X = normal(8, 256)
WEIGHT = normal(72, 256) * (1.5 * normal(72, 1)).exp()
MX = qgate.encode(WEIGHT, "mxfp8")


def elements(encoded: qgate.Encoded) -> Tensor:
    return encoded.codes.view(torch.float8_e4m3fn).float()


def stored(layout: ScaleLayout) -> Callable[[Any], Any]:
    def pack(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
        assert encoded.scales is not None
        return elements(encoded), layout.store(encoded.scales)

    return pack


def tiles_by_hand(x: Tensor, codes: Tensor, memory: Tensor) -> Tensor:
    """Multiply as cuBLAS does: [row tile, block tile, 32 rows, 4 of 32 rows, 4 blocks]."""
    rows, blocks = codes.shape[0], codes.shape[1] // 32
    down, across = -(-rows // 128), -(-blocks // 4)
    whole = pad(memory, (0, max(0, down * across * 512 - memory.numel())))[: down * across * 512]
    tiles = whole.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    exponents = tiles.reshape(down * 128, across * 4)[:rows, :blocks].float() - 127
    return linear(x, codes * exponents.exp2().repeat_interleave(32, 1)[:, : codes.shape[1]])


def columns_by_hand(x: Tensor, codes: Tensor, memory: Tensor) -> Tensor:
    """Multiply as DeepGEMM does: int32 words of four blocks, column by column."""
    rows, blocks = codes.shape[0], codes.shape[1] // 32
    words = memory.view(torch.int32)
    aligned = -(-rows // 4) * 4
    words = pad(words, (0, max(0, -(-blocks // 4) * aligned - len(words))))
    of_columns = words[: -(-blocks // 4) * aligned].reshape(-1, aligned)[:, :rows].T
    exponents = torch.stack([of_columns >> 8 * n & 255 for n in range(4)], -1).flatten(1)
    return linear(x, codes * (exponents[:, :blocks] - 127.0).exp2().repeat_interleave(32, 1))


def product(kernel: Kernel, layout: ScaleLayout) -> Kernel:
    return lambda x, w: kernel(x, *stored(layout)(w))


def in_memory(name: str, words: str, kernel: Kernel, right: ScaleLayout, wrong: Any) -> Pair:
    return Pair(
        name, f"argument 1 is decoded with scales stored {words}",
        product(kernel, right), product(kernel, wrong), (X, MX), linear, {}, {"relations": ["one"]},
    )  # fmt: skip


BY_ROW_MEMORY = ScaleLayout("row by row", (1, 1), lambda r, b, _rows, blocks: r * blocks + b)


def of_threads(name: str, words: str, wrong: Kernel) -> Pair:
    return Pair(
        name, words, attention(), wrong, (Q, K, V), scaled_dot_product_attention, BY_THREAD, EXAMPLE
    )  # fmt: skip


def of_means(name: str, words: str, wrong: Kernel) -> Pair:
    return Pair(
        name, words, with_means(-2), wrong, (Q, SHARED, V), smooth_attention, {0: Q_THREADS},
        EXAMPLE,
    )  # fmt: skip


PAIRS = (
    of_threads("warp for thread of Q", "argument 0 has one scale per 32 tokens, not one per every eighth token of 32",
               attention(of_queries=by_warp)),
    of_threads("warp for thread of K", "argument 1 has one scale per 64 tokens, not one per two of every eight",
               attention(of_keys=lambda k: by_warp(k, 64))),
    of_threads("threads of K for Q", "argument 0 has one scale per two of every eight tokens of 64, not",
               attention(of_queries=keys)),
    of_threads("neighbors of a thread", "argument 1 has one scale per 16 tokens, not",
               attention(of_keys=lambda k: by_warp(k, 16))),
    of_threads("thread of the next row", "argument 0 has groups that begin one row early, not",
               attention(of_queries=one_row_on)),
    of_threads("scales of the next thread", "argument 1 is decoded with every scale moved to the next group",
               attention(of_keys=lambda k: keys(k, next_group))),
    of_threads("scale of the warp's number", "argument 0 is decoded as if it had one scale per 32 tokens, not",
               attention(of_queries=lambda q: queries(q, first_threads))),
    of_means("K not smoothed", "the mean over dimension 2 before stage k is left out", attention()),
    of_means("K smoothed over its channels", "the mean before stage k is over dimension 3, not dimension 2",
             with_means(-1)),
    of_means("K smoothed by one number", "the mean before stage k is over all dimensions, not",
             with_means(0, 1, 2, 3)),
    in_memory("tiles of 128x4 not applied", "row by row, read in tiles of 128x4",
              tiles_by_hand, TILES_OF_128X4, BY_ROW_MEMORY),
    in_memory("tiles of 8x4 for 128x4", "in tiles of 8x4, read in tiles of 128x4",
              tiles_by_hand, TILES_OF_128X4, TILES_OF_8X4),
    in_memory("packed columns not applied", "row by row, read in columns of four blocks",
              columns_by_hand, PACKED_BY_COLUMN, BY_ROW_MEMORY),
    in_memory("columns not packed", "in padded columns, read in columns of four blocks",
              columns_by_hand, PACKED_BY_COLUMN, BY_COLUMN),
    in_memory("tiles for packed columns", "in tiles of 128x4, read in columns of four blocks",
              columns_by_hand, PACKED_BY_COLUMN, TILES_OF_128X4),
)  # fmt: skip
