"""Massive elements: what is far above the rest, by the reference alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.stats import counts, massive_beyond


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_channel(times: float, channels: int = 32) -> Tensor:
    """Rows of normal numbers, one channel of which is constant at so many times their rms."""
    x = normal(64, channels)
    x[:, 3] = times
    return x


def test_it_is_a_multiple_of_the_rms_of_the_rest() -> None:
    x = normal(50, 64)
    x[7, 9], x[3, 1], x[0, 0] = 1000.0, -400.0, 30.0
    ordinary = sorted(abs(value) for value in x.flatten().tolist())[: 3200 - 100]
    rms = math.sqrt(sum(value * value for value in ordinary) / len(ordinary))
    beyond = massive_beyond(x)
    assert beyond == pytest.approx(20 * rms, rel=1e-6)
    assert int((x.abs() > beyond).sum()) == 3


@pytest.mark.parametrize("channels", [32, 64, 896])
def test_the_published_case_is_massive_and_nothing_else_of_it(channels: int) -> None:
    x = with_channel(26.0, channels)
    massive = x.abs() > massive_beyond(x)
    assert massive[:, 3].all()
    assert int(massive.sum()) == 64


@pytest.mark.parametrize("times", [1e3, 1e6, 1e30])
def test_what_is_massive_does_not_raise_what_it_is_held_against(times: float) -> None:
    assert massive_beyond(with_channel(times)) == massive_beyond(with_channel(26.0))


@pytest.mark.parametrize(
    "x",
    [
        normal(512, 128),
        with_channel(16.0),
        torch.from_numpy(np.random.default_rng(0).laplace(size=(512, 128))),
        torch.nn.functional.silu(normal(512, 128) * 3),
        torch.zeros(64, 64),
        torch.full((64, 64), 7.0),
        torch.eye(64) * 1e6,
        torch.tensor([1.0, 1e9]),
        torch.tensor(5.0),
        torch.empty(0),
        torch.full((8, 8), math.nan),
    ],
    ids=[
        "normal",
        "outliers",
        "laplace",
        "silu",
        "zero",
        "constant",
        "sparse",
        "two",
        "one",
        "none",
        "nan",
    ],
)
def test_ordinary_tensors_have_none(x: Tensor) -> None:
    assert massive_beyond(x) == math.inf


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_the_unit_does_not_matter(factor: float) -> None:
    x = with_channel(26.0)
    assert massive_beyond(x * factor) == pytest.approx(massive_beyond(x) * factor, rel=1e-6)


def test_parts_are_one_tensor_and_what_is_not_finite_is_left_out() -> None:
    x = with_channel(26.0)
    whole = massive_beyond(x)
    assert massive_beyond(x.split(7)) == whole
    assert massive_beyond(iter(x.split(1))) == whole
    odd = torch.tensor([math.nan, math.inf, -math.inf])
    assert massive_beyond([x, odd]) == whole
    assert massive_beyond(x.double()) == pytest.approx(whole, rel=1e-6)
    assert massive_beyond(x.bfloat16()) == pytest.approx(whole, rel=1e-2)


def test_noise_moves_it_by_no_more_than_itself() -> None:
    x = with_channel(26.0)
    moved = x * (1 + 1e-6 * normal(64, 32, seed=1))
    assert massive_beyond(moved) == pytest.approx(massive_beyond(x), rel=1e-6)


def test_the_order_of_elements_is_nothing() -> None:
    x = with_channel(26.0).flatten()
    shuffled = x[torch.from_numpy(np.random.default_rng(0).permutation(len(x)))]
    assert massive_beyond(shuffled) == pytest.approx(massive_beyond(x), rel=1e-12)


@pytest.mark.parametrize(
    "x",
    [
        normal(512, 128),
        with_channel(26.0),
        with_channel(1e6, 896),
        torch.cat([normal(64, 32), torch.full((1, 32), 1e30)]),
        torch.zeros(64, 64),
        torch.full((64, 64), 7.0),
        torch.tensor([1.0, 1e9]),
        torch.empty(0),
        torch.tensor([math.nan, math.inf, 1.0]),
        with_channel(26.0).double() * 1e200,
        with_channel(26.0) * 1e-30,
    ],
)
def test_what_was_counted_gives_the_same(x: Tensor) -> None:
    """Compare counts with values that are read in passes."""
    narrow = x.float().bfloat16()
    assert massive_beyond(counts(narrow)) == pytest.approx(massive_beyond(narrow), rel=1e-6)
    assert massive_beyond(counts(x)) == pytest.approx(massive_beyond(x), rel=1e-6)
