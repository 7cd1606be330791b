"""Scales as packages and checkpoints make them are named, and one wrong scale beside them is red."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate.testing import CheckFailure, check, check_kernel
from tests.kernel_checks.real.kernel import BF16, FP16, normal
from tests.shares import proof, share, slow_file

pytestmark = slow_file

BY_ROW = qgate.Quantizer("int8", granularity="channel", axis=0)
# Values of 16 bits have ratios at ties of rounding.
X, W = (x.float() for x in normal(31, (16, 256), (64, 256), dtype=FP16))
Scales = Callable[[Tensor], Tensor]


def _largest(w: Tensor) -> Tensor:
    largest = w.abs().amax(1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest)


def plain(w: Tensor) -> Tensor:
    return _largest(w) / 127


def by_reciprocal(w: Tensor) -> Tensor:
    return _largest(w) * torch.tensor(1 / 127)


def stored(dtype: torch.dtype) -> Scales:
    return lambda w: plain(w).to(dtype).float()


def _next(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales of which the fifth is the next number of a dtype."""
    moved = scales.clone()
    fifth = moved[5:6].to(dtype)
    moved[5:6] = torch.nextafter(fifth, torch.full_like(fifth, torch.inf)).float()
    return moved


def ratios(w: Tensor, scales: Tensor) -> Tensor:
    return w / scales


def times_factor(w: Tensor, _scales: Tensor) -> Tensor:
    return w * (127 / _largest(w))  # which torch computes as 1 / largest * 127


CONVENTIONS = {
    "scale amax/127, stored as bfloat16 after the codes were made": (plain, ratios, stored(BF16), BF16),
    "scale amax/127, stored as float16 after the codes were made": (plain, ratios, stored(FP16), FP16),
    "scale amax/127 in bfloat16": (stored(BF16), ratios, stored(BF16), BF16),
    "scale amax/127 in float16": (stored(FP16), ratios, stored(FP16), FP16),
    "scale amax*(1/127)": (by_reciprocal, ratios, by_reciprocal, BF16),
    "scale amax*(1/127), multiplied by the reciprocal of the largest and that of the format": (
        by_reciprocal, times_factor, by_reciprocal, BF16,
    ),
}  # fmt: skip


def cast_by(name: str, wrong: bool = False) -> Callable[[Tensor], Tensor]:
    for_codes, divided, decoding, dtype = CONVENTIONS[name]

    def cast(w: Tensor) -> Tensor:
        codes = divided(w, for_codes(w)).round().clamp(-127, 127)
        scales = decoding(w)
        return codes * (_next(scales, dtype) if wrong and len(w) > 5 else scales)

    return cast


@share(3)
@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_cast_by_it_is_named(name: str) -> None:
    report = check(cast_by(name)(W), W, format=BY_ROW)
    assert report.conventions["values"] == f"{name}, bit for bit"
    with pytest.raises(CheckFailure, match=r"row 5\b|scale"):
        check(cast_by(name, wrong=True)(W), W, format=BY_ROW)


IN_16_BITS = [name for name in CONVENTIONS if "float16" in name]


@share(4)
@pytest.mark.parametrize("name", IN_16_BITS)
def test_a_product_by_it_is_green_and_one_scale_a_step_off_is_red(name: str) -> None:
    def kernel(wrong: bool) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, w: linear(x, cast_by(name, wrong)(w))

    report = check_kernel(kernel(False), X, W, like=linear, inputs={1: BY_ROW}, relations=["one"])
    assert report.conventions["argument 1"] == name
    with pytest.raises(CheckFailure, match=r"column 5 of 64"):
        check_kernel(kernel(True), X, W, like=linear, inputs={1: BY_ROW}, relations=["one"])


@proof
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_scales_stored_in_16_bits_are_named_of_weights_of_16_bits(dtype: torch.dtype) -> None:
    x, w = X.to(dtype), W.to(dtype)
    half = "bfloat16" if dtype is BF16 else "float16"
    name = f"scale amax/127, stored as {half} after the codes were made"

    def kernel(x: Tensor, w: Tensor, wrong: bool = False) -> Tensor:
        return linear(x.double(), cast_by(name, wrong)(w.float()).double()).to(dtype)

    report = check_kernel(kernel, x, w, like=linear, inputs={1: BY_ROW}, relations=["one"])
    assert report.conventions["argument 1"] == name
    with pytest.raises(CheckFailure, match=r"column 5 of 64"):
        check_kernel(
            lambda x, w: kernel(x, w, True), x, w, like=linear, inputs={1: BY_ROW},
            relations=["one"],
        )  # fmt: skip
