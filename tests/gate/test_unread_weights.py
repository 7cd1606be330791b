"""Weights of a reference that nothing reads, beside those that have nothing to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qgate import Model
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.self_checks import unread_weight
from qgate.modes.setups import ModelSetup


class Copied(nn.Linear):
    """A layer that computes with a copy of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("copied", self.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.copied, self.bias)


class Two(nn.Module):
    """The second layer sees what `share` of the first one's output leaves."""

    def __init__(self, second: nn.Linear, share: float) -> None:
        super().__init__()
        self.first, self.second, self.share = nn.Linear(8, 8), second, share

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y + self.second(self.share * y)


@pytest.mark.parametrize(
    ("second", "share", "unread"),
    [
        (nn.Linear(8, 8), 1.0, ""),
        # As in the first decoder layer of DETR, whose queries begin as zeros.
        (nn.Linear(8, 8), 0.0, ""),
        (Copied(8), 1.0, "second"),
    ],
)
def test_a_layer_that_reads_no_weight_is_named_unless_it_sees_zeros(
    second: nn.Linear, share: float, unread: str
) -> None:
    sample = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    model = Model(Two(second, share), [sample], "two")
    assert unread_weight(Bench(ModelSetup("two"), _model=model)) == unread
