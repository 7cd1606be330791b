"""gguf's quantizers and dequantizers against the formats that can express their blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

import qgate
from qgate.formats.options import Options
from tests.conformance.reading import (
    assert_same_codes,
    decode,
    near_ties,
    nibbles,
    normal_numbers,
)
from tests.formats.oracles import assert_same_bits

CHECKED: Counter[str] = Counter()
"""The number of tests that compare each format: its quantizer, its dequantizer, ties."""
EXPRESSED = ("BF16", "Q4_0", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")
REFUSED = {
    "not quantized, or numpy's own cast": ("F64", "F32", "F16", "I64", "I32", "I16", "I8"),
    "an offset per block that is no multiple of its scale": ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"),
    "integers of 3, 5 or 6 bits": ("Q5_0", "Q3_K", "Q6_K"),
    "values from a code book": (
        "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    ),
    "gguf neither quantizes nor dequantizes it": ("Q8_1", "Q8_K", "Q1_0"),
}  # fmt: skip
"""The types that no format of qgate expresses, by reason."""
SHAPE = (64, 256)
Test = Callable[[], None]


def compares(fmt: str) -> Callable[[Test], Test]:
    """Count a test that compares a format."""

    def count(test: Test) -> Test:
        CHECKED[fmt] += 1
        return test

    return count


def test_every_type_is_expressed_or_refused() -> None:
    refused = [name for names in REFUSED.values() for name in names]
    assert sorted([*EXPRESSED, *refused]) == sorted(kind.name for kind in Kind)


def blocks_of(packed: np.ndarray, kind: Kind) -> Tensor:
    """Return the bytes of each block."""
    return torch.from_numpy(packed.reshape(*packed.shape[:-1], -1, gguf.GGML_QUANT_SIZES[kind][1]))


def pack(*parts: Tensor) -> np.ndarray:
    """Return blocks of these parts as rows of bytes."""
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1).flatten(-2).numpy()


def halves(data: Tensor) -> Tensor:
    """Return codes from bytes that hold the first half of a block low and the second half high."""
    return nibbles(data).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def from_halves(codes: Tensor) -> Tensor:
    """Return bytes that hold the first half of a block low and the second half high."""
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def dequantize(packed: np.ndarray, kind: Kind) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return gguf.dequantize(packed, kind).astype(np.float64)


# ---------------------------------------------------------------- bf16


@compares("bf16")
def test_bf16_quantized() -> None:
    x = torch.cat(
        [normal_numbers((65536,)), torch.tensor([3.4e38, -3.4e38, torch.inf, 1e-40, -0.0])]
    )
    theirs = gguf.quantize(x.numpy(), Kind.BF16).view(np.uint16)
    ours = qgate.encode(x, "bf16", saturate=False).codes
    assert np.array_equal(ours.numpy(), theirs)


@compares("bf16")
def test_bf16_dequantized() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    ours = decode(torch.from_numpy(codes), "bf16")
    assert_same_bits(ours, dequantize(codes.view(np.uint8), Kind.BF16), "bf16")


# ---------------------------------------------------------------- Q8_0: int8, fp16 scales


@compares("int8")
def test_q8_0_quantized() -> None:
    x = normal_numbers(SHAPE)
    block = blocks_of(gguf.quantize(x.numpy(), Kind.Q8_0), Kind.Q8_0)
    ours = qgate.encode(x, "int8", granularity="block", block=32, rounding="away")
    assert ours.scales is not None
    assert torch.equal(ours.scales.half(), block[..., :2].clone().view(torch.float16)[..., 0])
    quotients = x.double() / ours.scales.double().repeat_interleave(32, dim=-1)
    theirs = block[..., 2:].clone().view(torch.int8).flatten(-2)
    assert_same_codes(ours.codes, theirs, near_ties(quotients, "int8"), "Q8_0")


@compares("int8")
def test_q8_0_dequantized() -> None:
    scales = torch.tensor([1.0, -1.0, 65504.0, 2.0**-24, 0.333, 0.0]).half()
    codes = torch.arange(-128, 128, dtype=torch.int8).unflatten(0, (-1, 32)).repeat(6, 1)
    repeated_scales = scales.repeat_interleave(8)
    packed = pack(repeated_scales[:, None], codes)
    options = {"granularity": "block", "block": 32, "narrow": False}
    ours = decode(codes, "int8", repeated_scales[:, None].float(), dtype=torch.float32, **options)
    assert_same_bits(ours.flatten(), dequantize(packed, Kind.Q8_0), "Q8_0")


# ---------------------------------------------------------------- Q4_0: int4, signed fp16 scales


@compares("int4")
def test_q4_0_quantized() -> None:
    x = normal_numbers(SHAPE)
    block = blocks_of(gguf.quantize(x.numpy(), Kind.Q4_0), Kind.Q4_0)
    rows = x.unflatten(-1, (-1, 32))
    # The largest element becomes -8, so that a scale has the sign that it does not have.
    largest = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    scales = largest / -8
    assert torch.equal(scales.half(), block[..., :2].clone().view(torch.float16))
    turned = rows * scales.sign()
    options = {"granularity": "block", "block": 32, "narrow": False}
    ours = qgate.encode(turned, "int4", scale=scales.abs(), **options)
    quotients = turned.double() / scales.abs().double()
    may_differ = near_ties(quotients, "int4", narrow=False)
    assert_same_codes(ours.codes, halves(block[..., 2:]).to(torch.int8) - 8, may_differ, "Q4_0")


@compares("int4")
def test_q4_0_dequantized() -> None:
    scales = torch.tensor([1.0, -1.0, 65504.0, 2.0**-24, -0.333, 0.0]).half()[:, None]
    codes = torch.arange(32).remainder(16).repeat(6, 1)
    packed = pack(scales, from_halves(codes))
    options = {"granularity": "block", "block": 32, "narrow": False}
    signed = (codes - 8).to(torch.int8)
    ours = decode(signed, "int4", scales.float(), dtype=torch.float32, **options)
    assert_same_bits(ours.flatten(), dequantize(packed, Kind.Q4_0), "Q4_0")


# ---------------------------------------------------------------- TQ: int2 without its lowest code

TERNARY: Options = {"granularity": "block", "block": 256}


def trits(data: Tensor, count: int) -> Tensor:
    """Return -1, 0 or 1 from bytes with `count` digits of base 3: all first ones, all second ones."""
    shifted = [(data.int() * 3**power % 256 * 3 >> 8) - 1 for power in range(count)]
    return torch.cat(shifted, dim=-1).to(torch.int8)


def ternary_codes(packed: np.ndarray, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the integers and scales of blocks of 256."""
    block = blocks_of(packed, kind)
    data, scales = block[..., :-2], block[..., -2:].clone().view(torch.float16)[..., 0].float()
    if kind is Kind.TQ1_0:
        parts = [trits(data[..., :32], 5), trits(data[..., 32:48], 5), trits(data[..., 48:], 4)]
        return torch.cat(parts, dim=-1).flatten(-2), scales
    rows = data.unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6])[:, None]
    return ((rows & 3).to(torch.int8) - 1).flatten(-4), scales


