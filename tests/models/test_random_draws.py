"""Networks that draw random numbers as they run: the same ones each time, and nobody else's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qgate.models.random_draws import draws_numbers, repeat_draws

X = torch.ones(4, 64)


class Dropping(nn.Module):
    """Drops values in evaluation, and refuses numbers below 0."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = functional.dropout(x, 0.5, training=True)
        if bool((x < 0).any()):
            raise ValueError("negative")
        return dropped


def test_draws_are_seen() -> None:
    assert draws_numbers(lambda: Dropping()(X))
    linear = nn.Linear(64, 4)
    assert not draws_numbers(lambda: linear(X))


def test_each_run_draws_the_same_numbers_in_a_copy_too() -> None:
    network = Dropping()
    assert not torch.equal(network(X), network(X))
    repeat_draws(network)
    first = network(X)
    torch.rand(1)
    assert torch.equal(network(X), first)
    assert torch.equal(copy.deepcopy(network)(X), first)


@pytest.mark.parametrize("x", [X, -X])
def test_the_numbers_of_others_stay_as_they_are(x: Tensor) -> None:
    network = Dropping()
    repeat_draws(network)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    try:
        network(x)
    except ValueError:
        assert x is not X
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(network(X), network(X)), "and a run that raised leaves nothing behind"
