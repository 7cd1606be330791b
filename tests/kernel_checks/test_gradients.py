"""Gradients of kernels against those of their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

import qgate
from qgate.testing import CheckFailure, check_kernel
from tests.shares import proof, share

GENERATOR = torch.Generator().manual_seed(9)
X = torch.randn(24, 64, generator=GENERATOR)
W = torch.randn(20, 64, generator=GENERATOR) / 8
MX = {0: "mxfp8", 1: "mxfp8"}


class Sides(NamedTuple):
    """The gradient of a result, the arguments, and what was made of them."""

    g: Tensor
    x: Tensor
    w: Tensor
    xq: Tensor
    wq: Tensor


Backward = Callable[[Sides], tuple[Tensor | None, Tensor | None]]


def gemm(backward: Backward) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a product of MXFP8 values with gradients of one's own."""

    class Gemm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ideal = qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8")
            ctx.save_for_backward(x, w, *ideal)
            return linear(*ideal)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return backward(Sides(g, *ctx.saved_tensors))

    def my_gemm(x: Tensor, w: Tensor) -> Tensor:
        result: Tensor = Gemm.apply(x, w)
        return result

    return my_gemm


def right(sides: Sides) -> tuple[Tensor, Tensor]:
    return sides.g @ sides.wq, sides.g.T @ sides.xq


def test_right_gradients_are_green_and_each_has_its_record() -> None:
    report = check_kernel(gemm(right), X, W, like=linear, inputs=MX, backward=True)
    assert list(report.gradients) == ["argument 0", "argument 1"]
    assert all(len(gradient.held) > 20 for gradient in report.gradients.values())
    assert "the gradient of argument 1 of my_gemm agrees at " in str(report)


@share(6)
@pytest.mark.parametrize(
    ("backward", "cause"),
    [
        (
            lambda s: (s.g @ s.wq, s.g.T @ s.xq * 1.01),
            "the gradient of argument 1 of my_gemm is wrong: the result is 1.01 times",
        ),
        (
            lambda s: (s.g @ s.w, s.g.T @ s.xq),
            "the gradient of argument 0 of my_gemm is wrong: argument 1 is not quantized to mxfp8",
        ),
        (
            lambda s: (s.g @ s.wq, s.g[:128].T @ s.xq[:128]),
            "160 terms, 128 to 287, of the sum over 288 (dimension 0 of argument 0, dimension 0 of "
            "the gradient of the result) are lost",
        ),
        (
            lambda s: (s.g @ s.wq, None),
            "my_gemm gives no gradient of argument 1: its result does not depend on it",
        ),
        (
            lambda s: (s.g @ s.wq, None if len(s.g) > 200 else s.g.T @ s.xq),
            "the gradient of argument 1 of my_gemm",
        ),
    ],
    ids=["a factor", "not quantized", "one tile", "none", "none beyond a tile"],
)
def test_a_wrong_gradient_is_red_and_names_its_argument(backward: Backward, cause: str) -> None:
    kernel = gemm(backward)
    check_kernel(kernel, X, W, like=linear, inputs=MX, relations=["one"])
    with pytest.raises(CheckFailure) as caught:
        check_kernel(kernel, X, W, like=linear, inputs=MX, backward=True, relations=["one", "long"])
    assert cause in caught.value.cause


def test_the_gradient_of_the_result_may_be_quantized() -> None:
    def quantized(sides: Sides) -> tuple[Tensor, Tensor]:
        return right(sides._replace(g=qgate.quantize(sides.g, "mxfp8")))

    options: dict[str, Any] = {"like": linear, "inputs": MX, "relations": ["one", "permuted"]}
    report = check_kernel(gemm(quantized), X, W, backward="mxfp8", **options)
    assert report.gradients["argument 0"].conventions["argument 2"] == "scale rule floor"
    with pytest.raises(
        CheckFailure, match=r"the gradient of the result is quantized.*declare backward='mxfp8'"
    ):
        check_kernel(gemm(quantized), X, W, backward=True, **options)


