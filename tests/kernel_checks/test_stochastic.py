"""Kernels that round at random: neighbors, no bias, and seeds that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

import qgate
from qgate.kernel_checks.stochastic import Neighbors
from qgate.testing import CheckFailure, check, check_kernel
from tests.shares import proof, share

GENERATOR = torch.Generator().manual_seed(11)
X = torch.randn(24, 64, generator=GENERATOR)
W = torch.randn(20, 64, generator=GENERATOR) / 8
CAST = qgate.Quantizer("mxfp4", rounding="stochastic")
NEAREST = qgate.Quantizer("mxfp4")
INT8 = {"granularity": "channel", "axis": 0}


def same(x: Tensor) -> Tensor:
    return x


@share(4)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mxfp8", {}), ("mxfp4", {}), ("nvfp4", {}), ("mxint8", {}), ("bf16", {}),
        ("fp8_e4m3", {}), ("fp8_e5m2", {"granularity": "tensor"}), ("int8", INT8),
        ("int4", {"granularity": "block", "block": 32}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_casts_are_green_in_every_format(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    cast = qgate.Quantizer(name, rounding="stochastic", **options)
    report = check_kernel(cast, X.to(dtype), like=same, output=cast)
    assert report.held == ["the example with 64 seeds"]
    assert report.conventions == {"result": "rounded at random, right on average"}
    if name != "bf16" or dtype == torch.float32:
        assert 0 < report.smallest_defect["a bias of all values, of the RMS"] < 0.01


@pytest.mark.parametrize("name", ["mxfp4", "fp8_e4m3", "int8"])
def test_neighbors_are_those_of_rounding_to_zero_and_of_its_mirror(name: str) -> None:
    """The oracle: of all values that the format has, the nearest from below and from above."""
    quantizer = qgate.Quantizer(name)
    exact = X[:2].double()
    beside = Neighbors.of(exact, quantizer)
    grid = quantizer(torch.linspace(-4, 4, 200_001)).unique().double()
    if name == "fp8_e4m3":
        places = torch.searchsorted(grid, exact)
        assert torch.equal(beside.below, grid[places - 1])
        assert torch.equal(beside.above, grid[places])
    assert bool(((beside.below <= exact) & (exact <= beside.above)).all())
    nearest = quantizer(X[:2]).double()
    middle = (beside.below + beside.above) / 2
    chosen = torch.where(exact < middle, beside.below, beside.above)
    is_tie = (exact - middle).abs() < 1e-9
    assert torch.allclose(torch.where(is_tie, nearest, chosen), nearest, rtol=1e-6, atol=0)


def shared_by_rows(x: Tensor) -> Tensor:
    beside = Neighbors.of(x.double(), CAST)
    chance = torch.rand(len(x), 1)
    return torch.where(chance < beside.share, beside.above, beside.below).float()


def with_few_bits(x: Tensor) -> Tensor:
    beside = Neighbors.of(x.double(), CAST)
    chance = torch.randint(0, 8, x.shape) / 8
    return torch.where(chance < beside.share, beside.above, beside.below).float()


def noisy(x: Tensor) -> Tensor:
    return NEAREST(x + torch.rand(x.shape) - 0.5)


def last_row_to_nearest(x: Tensor) -> Tensor:
    return torch.cat([CAST(x)[:-1], NEAREST(x)[-1:]])


class Counting:
    """A cast that takes its seed from the number of its call."""

    __name__ = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.manual_seed(self.calls)
        return CAST(x)


@share(3)
@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        (NEAREST, "does not round at random: 64 seeds give the same bits"),
        (torch.zeros_like, "values are neither neighbor of the exact value"),
        (noisy, "values are neither neighbor of the exact value"),
        (lambda x: CAST(x * 1.05), "neither neighbor of the exact value"),
        (shared_by_rows, "rounds values of one row by the same random numbers"),
        (lambda x: shared_by_rows(x.T).T, "neither neighbor"),
        (with_few_bits, "with_few_bits rounds with a bias"),
        (last_row_to_nearest, "does not round row 23 at random"),
        (Counting(), "counting gives other bits in a second call with the same seed"),
    ],
    ids=["nearest", "zeros", "noise", "a factor", "rows", "blocks", "bits", "one row", "seeds"],
)
def test_what_is_no_rounding_at_random_is_red_and_named(
    kernel: Callable[[Tensor], Tensor], cause: str
) -> None:
    with pytest.raises(CheckFailure) as caught:
        check_kernel(kernel, X, like=same, output=CAST)
    assert cause in caught.value.cause


def product(x: Tensor, w: Tensor) -> Tensor:
    return linear(CAST(x), NEAREST(w))


def test_a_product_of_arguments_rounded_at_random_is_right_on_average() -> None:
    options: dict[str, Any] = {"like": linear, "inputs": {0: CAST, 1: "mxfp4"}}
    report = check_kernel(product, X, W, **options)
    assert report.conventions == {"argument 0": "rounded at random, right on average"}
    for kernel, cause in (
        (lambda x, w: product(x, w) * 1.02, "the mean over 64 seeds is 1.02"),
        (lambda x, w: product(x[:, :-1], w[:, :-1]), "term 63 is missing in the sum over 64"),
        (lambda x, w: linear(NEAREST(x), NEAREST(w)), "does not round at random"),
        (lambda x, w: linear(CAST(x), w), "rounds with a bias"),
    ):
        with pytest.raises(CheckFailure) as caught:
            check_kernel(kernel, X, W, **options)
        assert cause in caught.value.cause


def test_a_norm_may_round_its_result_at_random() -> None:
    def norm(x: Tensor) -> Tensor:
        return rms_norm(x, (64,), eps=1e-6)

    check_kernel(lambda x: CAST(norm(x)), X, like=norm, output=CAST)
    with pytest.raises(CheckFailure, match=r"is 1\.0[12][0-9]* times the exact result"):
        check_kernel(lambda x: CAST(norm(x) * 1.02), X, like=norm, output=CAST)


def test_one_tensor_alone_cannot_be_checked_and_the_message_says_what_can() -> None:
    with pytest.raises(ValueError, match=r"check_kernel\(cast, x, like=lambda x: x, output=…\)"):
        check(CAST(X), X, format=CAST)


def test_what_else_was_asked_for_is_held_too() -> None:
    options: dict[str, Any] = {"like": same, "output": CAST}
    report = check_kernel(CAST, X, **options)
    single = float((CAST(X) - X).square().sum() / X.square().sum())
    assert report.error == pytest.approx(single, rel=0.2)
    with pytest.raises(CheckFailure, match="unquantized values, limit"):
        check_kernel(CAST, X, limit=1.01 * report.format_error, **options)
    with pytest.raises(ValueError, match="rounding at random has none of"):
        check_kernel(CAST, X, invariant=True, **options)


@proof
def test_gradients_beside_arguments_rounded_at_random_are_checked() -> None:
    class Gemm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            ctx.save_for_backward(x, w)
            return linear(CAST(x), w)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return g @ w, g.T @ CAST(x) * ctx.factor, None

    options: dict[str, Any] = {"like": linear, "inputs": {0: CAST}, "backward": True}
    report = check_kernel(lambda x, w: Gemm.apply(x, w, 1.0), X, W, **options)
    conventions = report.gradients["argument 1"].conventions
    assert conventions == {"argument 0": "rounded at random, right on average"}
    with pytest.raises(CheckFailure, match="the gradient of argument 1 of the kernel "):
        check_kernel(lambda x, w: Gemm.apply(x, w, 1.05), X, W, **options)
