"""Kernels whose scales or codes are wrong in one way that was published of real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from tests.kernel_checks.wrong_kernels import FP8_BY_ROW, FP8_TENSOR, W, WrongKernel, X, cast

GENERATOR = torch.Generator().manual_seed(11)
LONG = torch.randn(8, 256, generator=GENERATOR)
TALL = torch.randn(128, 256, generator=GENERATOR) / 16
INT4 = qgate.encode(TALL, "int4", granularity="block", block=64)
EXAMPLE = {"relations": ["one"]}
FLOOR = {1: qgate.Quantizer("mxfp8", scale_rule="floor")}


def with_scales(encoded: qgate.Encoded, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Decode an encoded tensor with its scales in another order."""
    assert encoded.scales is not None
    moved = move(encoded.scales).reshape(encoded.scales.shape)
    return replace(encoded, scales=moved.contiguous()).decode()


def moved(move: Callable[[Tensor], Tensor], words: str) -> WrongKernel:
    """Return a product with an encoded argument whose scales are in another order."""
    w = qgate.encode(TALL, "mxfp8")
    return WrongKernel(
        words,
        f"argument 1 is decoded with {words}",
        lambda x, w: linear(x, with_scales(w, move)),
        (LONG, w),
        inputs={},
        options={"relations": []},
    )


def codes_changed(change: Callable[[Tensor], Tensor], words: str) -> WrongKernel:
    def kernel(x: Tensor, w: qgate.Encoded) -> Tensor:
        assert w.scales is not None
        return linear(x, change(w.codes.float()) * w.scales.repeat_interleave(64, 1))

    return WrongKernel(words, f"argument 1 has {words}", kernel, (LONG, INT4), inputs={},
                       options=EXAMPLE)  # fmt: skip


def tiled(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 4, 32, scales.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)


