"""The acceptance cases that published comparers get wrong, on a transformer of eight layers.

Noise of 5 % on one weight is named at that layer; bfloat16 and MXFP8 are within their budgets;
MXFP4 is within its own, and graded clearly worse.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from qgate import Model
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.metrics.grades import grade_of
from qgate.models.llama import Llama, LlamaConfig
from qgate.modes.setups import ModelSetup
from tests.campaigns.mutants.bed import SAMPLING, all_layers, examine, mode_of
from tests.shares import proof, share

NOISY = "model.layers.3.mlp.up_proj.weight"
GRADES = ("excellent", "good", "fair", "poor")


def transformer() -> Llama:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 64, "n_layer": 8, "heads": 4, "kv_heads": 2, "d_ff": 128}
    return Llama(LlamaConfig(**sizes))


def clean(model: Model) -> nn.Module:
    """Return a copy that differs by next to nothing: a mode that changes nothing is an error."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        module.get_parameter("model.layers.7.mlp.down_proj.weight").mul_(1.0001)
    return module


def with_noise(share: float) -> object:
    def noisy(model: Model) -> nn.Module:
        module = clean(model)
        weight = module.get_parameter(NOISY)
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            weight.add_(noise * share * weight.square().mean().sqrt())
        return module

    return noisy


def session(folder: Path, own: object = clean, updating: str | None = None) -> ModelGates:
    samples = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(2)).split(1)
    model = Model(transformer(), list(samples), "eight-layers", modes={"mine": own})
    bench = Bench(ModelSetup("eight-layers", sampling=SAMPLING), _model=model)
    return ModelGates(bench, folder, Policy(), updating=updating)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The accepted errors of a mode that is the clean model."""
    folder: Path = tmp_path_factory.mktemp("eight")
    gates = session(folder, updating="all")
    assert all(outcome.passed for outcome in all_layers(gates, "mine"))
    gates.commit()
    return folder


def test_a_copy_of_the_model_passes(recorded: Path) -> None:
    assert examine(session(recorded), "mine", "layer_outputs").texts == ""


@share(2)
@pytest.mark.parametrize("share", [0.05, 0.001])
def test_noise_on_one_weight_is_named_at_that_layer(recorded: Path, share: float) -> None:
    finding = examine(session(recorded, with_noise(share)), "mine", "layer_outputs")
    assert finding.source == NOISY.replace(".weight", ":output")
    assert "the error enters at model.layers.3.mlp.up_proj:output" in finding.texts
    places = [outcome.verdict.measured[0].layer for outcome in finding.failed]
    assert places == [f"layers.{k}" for k in range(3, 8)], "layers before it are clean"
    later = finding.failed[1:]
    assert [outcome.verdict.first_source for outcome in later] == [None] * len(later)
    assert all("no local error is out" in outcome.text for outcome in later)


@proof
def test_bf16_and_mxfp8_are_within_budget_and_mxfp4_is_graded_worse(tmp_path: Path) -> None:
    gates = session(tmp_path, updating="all")
    worst = {}
    for mode in ("bf16", "mxfp8", "mxfp4"):
        outcomes = all_layers(gates, mode)
        assert [outcome.text for outcome in outcomes if not outcome.passed] == []
        budgets = [c for o in outcomes for c in o.verdict.checks if c.kind == "budget"]
        assert len(budgets) >= 8 * 7
        rows = gates.bench.measure(mode_of(gates, mode))
        worst[mode] = min(row.values["correlation"] for row in rows if row.scope == "carried")
    grades = [GRADES.index(grade_of("correlation", worst[mode])) for mode in worst]
    assert grades[0] == 0, "bf16 is excellent"
    assert grades[0] <= grades[1] < grades[2], worst