def test_parameters_of_modules_have_gradients_too() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            # The weight's gradient alone is 1 % too large.
            weight = self.weight + 0.01 * (self.weight - self.weight.detach())
            return linear(x, weight, self.bias)

    like = nn.Linear(32, 16)
    wrong = Scaled(32, 16)
    wrong.load_state_dict(like.state_dict())
    options: dict[str, Any] = {"like": like, "backward": True, "relations": ["one"]}
    report = check_kernel(like, X[:, :32], **options)
    assert list(report.gradients) == ["argument 0", "parameter weight", "parameter bias"]
    with pytest.raises(CheckFailure, match=r"the gradient of parameter weight of Scaled is wrong"):
        check_kernel(wrong, X[:, :32], **options)


def test_a_norm_in_16_bits_is_held_by_the_roundings_of_its_result() -> None:
    def norm(x: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), eps=1e-6)

    def without_the_mean(x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt().detach()
        return x * scale

    check_kernel(norm, X.bfloat16(), like=norm, backward=True, relations=["one"])
    with pytest.raises(CheckFailure, match=r"the gradient of argument 0 of without_the_mean"):
        check_kernel(without_the_mean, X, like=norm, backward=True, relations=["one"])


def test_what_has_no_gradient_is_left_out_or_refused() -> None:
    def shifted(x: Tensor, by: Tensor) -> Tensor:
        return x + by.detach()

    report = check_kernel(shifted, X, X[0], like=shifted, backward=True, relations=["one"])
    assert list(report.gradients) == ["argument 0"]
    reason = report.left_out["the gradient of argument 1"]
    assert reason == "the reference has none: its result does not depend on it"
    with pytest.raises(ValueError, match="backward=True is not allowed with packed arguments"):
        check_kernel(
            linear, X, qgate.encode(W, "mxfp8"), like=linear, backward=True,
            pack={1: lambda encoded: encoded.decode(torch.float32)},
        )  # fmt: skip


def test_a_backward_that_raises_is_red_and_one_of_no_format_is_refused() -> None:
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return linear(x, w)

    options: dict[str, Any] = {"like": linear, "relations": ["one"]}
    cause = "apply raised NotImplementedError for the gradient of argument 0: You must implement"
    with pytest.raises(CheckFailure, match=cause):
        check_kernel(Forward.apply, X, W, backward=True, **options)
    with pytest.raises(ValueError, match=r"backward: unknown format 'yes'"):
        check_kernel(linear, X, W, backward="yes", **options)


def test_a_reference_without_gradients_checks_none() -> None:
    def detached(x: Tensor, w: Tensor) -> Tensor:
        return linear(x, w).detach()

    with pytest.raises(ValueError, match="checks no gradient here: the reference has none"):
        check_kernel(linear, X, W, like=detached, backward=True, relations=["one"])


@proof
@pytest.mark.parametrize("is_causal", [False, True], ids=["all keys", "causal"])
def test_gradients_that_cancel_have_the_noise_of_what_cancels(is_causal: bool) -> None:
    """With one key the gradient of a query is zero: two numbers of the size of the values cancel."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The gradient of the first two queries alone is 1 % of what it adds up too large.
        late = q + 0.01 * (q - q.detach()) * (torch.arange(q.shape[2]) < 2)[:, None]
        return attention(late, k, v)

    q, k, v = (torch.randn(2, 3, 12, 16, generator=GENERATOR) for _ in range(3))
    options: dict[str, Any] = {"like": attention, "backward": True, "relations": ["one", "prefix"]}
    report = check_kernel(attention, q, k, v, **options)
    assert list(report.gradients) == ["argument 0", "argument 1", "argument 2"]
    with pytest.raises(CheckFailure, match="the gradient of argument 0 of wrong is wrong"):
        check_kernel(wrong, q, k, v, **options)
