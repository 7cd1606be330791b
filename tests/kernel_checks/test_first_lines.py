"""First lines about factors: named where they are more than rounding, with the digits known."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from qgate.causes.places import factor_words, range_words
from qgate.testing import CheckFailure, check_kernel
from tests.kernel_checks.coarse_kernels import tf32
from tests.kernel_checks.right_kernels import added_in

BF16 = torch.bfloat16
OPTIONS: dict[str, Any] = {"relations": ["permuted"]}


def normal(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


X, W = normal(1, (48, 256), (64, 256))


def cause_of(kernel: Any, *arguments: Tensor, like: Any) -> str:
    with pytest.raises(CheckFailure) as failure:
        check_kernel(kernel, *arguments, like=like, **OPTIONS)
    return str(failure.value.cause)


@pytest.mark.parametrize(
    ("factor", "noise", "words"),
    [(1.010183, 2e-4, "1.01"), (1.0023456, 1e-6, "1.0023"), (1.0023456, 2e-3, "1.002"),
     (0.99954, 1e-5, "0.99954"), (1.03, 0.0, "1.03"), (2.0, 0.1, "2")],
)  # fmt: skip
def test_a_factor_has_the_digits_that_are_known(factor: float, noise: float, words: str) -> None:
    assert factor_words(factor, noise) == words


@pytest.mark.parametrize("factor", [1.002, 0.998])
def test_a_factor_on_a_rounded_result_is_read_off(factor: float) -> None:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return (linear(x, w).float() * factor).to(BF16)

    cause = cause_of(kernel, X, W, like=linear)
    named = float(cause.partition("the result is ")[2].split(" times")[0])
    assert named == pytest.approx(factor, abs=1e-4)


def test_operands_in_tf32_are_not_called_float16_alone() -> None:
    operands = normal(2, (24, 256), (20, 256), dtype=torch.float32)
    cause = cause_of(lambda x, w: linear(tf32(x), tf32(w)), *operands, like=linear)
    assert re.search("rounded to (float16 or )?tf32", cause)


def test_coarse_sums_are_suggested_with_what_they_allow() -> None:
    operands = normal(6, (24, 96), (20, 96), dtype=torch.float32)
    cause = cause_of(added_in(torch.float16), *operands, like=linear)
    assert "errors look like rounding: sums in float16 or tf32" in cause
    assert re.search(r"allows \d+\.?\d* % of the RMS per element", cause)


def test_no_coarse_sums_are_suggested_for_a_factor_among_roundings() -> None:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return linear(tf32(x), tf32(w)) * 1.01

    cause = cause_of(kernel, *normal(3, (24, 256), (20, 256), dtype=torch.float32), like=linear)
    assert "1.01 times the expected one" in cause
    assert "declare" not in cause


@pytest.mark.parametrize("scale", [1.002, 1.01])
def test_a_softmax_scale_in_fused_attention_is_named(scale: float) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, scale=scale * q.shape[-1] ** -0.5)

    heads = normal(4, (1, 2, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32))
    cause = cause_of(kernel, *heads, like=scaled_dot_product_attention)
    named = float(cause.partition("argument 0 counts ")[2].split(" times")[0])
    assert named - 1 == pytest.approx(scale - 1, rel=0.1)


def test_one_weight_of_a_norm_is_named_by_its_column() -> None:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        changed = w.clone()
        changed[7:8] *= 1.02
        return rms_norm(x, (x.shape[-1],), changed)

    x, w = normal(5, (48, 128), (128,))
    cause = cause_of(kernel, x, w, like=lambda x, w: rms_norm(x, (x.shape[-1],), w))
    assert "column 7 of 128 is 1.0" in cause


def test_halves_that_are_swapped_are_named_as_ranges() -> None:
    cause = cause_of(lambda x, w: linear(x, w).roll(32, -1), X, W, like=linear)
    assert "columns 0 to 31 of 64 (one tile of 32) hold what columns 32 to 63" in cause


def test_a_range_of_factors_has_the_digits_that_tell_them_from_each_other_and_from_one() -> None:
    assert range_words(0.9992, 1.001) == "0.9992 to 1.001"
    assert range_words(1.000002, 1.00003) == "1.000002 to 1.00003"
    assert range_words(2.0, 2.5) == "2 to 2.5"
