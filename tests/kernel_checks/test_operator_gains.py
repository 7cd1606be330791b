"""Operators inside a kernel that are off by a factor: which one, and by how much."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from qgate.testing import CheckFailure, check_kernel

GENERATOR = torch.Generator().manual_seed(5)
X, UP, GATE, DOWN = (
    torch.randn(*shape, generator=GENERATOR) / 6
    for shape in ((24, 64), (96, 64), (96, 64), (32, 96))
)
Q, K, V = (torch.randn(2, 3, 24, 16, generator=GENERATOR) for _ in range(3))


def mlp(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, factor: float = 1.0) -> Tensor:
    return linear((silu(linear(x, gate)) * factor + linear(x, up)).tanh(), down)


def attention(q: Tensor, k: Tensor, v: Tensor, factor: float = 1.0) -> Tensor:
    return (q @ k.mT / 4 * factor).softmax(-1) @ v


@pytest.mark.parametrize("factor", [1.02, 0.995])
def test_an_activation_with_a_factor_is_named(factor: float) -> None:
    with pytest.raises(CheckFailure) as failure:
        check_kernel(
            lambda *args: mlp(*args, factor), X * 4, UP, GATE, DOWN, like=mlp, relations=[]
        )
    assert f"the result of silu is {factor:g} times as large as it should be" in failure.value.cause


def test_scores_with_a_factor_are_named() -> None:
    with pytest.raises(CheckFailure) as failure:
        check_kernel(
            lambda q, k, v: attention(q, k, v, 1.03), Q, K, V, like=attention, relations=[]
        )
    words = "the scores of the softmax are 1.03 times as large as they should be"
    assert words in failure.value.cause
