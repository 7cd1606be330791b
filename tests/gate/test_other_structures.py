"""Gates of right models of many structures are green, and a fault in one of them is red."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qgate
from tests.campaigns.first_lines.planting import (
    Change,
    Fault,
    Plant,
    after,
    attribute,
    first_line_of,
    instead,
    set_at,
    stored,
    times,
)
from tests.gate.other_structures import MODES, STRUCTURES, model_of
from tests.gate.structure_parts import WORDS
from tests.gate.structures_of_training import ScaleOfTheLayerBefore
from tests.shares import share

SUITES = ("forward", "relations", "gradients")
NO_EFFECT = {("native bfloat16", "bf16")}
"""Modes that change nothing of a model, which is red."""
REFUSED = {("mixed precision", "bf16"), ("mixed precision", "fp16")}
"""Modes in a dtype that a model's own code does not take: it casts to another one."""

structure = functools.cache(model_of)


def _nothing(_network: nn.Module) -> None:
    """Plant no fault."""


@share(one_in=16, by=("mode", "suite"))
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_right_model_is_green(name: str, mode: str, suite: str, tmp_path: Path) -> None:
    line = first_line_of(structure(name), mode, _nothing, suite, tmp_path)
    if (name, mode) in NO_EFFECT and suite == "forward":
        assert "is not in effect" in line
    elif (name, mode) in REFUSED and suite != "relations":
        assert "cannot run" in line
        assert "mixed dtype" in line
    else:
        assert line == ""


