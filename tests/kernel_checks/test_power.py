"""What a check can see: claimed defects are red, coarse sums keep their power, or it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm, scaled_dot_product_attention, silu

import qgate
from qgate.testing import CheckFailure, check_kernel
from tests.kernel_checks.right_kernels import added_in
from tests.shares import proof, share

FACTOR = "a factor on all values"
BF16, FP16 = torch.bfloat16, torch.float16
Kernel = Callable[..., Tensor]


def normal(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def times(kernel: Kernel, factor: float) -> Kernel:
    def scaled(*arguments: Tensor) -> Tensor:
        y = kernel(*arguments)
        return (y.double() * factor).to(y.dtype)

    return scaled


# Claims -------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return silu(linear(x, gate)) * linear(x, up)


def decoded(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, qgate.quantize(w, "int8").to(x.dtype))


X, W = normal(1, (24, 64), (20, 64))
HEADS = normal(2, (2, 24, 32), (2, 40, 32), (2, 40, 32))
MLP = normal(3, (24, 48), (40, 48), (40, 48))


def in_16_bits(arguments: list[Tensor], dtype: torch.dtype = BF16) -> list[Tensor]:
    return [argument.to(dtype) for argument in arguments]


def mxfp8(x: Tensor, w: Tensor) -> Tensor:
    return linear(qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8"))


MX: dict[str, Any] = {"inputs": {0: "mxfp8", 1: "mxfp8"}}
CLAIMS: dict[str, tuple[Kernel, list[Tensor], Kernel, dict[str, Any]]] = {
    "float32": (linear, [X, W], linear, {}),
    "mxfp8": (mxfp8, [X, W], linear, MX),
    "mxfp8 to bfloat16": (lambda x, w: mxfp8(x, w).to(BF16), [X, W], linear, MX),
    "bfloat16": (linear, in_16_bits([X, W]), linear, {}),
    "float16": (linear, in_16_bits([X, W], FP16), linear, {}),
    "result in int8": (
        lambda x, w: qgate.quantize(linear(x, w), "int8"), [X, W], linear, {"output": "int8"}
    ),
    "norm in bfloat16": (
        lambda x: rms_norm(x, (64,)), in_16_bits([X]), lambda x: rms_norm(x, (64,)), {}
    ),
    "gelu in bfloat16": (gelu, in_16_bits([X]), gelu, {}),
    "eager attention": (attention, in_16_bits(HEADS), attention, {}),
    "fused attention": (
        scaled_dot_product_attention, in_16_bits(HEADS), scaled_dot_product_attention, {}
    ),
    "eager MLP": (swiglu, in_16_bits(MLP), swiglu, {}),
    "decoded weights": (decoded, in_16_bits([X, W]), linear, {"inputs": {1: "int8"}}),
    "bfloat16 sums": (added_in(BF16), [X, W], linear, {"arithmetic": "bfloat16"}),
    "float16 sums": (added_in(FP16), [X, W], linear, {"arithmetic": "float16"}),
}  # fmt: skip


@share(8)
@pytest.mark.parametrize("name", CLAIMS)
def test_a_factor_just_above_the_claimed_one_is_seen(name: str) -> None:
    kernel, arguments, like, options = CLAIMS[name]
    options = {"like": like, "relations": ["permuted"], "inconclusive": "pass", **options}
    size = check_kernel(kernel, *arguments, **options).smallest_defect[FACTOR]
    assert 0 < size < 0.02
    for factor in (1 + 1.02 * size, 1 - 1.02 * size):
        with pytest.raises(CheckFailure):
            check_kernel(times(kernel, factor), *arguments, **options)


# Coarse sums --------------------------------------------------------------------------------------

LONG = normal(4, (24, 1024), (20, 1024))


def without_term(kernel: Kernel, term: int) -> Kernel:
    def lost(x: Tensor, w: Tensor) -> Tensor:
        if x.shape[-1] <= term:
            return kernel(x, w)
        columns = [index for index in range(x.shape[-1]) if index != term]
        return kernel(x[:, columns], w[:, columns])

    return lost


def with_scale(kernel: Kernel, dim: int, index: int, factor: float) -> Kernel:
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        y = kernel(x, w)
        if y.shape[dim] > index:
            y.select(dim, index).mul_(factor)
        return y

    return scaled


def rounded_operands(dtype: torch.dtype) -> Kernel:
    """Multiply operands of 16 bits and add in float32, as tensor cores do."""
    return lambda x, w: linear(x.to(dtype).float(), w.to(dtype).float())


COARSE = {
    "bfloat16": rounded_operands(BF16), "float16": added_in(FP16), "tf32": rounded_operands(FP16)
}  # fmt: skip


@share(3)
@pytest.mark.parametrize("arithmetic", COARSE)
def test_coarse_sums_keep_their_power(arithmetic: str) -> None:
    kernel = COARSE[arithmetic]
    options: dict[str, Any] = {
        "like": linear, "arithmetic": arithmetic, "relations": ["permuted"]
    }  # fmt: skip
    report = check_kernel(kernel, *LONG, **options)
    assert report.smallest_defect[FACTOR] < 0.01
    for faulty, words in (
        (times(kernel, 1.01), r"the result is 1\.0\d* times the expected one"),
        (without_term(kernel, 700), r"term 700 of the sum over 1,024 .* is lost"),
        (with_scale(kernel, 0, 7, 1.1), r"row 7 of 24 is 1\.\d+ times the expected"),
        (with_scale(kernel, 1, 9, 0.9), r"column 9 of 20 is 0\.9\d* times the expected"),
    ):
        with pytest.raises(CheckFailure, match=words):
            check_kernel(faulty, *LONG, **options)


@proof
def test_a_softmax_scale_is_seen_under_coarse_sums() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 1.02, k, v)

    heads = normal(5, (4, 48, 32), (4, 64, 32), (4, 64, 32))
    options: dict[str, Any] = {"like": attention, "arithmetic": "tf32", "relations": ["permuted"]}
    check_kernel(attention, *heads, **options)
    with pytest.raises(CheckFailure, match=r"argument 0 counts 1\.0[12]\d* times"):
        check_kernel(kernel, *heads, **options)


# Inconclusive -------------------------------------------------------------------------------------


def test_a_check_that_could_not_see_a_factor_of_1_percent_is_inconclusive() -> None:
    kernel = added_in(BF16)
    x, w = normal(6, (4, 256), (6, 256))
    options: dict[str, Any] = {"like": linear, "arithmetic": "bfloat16", "relations": ["permuted"]}
    with pytest.raises(
        CheckFailure, match=r"^inconclusive: .*a factor of 1 % .*inconclusive='pass'"
    ):
        check_kernel(kernel, x, w, **options)
    report = check_kernel(kernel, x, w, inconclusive="pass", **options)
    assert report.smallest_defect[FACTOR] > 0.01
    assert "inconclusive, and passed as inconclusive='pass'" in str(report)


E5M2 = qgate.Quantizer("fp8_e5m2", granularity="tensor", scale=1.0)


def test_few_codes_that_no_factor_of_1_percent_moves_are_inconclusive() -> None:
    """Of eight values of e5m2 none is near a boundary; of 4,096 some are."""
    x = torch.tensor([[1.0, 2.0, -0.5, 4.0], [0.25, -1.0, 8.0, -2.0]])
    options: dict[str, Any] = {"like": torch.neg, "relations": []}

    def kernel(x: Tensor) -> Tensor:
        return (-x).to(torch.float8_e5m2)

    for declared in ({}, {"output": E5M2}):
        with pytest.raises(CheckFailure, match=r"^inconclusive: .* 1 % .*, one of \d+ % would"):
            check_kernel(kernel, x, **options, **declared)
        report = check_kernel(kernel, x, inconclusive="pass", **options, **declared)
        assert 0.01 < report.smallest_defect[FACTOR] <= 0.2
        many = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        assert check_kernel(kernel, many, **options, **declared).smallest_defect[FACTOR] <= 0.01


def test_the_smallest_factor_of_codes_is_red_and_a_smaller_one_is_not() -> None:
    (x,) = normal(8, (40, 8))
    int8 = qgate.Quantizer("int8", granularity="tensor", scale=0.05)

    def kernel(x: Tensor, factor: float = 1.0) -> Tensor:
        return qgate.quantize(x * factor, int8)

    options: dict[str, Any] = {"like": lambda x: x, "output": int8, "relations": []}
    smallest = check_kernel(kernel, x, **options).smallest_defect[FACTOR]
    for factor in (1 + smallest, 1 - smallest):
        with pytest.raises(CheckFailure):
            check_kernel(lambda x, f=factor: kernel(x, f), x, **options)
    check_kernel(lambda x: kernel(x, 1 + smallest / 50), x, **options)


def test_codes_under_coarse_sums_are_inconclusive() -> None:
    """Sums in bfloat16 leave codes of int8 several values each."""
    kernel = added_in(BF16)
    x, w = normal(6, (4, 256), (6, 256))
    int8 = qgate.Quantizer("int8", granularity="tensor", scale=0.5)

    def to_codes(x: Tensor, w: Tensor) -> Tensor:
        return qgate.quantize(kernel(x, w).float(), int8)

    options: dict[str, Any] = {"like": linear, "arithmetic": "bfloat16", "output": int8}
    with pytest.raises(CheckFailure, match=r"^inconclusive: "):
        check_kernel(to_codes, x, w, relations=["permuted"], **options)


def test_other_values_of_inconclusive_are_refused() -> None:
    with pytest.raises(ValueError, match=r"value of inconclusive .ok.. Allowed: fail, pass"):
        check_kernel(linear, X, W, like=linear, inconclusive="ok")


def test_smallest_defects_are_written_in_percent() -> None:
    text = str(check_kernel(linear, X, W, like=linear, relations=["permuted"]))
    assert "smallest defect seen, a factor on all values: 0.0" in text
    assert " % of the RMS" in text