def untiled(scales: Tensor) -> Tensor:
    rows, blocks = scales.shape
    return scales.reshape(rows // 128, blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)


def of_four_rows(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 4, 4, scales.shape[1] // 4).permute(0, 2, 3, 1)


def from_four_rows(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 4, scales.shape[1] // 4, 4).permute(0, 3, 1, 2)


def mx(w: Tensor, exponents: Tensor) -> Tensor:
    """Quantize blocks of 32 to E4M3 with these exponents."""
    scales = torch.exp2(exponents)
    blocks = w.reshape(len(w), -1, 32)
    return (cast((blocks / scales).clamp(-448, 448), "fp8_e4m3") * scales).reshape(w.shape)


def amax(w: Tensor) -> Tensor:
    return w.reshape(len(w), -1, 32).abs().amax(2, keepdim=True)


def nvfp4(w: Tensor, is_late: bool, is_inverse: bool) -> Tensor:
    """Quantize to NVFP4 with unrounded block scales, or with an inverted tensor scale."""
    right = w.abs().max() / 2688
    scale = 1 / right if is_inverse else right
    blocks = w.reshape(len(w), -1, 16)
    exact = (blocks.abs().amax(2, keepdim=True) / 6 / scale).clamp(max=448)
    stored = exact.to(torch.float8_e4m3fn).float()
    codes = cast((blocks / ((exact if is_late else stored) * scale)).clamp(-6, 6), "fp4_e2m1")
    return (codes * stored * right).reshape(w.shape)


def halves_in_pairs(w: Tensor) -> Tensor:
    return cast(w, "mxfp8").reshape(len(w), -1, 2, 16).transpose(2, 3).reshape(w.shape)


def pairs_in_halves(w: Tensor) -> Tensor:
    return cast(w, "mxfp8").reshape(len(w), -1, 16, 2).transpose(2, 3).reshape(w.shape)


def rounded_down(x: Tensor) -> Tensor:
    scales = x.abs().amax(-1, keepdim=True) / 448
    return cast(x / scales, "fp8_e4m3") * torch.exp2(torch.floor(torch.log2(scales)))


def by_tiles(w: Tensor) -> Tensor:
    factors = 0.5 + torch.rand(w.shape[0] // 32, w.shape[1] // 32, generator=torch.Generator())
    return cast(w, "mxfp8") * factors.repeat_interleave(32, 0).repeat_interleave(32, 1)


JUST_BELOW = W.clone()
JUST_BELOW[::3, 3] = 0.4995
LARGEST_FIRST = W.clone()
LARGEST_FIRST[0, 0] = 0.97
ONE = {1: "mxfp8"}


def weights(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, w: linear(x, change(w))


WRONG_SCALES = (
    moved(lambda s: s[:, torch.arange(s.shape[1]) // 2], "scales of groups of 64, not of 32"),
    moved(lambda s: s.T, "scales stored column by column, read row by row"),
    moved(lambda s: s.reshape(s.shape[::-1]).T, "scales stored row by row, read column by column"),
    moved(tiled, "scales stored in tiles of 128x4, read row by row"),
    moved(untiled, "scales stored row by row, read in tiles of 128x4"),
    moved(of_four_rows, "scales stored in groups of four rows, read row by row"),
    moved(from_four_rows, "scales stored row by row, read in groups of four rows"),
    codes_changed(lambda c: c - 1, "every code decoded 1 too low"),
    codes_changed(lambda c: c + 0.5, "every code decoded 0.5 too high"),
    codes_changed(lambda c: c % 16, "negative codes read without their sign"),
    codes_changed(lambda c: c.clamp(max=6), "1 of 15 codes decoded wrongly: 7 as 6"),
    WrongKernel("halves", "argument 1 is read in pairs, but stored as two halves",
                weights(halves_in_pairs), inputs=ONE, options=EXAMPLE),
    WrongKernel("pairs", "argument 1 is read as two halves of each block, but stored in pairs",
                weights(pairs_in_halves), inputs=ONE, options=EXAMPLE),
    WrongKernel("scales down", "argument 0 has scales rounded down to powers of two",
                lambda x, w: linear(rounded_down(x), cast(w, FP8_BY_ROW)),
                inputs={0: FP8_BY_ROW, 1: FP8_BY_ROW}, options=EXAMPLE),
    WrongKernel("nearest scales", "argument 1 has scales rounded to the nearest power of two",
                weights(lambda w: mx(w, torch.log2(amax(w) / 448).round())), inputs=ONE,
                options=EXAMPLE),
    WrongKernel("bfloat16 magnitudes", "argument 1 has scales made from magnitudes that were rounded",
                weights(lambda w: mx(w, torch.log2(amax(w).bfloat16().float()).floor() - 8)),
                (X, JUST_BELOW), inputs=FLOOR, options=EXAMPLE),
    WrongKernel("late scales", "argument 1 is quantized with block scales that are rounded to E4M3",
                weights(lambda w: nvfp4(w, True, False)), inputs={1: "nvfp4"}, options=EXAMPLE),
    WrongKernel("inverted scale", "argument 1 is quantized with the reciprocal of its tensor scale",
                weights(lambda w: nvfp4(w, False, True)), (X, W * 99), inputs={1: "nvfp4"},
                options=EXAMPLE),
    WrongKernel("no scale", "argument 0 is cast to fp8_e4m3 without a scale",
                lambda x, w: linear(cast(x, "fp8_e4m3"), cast(w, FP8_TENSOR)), (X / 50, W),
                inputs={0: FP8_TENSOR, 1: FP8_TENSOR}, options=EXAMPLE),
    WrongKernel("not declared", "argument 0 is quantized, and not declared to be: declare",
                lambda x, w: linear(cast(x, "nvfp4"), cast(w, "nvfp4")), inputs={1: "nvfp4"},
                options=EXAMPLE),
    WrongKernel("half of the columns", "columns 20 to 39 of 40 \\(to the end\\) are 1.3 times the expected",
                lambda x, w: linear(x, cast(w, "mxfp8")) * torch.tensor([1.0, 1.3])
                .repeat_interleave(20)[: len(w)], inputs=ONE, options={"relations": ["odd"]}),
    WrongKernel("own magnitude of a half", "columns 20 to 39 .*are about 4 times the expected",
                weights(lambda w: torch.cat([cast(w, "nvfp4")[:20], cast(w[20:], "nvfp4") * 4])),
                (X, LARGEST_FIRST), inputs={1: "nvfp4"}, options={"relations": []}),
    WrongKernel("scales of other tiles", "12 of 12 tiles of 32x32 are off by a factor each",
                by_tiles, (torch.cat([X, X])[:, :128][:96],), lambda x: x, {}, {"output": "mxfp8", "relations": []}),
    WrongKernel("zero points", "every 8th of 48 rows from 2 are off by a number each, .* a zero point",
                lambda x: cast(x) + (torch.arange(len(x)) % 8 == 2)[:, None] * torch.arange(
                    1.0, len(x) + 1)[:, None] / 9,
                (X,), lambda x: x, {}, {"output": "mxfp8", "relations": []}),
    WrongKernel("term of weights alone", "term 77 of the sum over 128 .* is lost",
                lambda x, w: linear(x * (torch.arange(128) != 77), cast(w, "nvfp4")),
                inputs={1: "nvfp4"}, options={"relations": []}),
    WrongKernel("weights of terms", "the terms of the sum over 128 .* have weights of their own, 0.5",
                lambda x, w: linear(x * torch.linspace(0.5, 2, 128), cast(w, "nvfp4")),
                inputs={1: "nvfp4"}, options={"relations": []}),
    WrongKernel("rows of others", "rows 24 to 47 of 48 \\(to the end\\) hold what rows 0 to 23 of 48 should",
                lambda x, w: torch.cat([linear(x[:24], cast(w))] * 2), inputs=ONE,
                options={"relations": []}),
    WrongKernel("rows swapped", "all 48 rows hold others: row 0 what 1 should, 1 what 0 should",
                lambda x, w: linear(x, cast(w))[torch.arange(48).reshape(-1, 2).flip(1).flatten()],
                inputs=ONE, options={"relations": []}),
    WrongKernel("scales of shards", "argument 1 is quantized in 4 parts of axis 0, each with a scale",
                weights(lambda w: torch.cat([cast(part, FP8_TENSOR) for part in w.chunk(4)])),
                inputs={1: FP8_TENSOR}, options={"relations": []}),
    WrongKernel("NaN in a row", "128 of .* results are NaN where finite ones are expected: row 3 of 48",
                lambda x: torch.where(torch.arange(len(x))[:, None] == 3, torch.nan, cast(x)),
                (X,), lambda x: x, {}, {"output": "mxfp8", "relations": []}),
)  # fmt: skip
