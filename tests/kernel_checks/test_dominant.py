"""Inputs in which one term decides a sum: what hides below the rounding of a result is seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention

from qgate import Quantizer, quantize
from qgate.expected.derived import search_axes
from qgate.expected.dominant import dominant_inputs
from qgate.testing import CheckFailure, check_kernel
from tests.shares import share

BF16 = torch.bfloat16
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, 200, generator=GENERATOR).to(BF16)
LABELS = torch.randint(0, 100, (48,), generator=GENERATOR)
Q, K, V = (torch.randn(1, 3, 40, 16, generator=GENERATOR).to(BF16) for _ in range(3))


def raised_dims(like: Callable[..., Tensor], *arguments: Any) -> list[tuple[int, int] | None]:
    axes = search_axes(like, arguments)[0]
    return [variant.raised for variant in dominant_inputs(like, arguments, axes)]


def logsumexp(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


def mean(x: Tensor) -> Tensor:
    return x.abs().mean(-1)


def norm(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:])


def largest(x: Tensor) -> Tensor:
    return x.amax(-1)


def entropy(x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x, labels, reduction="none")


@pytest.mark.parametrize(
    ("like", "arguments", "dims"),
    [
        (logsumexp, (X,), [(0, 1)]),
        (norm, (X,), [(0, 1)]),
        (lambda x: x.cumsum(0), (X.float(),), [(0, 0)]),
        (entropy, (X, LABELS), [(0, 1)]),
        (linear, (X, X[:7]), [(0, 1)]),
        (scaled_dot_product_attention, (Q, K, V), [(1, 2), (0, 3)]),
        (lambda x, y: x * y, (X, X), []),
        (lambda x: x.logsumexp(-1), (X * math.inf,), []),
        (logsumexp, (X * 0,), []),
    ],
)
def test_dimensions_that_are_summed_over_get_an_input(
    like: Any, arguments: tuple[Tensor, ...], dims: list[tuple[int, int]]
) -> None:
    assert raised_dims(like, *arguments) == dims


def test_each_row_has_another_large_entry_and_the_last_comes_first() -> None:
    x = torch.randn(300, 200)
    variant = next(iter(dominant_inputs(logsumexp, [x], search_axes(logsumexp, [x])[0])))
    raised = variant.arguments[0]
    assert torch.equal((raised != x).sum(1), torch.ones(300, dtype=torch.long))
    columns = (raised != x).int().argmax(1).tolist()
    assert columns[:12] == [199, 0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16]
    assert {*columns[:200]} == {*range(200)}
    assert columns[200:] == columns[:100]


def test_entries_are_no_larger_than_their_dtype_can_square() -> None:
    """A norm of 20,000 channels is decided by entries of some hundred, as fp16 holds them."""
    x = torch.randn(4, 20_000).half()
    variants = list(dominant_inputs(norm, [x], search_axes(norm, [x])[0]))
    assert all(float(variant.arguments[0].max()) <= 256 for variant in variants)


def without(entry: int, like: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave out an entry of the last dimension of argument 0."""

    def kernel(x: Tensor, *rest: Tensor) -> Tensor:
        columns = [i for i in range(x.shape[-1]) if i != entry % x.shape[-1]]
        return like(x[..., columns], *rest)

    return kernel


def without_square(x: Tensor) -> Tensor:
    """Leave the last column out of the sum of squares alone."""
    wide = x.double()
    squares = wide[:, :-1].square().sum(-1, keepdim=True) / x.shape[-1]
    return (wide * (squares + torch.finfo(x.dtype).eps).rsqrt()).to(x.dtype)


def without_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k[..., :-1, :], v[..., :-1, :])


COLUMNS = [-1, 0, 63, 64, 128, 150]


@share(4)
@pytest.mark.parametrize("entry", COLUMNS)
@pytest.mark.parametrize("like", [logsumexp, mean, largest])
def test_a_column_that_is_not_read_is_named(like: Callable[..., Tensor], entry: int) -> None:
    x = torch.cat([X, X.flip(0), X.roll(7), X.roll(11), X.roll(13)])  # more rows than columns
    words = rf"entry {entry % 200} of 200.* along dimension 1 of argument 0 does not count"
    with pytest.raises(CheckFailure, match=words):
        check_kernel(without(entry, like), x, like=like, relations=["dominant"])


@pytest.mark.parametrize(
    ("kernel", "like", "arguments"),
    [
        (without(-1, entropy), entropy, (X, LABELS)),
        (without_square, norm, (X,)),
        (without_key, scaled_dot_product_attention, (Q, K, V)),
        (lambda x: without(-1, logsumexp)(x.float()), logsumexp, (X.float(),)),
    ],
)
def test_the_last_term_counts(kernel: Any, like: Any, arguments: tuple[Tensor, ...]) -> None:
    with pytest.raises(CheckFailure):
        check_kernel(kernel, *arguments, like=like, relations=["dominant"])


@pytest.mark.parametrize(
    ("like", "arguments"),
    [
        (logsumexp, (X,)),
        (mean, (X,)),
        (norm, (X,)),
        (entropy, (X, LABELS)),
        (scaled_dot_product_attention, (Q, K, V)),
        (lambda x: x.softmax(-1), (X,)),
    ],
)
def test_right_kernels_are_right_where_one_term_decides(like: Any, arguments: Any) -> None:
    report = check_kernel(like, *arguments, like=like, relations=["dominant"])
    assert any(name.startswith("one large entry in each row") for name in report.held)


def test_a_fixed_scale_leaves_large_entries_of_its_argument_out() -> None:
    fixed = Quantizer("int8", granularity="tensor", scale=0.05)

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return linear(quantize(x, fixed), w)

    x, w = X.float(), X[:5].float()
    report = check_kernel(kernel, x, w, like=linear, inputs={0: fixed}, relations=["dominant"])
    name = "one large entry in each row along dimension 1 of argument 0"
    assert report.left_out[name] == "int8 has no scale made from the values"
