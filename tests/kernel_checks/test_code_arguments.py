"""Arguments that are codes already: 8-bit floats and packed integers; and formats as a list."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate.expected.narrow_floats import NARROW, same_bits, take_entries
from qgate.testing import CheckFailure, check_kernel

GENERATOR = torch.Generator().manual_seed(23)
A = torch.randn(12, 32, generator=GENERATOR)
B = torch.randn(8, 32, generator=GENERATOR)
E8M0 = getattr(torch, "float8_e8m0fnu", None)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


def _gemm(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float().T


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_arguments_of_8_bit_floats(dtype: torch.dtype) -> None:
    a, b = A.to(dtype), B.to(dtype)
    before = a.clone()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == dtype
        return _gemm(a, b)

    report = check_kernel(kernel, a, b, like=lambda a, b: a @ b.T, dtype=torch.bfloat16)
    assert same_bits(a, before)
    for words in ("3 of 12", "in another order", "strided views", "transposed", "the first of 8"):
        assert any(words in name for name in report.held), words
    assert not any("2^12" in name or "NaN" in name or "zero rows" in name for name in report.held)
    assert not report.left_out
    with pytest.raises(CheckFailure, match=r"1\.01 times the expected"):
        check_kernel(lambda a, b: 1.01 * _gemm(a, b), a, b, like=_product)

    def writing(a: Tensor, b: Tensor) -> Tensor:
        y = _gemm(a, b)
        a.view(torch.uint8).zero_()
        return y

    with pytest.raises(CheckFailure, match="changes argument 0 in place"):
        check_kernel(writing, a, b, like=_product)
    assert same_bits(a, before)


def test_a_wide_argument_beside_8_bit_floats_is_varied() -> None:
    report = check_kernel(_gemm, A, B.to(torch.float8_e4m3fn), like=_product)
    assert "values times 2^12 (argument 0)" in report.held


@pytest.mark.skipif(E8M0 is None, reason="torch 2.6 has no float8_e8m0fnu")
def test_scales_of_e8m0() -> None:
    def like(codes: Tensor, scales: Tensor) -> Tensor:
        return codes * scales.repeat_interleave(16, 1)

    def kernel(codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * scales.float().repeat_interleave(16, 1)

    assert E8M0 is not None
    codes = A.to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-3, 4, (12, 2), generator=GENERATOR).float()).to(E8M0)
    report = check_kernel(kernel, codes, scales, like=like)
    assert any("3 of 12" in name for name in report.held)
    with pytest.raises(CheckFailure, match="wrong"):
        check_kernel(lambda c, s: kernel(c, s.flip(0)), codes, scales, like=like)


@pytest.mark.parametrize("dtype", sorted(NARROW, key=str), ids=str)
def test_bits_of_8_bit_floats_are_copied_and_compared(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    values = codes.view(dtype)
    index = torch.tensor([3, 3, 0])
    assert torch.equal(take_entries(values, 1, index).view(torch.uint8), codes[:, [3, 3, 0]])
    assert same_bits(values, values.clone())
    other = codes.clone()
    other[5, 7] ^= 1
    assert not same_bits(values, other.view(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_packed_integers_are_arguments(dtype: torch.dtype) -> None:
    """Two or eight codes of 4 bits in an integer, the first one lowest."""
    count = 8 if dtype == torch.int32 else 2
    codes = torch.randint(16, (10, 16, count), generator=GENERATOR)
    packed = sum(codes[..., i] << 4 * i for i in range(count))
    assert isinstance(packed, Tensor)
    packed = (packed & 0xFF).to(torch.uint8).view(dtype) if count == 2 else packed.to(dtype)

    def unpacked(p: Tensor, x: Tensor) -> Tensor:
        return (
            torch.stack([p.to(torch.int64) >> 4 * i & 15 for i in range(count)], -1)
            .flatten(1)
            .to(x.dtype)
            - 8
        )

    def like(x: Tensor, p: Tensor) -> Tensor:
        return x @ unpacked(p, x).T

    def swapped(x: Tensor, p: Tensor) -> Tensor:
        return x @ unpacked(p, x).unflatten(1, (-1, 2)).flip(2).flatten(1).T

    x = torch.randn(6, 16 * count, generator=GENERATOR)
    report = check_kernel(like, x, packed, like=like)
    assert any("dimension 0 of argument 1" in name for name in report.held)
    with pytest.raises(CheckFailure, match="swapped is wrong"):
        check_kernel(swapped, x, packed, like=like)


def test_results_of_8_bit_floats() -> None:
    options: dict[str, Any] = {"like": lambda x: x, "output": "fp8_e4m3"}
    assert check_kernel(lambda x: x.to(torch.float8_e4m3fn), A, **options).held
    with pytest.raises(CheckFailure, match="the kernel is wrong"):
        check_kernel(lambda x: (x + 1).to(torch.float8_e4m3fn), A, **options)
    for factor in (2.0, 1.5):
        with pytest.raises(CheckFailure, match="the kernel is wrong"):
            check_kernel(lambda x, by=factor: (by * x).to(torch.float8_e4m3fn), A, **options)


# Formats as a list --------------------------------------------------------------------------------


def test_formats_may_be_a_list() -> None:
    def kernel(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return linear(qgate.quantize(x, "fp8_e4m3"), qgate.quantize(w, "mxfp8"), bias)

    bias = torch.randn(8, generator=GENERATOR)
    options: dict[str, Any] = {"like": linear, "relations": ["odd"]}
    by_position = check_kernel(kernel, A, B, bias, inputs={0: "fp8_e4m3", 1: "mxfp8"}, **options)
    for listed in (["fp8_e4m3", "mxfp8"], ("fp8_e4m3", "mxfp8", None)):
        assert check_kernel(kernel, A, B, bias, inputs=listed, **options) == by_position
    with pytest.raises(CheckFailure, match="kernel is wrong"):
        check_kernel(kernel, A, B, bias, inputs=[None, "mxfp8"], **options)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["mxfp8", "mxfp8", None], "inputs lists 3 formats for 2 arguments"),
        ("mxfp8", "inputs is 'mxfp8'; give a dict"),
        (["mxfp9"], "argument 0: unknown format 'mxfp9'"),
    ],
)
def test_lists_that_cannot_be_used(inputs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_kernel(_gemm, A, B, like=linear, inputs=inputs)


def test_codes_are_not_quantized_by_the_kernel() -> None:
    words = "argument 0 is torch.float8_e4m3fn already, whose values are fixed; leave it out"
    with pytest.raises(ValueError, match=re.escape(words)):
        check_kernel(_gemm, A.to(torch.float8_e4m3fn), B, like=_product, inputs=["fp8_e4m3"])