def check_ternary(kind: Kind) -> None:
    x = normal_numbers(SHAPE)
    packed = gguf.quantize(x.numpy(), kind)
    codes, scales = ternary_codes(packed, kind)
    ours = qgate.encode(x, "int2", rounding="away", **TERNARY)
    assert ours.scales is not None
    assert torch.equal(ours.scales.half().float(), scales)
    quotients = x.double() / ours.scales.double().repeat_interleave(256, dim=-1)
    assert_same_codes(ours.codes, codes, near_ties(quotients, "int2"), kind.name)
    values = decode(codes, "int2", scales, dtype=torch.float32, **TERNARY)
    assert_same_bits(values, dequantize(packed, kind), kind.name)


@compares("int2")
def test_tq1_0_quantized_and_dequantized() -> None:
    check_ternary(Kind.TQ1_0)


@compares("int2")
def test_tq2_0_quantized_and_dequantized() -> None:
    check_ternary(Kind.TQ2_0)


# ---------------------------------------------------------------- MXFP4


@compares("mxfp4_e2m1")
def test_mxfp4_quantized() -> None:
    x = normal_numbers(SHAPE)
    block = blocks_of(gguf.quantize(x.numpy(), Kind.MXFP4), Kind.MXFP4)
    ours = qgate.encode(x, "mxfp4_e2m1")
    assert ours.scales is not None
    assert torch.equal(ours.scales, block[..., 0])
    theirs = decode(halves(block[..., 1:]).flatten(-2), "fp4_e2m1")
    assert_same_codes(decode(ours.codes, "fp4_e2m1"), theirs, np.zeros(SHAPE, dtype=bool), "MXFP4")


@compares("mxfp4_e2m1")
def test_mxfp4_ties_go_to_the_smaller_number_there() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([ties, -ties, torch.zeros(17), torch.tensor([4.0])])
    theirs = dequantize(gguf.quantize(x.numpy(), Kind.MXFP4), Kind.MXFP4)
    ours = qgate.quantize(x, "mxfp4_e2m1").numpy()
    smaller = np.array([0, 0.5, 1, 1.5, 2, 3, 4])
    even = np.array([0, 1, 1, 2, 2, 4, 4])
    assert np.array_equal(theirs[:14], [*smaller, *-smaller])
    assert np.array_equal(ours[:14], [*even, *-even])
    assert np.signbit(ours[7])
    assert not np.signbit(theirs[7])  # and a number that becomes zero loses its sign


@compares("mxfp4_e2m1")
def test_mxfp4_dequantized() -> None:
    codes = torch.arange(32).remainder(16).to(torch.uint8).repeat(256, 1)
    scales = torch.arange(256).to(torch.uint8)[:, None]
    theirs = dequantize(pack(scales, from_halves(codes)), Kind.MXFP4).reshape(256, 32)
    ours = decode(codes, "mxfp4_e2m1", scales, dtype=torch.float32)
    assert_same_bits(ours[:255] + 0.0, theirs[:255] + 0.0, "MXFP4")
    # A scale of 0xFF is NaN; gguf reads it as 2^128.
    assert ours[255].isnan().all()
    assert not np.isnan(theirs[255]).all()


# ---------------------------------------------------------------- NVFP4, without a tensor's scale


@compares("nvfp4")
def test_nvfp4_dequantized() -> None:
    scales = torch.arange(0x7F).to(torch.uint8)
    padded = torch.cat([scales, scales[:1]]).unflatten(0, (-1, 4))
    codes = torch.arange(16).to(torch.uint8).expand(*padded.shape, 16)
    theirs = dequantize(pack(padded, from_halves(codes).flatten(-2)), Kind.NVFP4)
    one = torch.tensor(1.0)
    ours = decode(codes.flatten(-2), "nvfp4", padded, tensor_scale=one, dtype=torch.float32)
    assert_same_bits(ours.flatten() + 0.0, theirs + 0.0, "NVFP4")
    # E4M3's 0x7F is NaN; gguf reads it as 0.
    bad = torch.full((1, 4), 0x7F, dtype=torch.uint8)
    assert decode(codes[:1].flatten(-2), "nvfp4", bad, tensor_scale=one).isnan().all()
    assert not dequantize(pack(bad, from_halves(codes[:1]).flatten(-2)), Kind.NVFP4).any()