def _equal_weights(right: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Let experts count fully, whatever the router gives them."""

    def choose(rows: Tensor) -> Any:
        chosen, weights = right(rows)
        return chosen, [torch.ones_like(weight) for weight in weights]

    return choose


def _last_states(factor: float) -> Plant:
    """Change the last states that a recurrent module returns beside those of all tokens."""

    def plant(network: nn.Module) -> None:
        module: Any = network.get_submodule("recurrent")
        right = module.forward

        def forward(*args: Any) -> Any:
            states, last = right(*args)
            return states, last * factor

        module.forward = forward

    return plant


class _OtherGradient(torch.autograd.Function):
    """Pass a tensor on, and a gradient that is too large."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.05


def _gradient(x: Tensor) -> Tensor:
    result = _OtherGradient.apply(x)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


def _mixed_rows(share: float) -> Change:
    return lambda x: x + share * x.mean(0, keepdim=True)


def _without_bias(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)


def _product_too_large(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight) * 1.01 + module.bias


def _rate_too_large(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight * (1.01 / module.in_features**0.5), module.bias)


def _another_entry(nearest: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda codes: (nearest(codes) + (codes[:, 0] > 0.4)) % 16


def _without_adapter(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


_ONES: Change = torch.ones_like
_FAULTS: tuple[tuple[str, str, Plant, str, str], ...] = (
    ("graph", "messages are too large", after("layers.0.message", times(1.02)), "int8 bf16", "forward"),
    ("graph", "gradients of messages are too large", after("layers.0.message", _gradient), "int8 bf16", "gradients"),
    ("unit embeddings", "gradients of sums are too large", after("mixing", _gradient), "int8 bf16 fp16", "gradients"),
    ("two towers", "one image is wrong", after("image_tower", set_at((1,), times(1.1))), "int8 bf16", "forward"),
    ("two towers", "images depend on each other", after("image_tower", _mixed_rows(0.01)), "int8", "relations"),
    ("recommender", "a row of a table is wrong", stored("bags.0", "weight", set_at((slice(0, 8),), times(1.05))), "int8 bf16", "forward"),
    ("fourier operator", "a bias is dropped behind a strided input", instead("head", _without_bias), "bf16 fp16", "forward"),
    ("fourier operator", "a product of a strided input is too large", instead("head", _product_too_large), "bf16 fp16", "forward"),
    ("vocoder", "one tap is wrong", stored("up.0", "weight", set_at((..., 3), times(1.05))), "int8 bf16", "forward"),
    ("expert choice", "a router's weight is not applied", attribute("", "_choose", _equal_weights), "int8 bf16", "forward"),
    ("limited experts", "a router's weight is not applied", attribute("", "_choose", _equal_weights), "int8 bf16", "forward"),
    ("diffusion", "a gate is lost", after("blocks.0.factors", set_at((..., slice(64, 96)), _ONES)), "int8 bf16", "forward"),
    ("perceiver", "rows depend on each other", after("layers.0", _mixed_rows(0.01)), "int8", "relations"),
    ("perceiver", "rows depend much on each other", after("layers.0", _mixed_rows(0.1)), "bf16", "relations"),
    ("convnext", "rows depend on each other", after("mixing.0", _mixed_rows(0.01)), "int8", "relations"),
    ("convnext", "rows depend much on each other", after("mixing.0", _mixed_rows(0.1)), "bf16", "relations"),
    ("shared tower", "a layer that runs twice is too large", after("tower.5", times(1.02)), "int8 bf16", "forward"),
    ("shared tower", "a convolution of one channel is too large", after("tower.0", times(1.02)), "bf16", "forward"),
    ("nested inputs", "a view is too large", after("embeds.1", times(1.02)), "int8 bf16", "forward"),
    ("packed", "last states are too large", _last_states(1.02), "int8 mxfp4", "forward"),
    ("complex signals", "a gradient before a complex filter is too large", after("embed", _gradient), "int8", "gradients"),
    ("residual", "a gradient is too large", after("layers.0.0", _gradient), "int8 bf16", "gradients"),
    ("standardized", "a convolution is too large", after("convs.1", times(1.01)), "bf16 fp16", "forward"),
    ("speech", "a normalized weight is too large", after("positions.parametrizations.weight.0", times(1.02)), "int8 bf16", "forward"),
    ("adapted", "an adapter is lost", instead("layers.0", _without_adapter), "int8 bf16", "forward"),
    ("fourier operator", "a gradient before a complex weight is too large", after("convs.0", _gradient), "int8 bf16", "gradients"),
    ("pruned weights", "a pruned layer is too large", after("second", times(1.02)), "int8 bf16", "forward"),
    ("hooked weights", "a normed layer is too large", after("second", times(1.02)), "int8 bf16", "forward"),
    ("mixed precision", "a gradient of a norm is too large", after("norm", _gradient), "int8", "gradients"),
    ("checkpointed", "a gradient behind a checkpoint is too large", after("layers.0.mixing", _gradient), "int8 bf16", "gradients"),
    ("reentrant", "a gradient behind a checkpoint is too large", after("layers.0.mixing", _gradient), "int8 bf16", "gradients"),
    ("codebook", "some codes get another entry", attribute("", "nearest", _another_entry), "int8 bf16", "forward"),
    ("codebook of squares", "some codes get another entry", attribute("", "nearest", _another_entry), "int8 bf16", "forward"),
    ("codebook", "entries are too large", after("table", times(1.02)), "int8 bf16", "forward"),
    ("spectral norms", "a normed layer is too large", after("second", times(1.02)), "int8 bf16", "forward"),
    ("styled images", "a rate is too large", instead("mapping.0", _rate_too_large), "int8 bf16", "forward"),
    ("styled images", "a bias is dropped", instead("mapping.2", lambda m, x: F.linear(x, m.weight / m.in_features**0.5)), "int8 bf16", "forward"),
    ("sorted experts", "an expert is too large", after("experts.1", times(1.02)), "int8 bf16", "forward"),
    ("shifted windows", "logits of few rows are too large", after("", times(1.02)), "int8 bf16", "forward"),
    ("radiance field", "an output after the first takes no gradient", after("color", torch.Tensor.detach), "int8 bf16", "gradients"),
    ("styled images", "a parameter without a site counts too much", attribute("", "constant", lambda p: nn.Parameter(p * 1.02)), "bf16", "forward"),
    ("native bfloat16", "a query is too large", after("attention.query", times(1.02)), "int8", "forward"),
)  # fmt: skip
FAULTS = [
    (Fault(model, name, plant, "", "", suite=suite), mode)
    for model, name, plant, modes, suite in _FAULTS
    for mode in modes.split()
]


@share(one_in=8, by=("fault.suite",))
@pytest.mark.parametrize(
    ("fault", "mode"), FAULTS, ids=[f"{fault.model}: {fault.name}-{mode}" for fault, mode in FAULTS]
)
def test_a_fault_in_such_a_model_is_red(fault: Fault, mode: str, tmp_path: Path) -> None:
    model: qgate.Model = structure(fault.model)
    assert first_line_of(model, mode, fault.plant, fault.suite, tmp_path) != ""


@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_faults_beside_normed_weights_are_named(mode: str, tmp_path: Path) -> None:
    def planted(network: Any) -> None:
        silu = F.silu
        network.forward = lambda x: network.head(
            (hidden := silu(network.first(x))) - silu(network.second(hidden))
        )

    line = first_line_of(structure("hooked weights"), mode, planted, "forward", tmp_path)
    assert "is subtracted, not added" in line


@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_code_that_computes_otherwise_when_it_runs_again_is_red(mode: str, tmp_path: Path) -> None:
    samples = [torch.randint(0, WORDS, (2, 24), generator=torch.Generator().manual_seed(0))]
    torch.manual_seed(4)
    network = ScaleOfTheLayerBefore().eval()
    model = qgate.Model(network, samples, "shared scale", calibration=samples)
    assert first_line_of(model, mode, _nothing, "forward", tmp_path) == ""
    line = first_line_of(model, mode, _nothing, "gradients", tmp_path)
    assert "behind torch.utils.checkpoint, which runs code again on the way back, has" in line


def test_a_gradient_that_a_checkpoint_loses_is_red(tmp_path: Path) -> None:
    """As torch loses it where no input of reentrant code takes a gradient."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(checkpoint(self.first, x, use_reentrant=True).tanh())
            return result

    samples = [torch.randn(20, 6)]
    model = qgate.Model(First().eval(), samples, "first", calibration=samples)
    line = first_line_of(model, "int8", _nothing, "gradients", tmp_path)
    assert line.startswith("first:weight")
    assert line.endswith("has no gradient")


def test_a_wrong_convolution_of_torch_is_told_from_one_of_a_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As oneDNN has them for some shapes on processors with AMX."""
    right = torch.conv1d

    def wrong(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        is_by_onednn = x.dtype is torch.bfloat16 and torch.backends.mkldnn.enabled
        return right(x, weight.flip(-1) if is_by_onednn else weight, *args)

    torch.manual_seed(4)
    network = nn.Sequential(nn.Linear(20, 20), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(20, 4))
    samples = [torch.randn(2, 8, 20)]
    model = qgate.Model(network.eval(), samples, "convolution", calibration=samples)
    planted = first_line_of(model, "bf16", after("1", times(1.5)), "forward", tmp_path)
    assert planted
    assert "torch's own" not in planted
    monkeypatch.setattr(F, "conv1d", wrong)
    line = first_line_of(model, "bf16", _nothing, "forward", tmp_path)
    assert "torch's own convolution is wrong here, and right with torch.backends" in line


def test_what_cannot_be_measured_is_refused_in_a_sentence(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x += self.norm(x)
            result: Tensor = self.head(x)
            return result

    samples = [torch.randn(4, 6)]
    model = qgate.Model(InPlace(), samples, "in place", calibration=samples)
    line = first_line_of(model, "int8", _nothing, "gradients", tmp_path)
    assert "writes in place into a tensor that torch needs" in line
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU()))
    network = nn.Sequential(scripted, nn.Linear(8, 4))
    model = qgate.Model(network, samples, "scripted", calibration=samples)
    line = first_line_of(model, "int8", _nothing, "forward", tmp_path)
    assert line.startswith("0 is scripted, and torch hands over no tensors")
