"""Code that asks whether it trains: faults in training mode alone are red, right code is green."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qgate
from qgate.gate.measuring.bench import Bench
from qgate.gate.segments.training_mode import training_mode, trains_as_it_runs
from qgate.modes.setups import ModelSetup
from tests.gate.benches import LLAMA, bench, mode_of
from tests.gate.test_gradient_code import Change, changed, faults_of, times, without_one
from tests.shares import share

UP = "model.layers.1.mlp.up_proj"


def plant(network: nn.Module, change: Change, *, of_gradient: bool) -> None:
    """Change what a module returns, or its gradient, in training mode alone."""
    module = network.get_submodule(UP)
    right = module.forward

    def forward(x: Tensor) -> Any:
        y = right(x)
        if not module.training:
            return y
        return changed(y, change) if of_gradient else change(y)

    module.forward = forward  # type: ignore[method-assign]


OF_RESULTS: dict[str, tuple[Change, str]] = {
    "1 % more": (times(1.01), r"1\.0(1|09\d*) times"),
    "a channel of zeros": (lambda y: torch.cat([0 * y[..., :1], y[..., 1:]], -1), "channel 0"),
    "one token": (without_one, "token 5"),
}
OF_GRADIENTS: dict[str, tuple[Change, str]] = {
    "1 % more": (times(1.01), "training mode"),
    "one token": (without_one, r"in training mode: no gradient arrives at .* tokens \(5"),
}


@share(3)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16"])
@pytest.mark.parametrize("name", OF_RESULTS)
def test_other_results_in_training_mode_are_named(name: str, mode: str) -> None:
    change, words = OF_RESULTS[name]
    of = bench(LLAMA, layers=2)
    plant(of.quantized(mode_of(of, mode)).model.module, change, of_gradient=False)
    (fault,) = faults_of(of, mode)
    assert f"{UP}:output is not in training mode what it is in evaluation: " in fault
    assert re.search(words, fault), fault


@share(3)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16"])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_other_gradients_in_training_mode_are_named(name: str, mode: str) -> None:
    change, words = OF_GRADIENTS[name]
    of = bench(LLAMA, layers=2)
    plant(of.quantized(mode_of(of, mode)).model.module, change, of_gradient=True)
    faults = faults_of(of, mode)
    assert faults
    assert re.search(words, faults[0]), faults
    assert "training mode" in faults[0]


class Dropping(nn.Module):
    """Drops values while it trains, by a function or by a module."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.dropout, self.by_function = nn.Dropout(0.5), by_function

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dropout(self.linear(x)))
        if self.by_function:
            return functional.dropout(y, 0.5, self.training)
        return y  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_function", [False, True])
def test_dropout_is_no_fault_of_training(by_function: bool) -> None:
    torch.manual_seed(0)
    samples = [torch.randn(16, 8) for _ in range(2)]
    model = qgate.Model(Dropping(by_function), samples, "dropping")
    state = torch.random.get_rng_state()
    assert trains_as_it_runs(model, samples[0]) is not by_function
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module.training for module in model.module.modules())
    of = Bench(ModelSetup("dropping"), _model=model)
    assert [f.about for row in of.gradients(of.mode("int8")) for f in row.conformance
            if f.differing] == []  # fmt: skip


def test_modules_that_trained_go_on_training() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)).eval()
    network[0].train()
    with training_mode(network):
        assert [module.training for module in network] == [True, False, False]
        assert network.training
    assert [module.training for module in network] == [True, False, False]
    assert not network.training
