"""A massive channel hides what happens to the rest: the numbers without it, and the gate on them."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qgate import Model
from qgate.baselines import Key, Store
from qgate.gate import Policy, judge
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.measuring.site_errors import compare, massive_from, site_errors, without_massive
from qgate.modes.setups import ModelSetup
from tests.gate.benches import LLAMA, SHORT, bench, mode_of
from tests.shares import proof

SITE = "blocks.1:output"
PART = "relative_mse@without_massive"


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(off: float, massive_off: float = 0.0) -> tuple[Tensor, Tensor]:
    """One channel at 26 times the rms of the others, which are off by that share of themselves."""
    reference = normal(64, 32, seed=0)
    reference[:, 5] = 26.0
    actual = reference * (1 + off * normal(64, 32, seed=1).sign())
    actual[:, 5] = 26.0 * (1 + massive_off)
    return actual, reference


def test_the_whole_looks_well_and_the_rest_does_not() -> None:
    actual, reference = planted(0.15)
    whole = compare([(actual, reference)])
    assert whole.metric("cosine") > 0.999
    assert whole.metric("correlation") > 0.999
    part = without_massive(whole, [(actual, reference)], massive_from([reference]))
    a, r = (np.delete(x.double().numpy(), 5, axis=1).ravel() for x in (actual, reference))
    assert part["relative_mse"] == pytest.approx(np.square(a - r).sum() / np.square(r).sum())
    assert part["relative_mse"] == pytest.approx(0.15**2, rel=1e-6)
    assert part["correlation"] == pytest.approx(np.corrcoef(a, r)[0, 1])
    assert part["correlation"] < 0.99


def test_without_massive_elements_the_part_is_the_whole() -> None:
    pairs = [(normal(64, 32, seed=1), normal(64, 32, seed=0))]
    comparison = compare(pairs)
    part = without_massive(comparison, pairs, massive_from([pairs[0][1]]))
    assert part == {name: comparison.metric(name) for name in ("relative_mse", "correlation")}


def test_what_is_not_finite_is_not_hidden_by_being_massive() -> None:
    actual, reference = planted(0.15)
    actual[0, 0] = math.nan
    comparison = compare([(actual, reference)])
    assert math.isnan(without_massive(comparison, [(actual, reference)], 20.0)["relative_mse"])


def test_samples_of_any_length_are_one_tensor() -> None:
    actual, reference = planted(0.15)
    sizes = [10, 1, 53]
    pairs = list(zip(actual.split(sizes), reference.split(sizes), strict=True))
    whole, parts = compare([(actual, reference)], channels=True), compare(pairs, channels=True)
    assert parts.metric("relative_mse") == pytest.approx(whole.metric("relative_mse"), rel=1e-12)
    assert parts.channels is not None
    assert parts.channels.sum_square_error[5] == 0
    beyond = massive_from([r for _, r in pairs])
    assert beyond == massive_from([reference])
    assert without_massive(parts, pairs, beyond) == pytest.approx(
        without_massive(whole, [(actual, reference)], beyond)
    )


# Through the bench and the gate -------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(normal(32, 32, seed=seed) / 10)
            self.linear.weight[5] = self.linear.weight[:, 5] = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Network(nn.Module):
    """A residual stream with one massive channel, as large language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(1), Block(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def off_by(rest: float, massive: float) -> Callable[[Model], nn.Module]:
    """The last block's output is off by shares of itself, in the massive channel and elsewhere."""

    def build(model: Model) -> nn.Module:
        spoilt = copy.deepcopy(model.module)
        sign = normal(24, 32, seed=3).sign()

        def spoil(_module: Any, _args: Any, y: Tensor) -> Tensor:
            change = rest * sign
            change[:, 5] = massive * sign[:, 5]
            return y * (1 + change)

        spoilt.blocks[1].register_forward_hook(spoil)
        return spoilt

    return build


def session(folder: Path, rest: float, massive: float, updating: Any = None) -> ModelGates:
    x = normal(1, 24, 32, seed=4)
    x[..., 5] = 150.0
    model = Model(
        Network(),
        [x],
        "massive",
        modes={"mine": off_by(rest, massive)},
        layers=("blocks.0", "blocks.1"),
    )
    of = Bench(ModelSetup("massive", sampling=SHORT), _model=model)
    return ModelGates(of, folder, Policy(), updating=updating)


def outcome(of: ModelGates) -> Any:
    return of.layer("layer_outputs", mode_of(of.bench, "mine"), "blocks.1")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    of = session(tmp_path, 0.01, 0.05, updating="all")
    assert outcome(of).passed
    of.commit()
    return tmp_path


def test_the_gate_sees_the_rest_behind_a_massive_channel(recorded: Path) -> None:
    """The whole stays within 2 %; the rest is 15 times worse off."""
    assert outcome(session(recorded, 0.01, 0.05)).passed
    judged = outcome(session(recorded, 0.15, 0.05))
    failed = {(check.site, check.metric) for check in judged.verdict.failed}
    assert {metric for _, metric in failed} == {
        PART,
        "one_minus_correlation@without_massive",
        "relative_mse@worst_channel",
        "relative_mse@worst_token",
    }
    assert "without_massive" in judged.text.splitlines()[0]
    assert re.search(r"22\dx accepted", judged.text.splitlines()[0]), "15 * 15"
    (row,) = (record for record in judged.record["rows"] if record["scope"] == "carried")
    assert row["without_massive"]["relative_mse"] == pytest.approx(0.15**2, rel=1e-3)
    assert row["values"]["cosine"] > 0.998


def test_parts_are_accepted_where_there_is_a_massive_element(recorded: Path) -> None:
    baseline = Store(recorded, "massive").accepted("mine")
    assert baseline is not None
    key = Key("layer_outputs", SITE, "carried", PART)
    assert baseline.values[key] == pytest.approx(0.01**2, rel=1e-3)
    assert {key.scope for key in baseline.values if key.metric == PART} == {"carried", "local"}


@proof
def test_without_a_massive_element_nothing_more_is_accepted() -> None:
    of = bench(LLAMA, layers=2)
    rows = [
        row
        for row in of.measure(mode_of(of, "int8"))
        if row.site in {f"{layer}:output" for layer in of.model.layers} and row.scope != "isolated"
    ]
    assert len(rows) == 4
    for row in rows:
        assert row.parts["without_massive"] == {
            name: row.values[name] for name in ("relative_mse", "correlation")
        }
        assert all("without_massive" not in name for name in row.part_metrics())


@proof
def test_inside_layers_outlier_channels_have_their_part() -> None:
    of = bench(LLAMA, layers=2)
    site = "model.layers.1.mlp.up_proj:weight"
    (row,) = (measured for measured in of.measure(mode_of(of, "mxfp4")) if measured.site == site)
    true = of.model.module.get_parameter(site.replace(":", ".")).detach()
    quantized = (
        of.quantized(mode_of(of, "mxfp4")).model.module.get_submodule(site.partition(":")[0]).weight
    )
    ordinary = true.abs() <= massive_from([true])
    a, r = (x[ordinary].double().detach().numpy() for x in (quantized, true))
    assert row.parts["without_massive"]["relative_mse"] == pytest.approx(
        np.square(a - r).sum() / np.square(r).sum()
    )
    assert row.parts["without_massive"]["relative_mse"] > 1.1 * row.values["relative_mse"]


# What a massive element at the edge does ----------------------------------------------------------


@pytest.mark.parametrize("was", [True, False])
def test_an_element_at_the_edge_makes_no_gate_flake(was: bool) -> None:
    """It appears or disappears by noise: either way the numbers are those of nearly all."""
    reference = normal(256, 32, seed=0)
    edge = massive_from([torch.cat([reference.flatten(), torch.tensor([1e3])])])
    actual = reference + 0.01 * normal(256, 32, seed=1)
    for tensor in (actual, reference):
        tensor[0, 0] = edge
    inside, outside = (measured_at(actual, reference, edge * by) for by in (1 + 1e-5, 1 - 1e-5))
    assert inside.part_metrics() == []
    assert len(outside.part_metrics()) == 2
    before, now = (outside, inside) if was else (inside, outside)
    accepted = {name: before.value(name) for name in ("relative_mse", "one_minus_correlation")}
    accepted |= {name: before.value(name) for name in before.part_metrics()}
    judgement = judge(
        [dataclasses.replace(now, accepted=accepted)],
        Policy().limits_of("mine"),
        device_matches=False,
    )
    assert judgement.passed, judgement.failed


def measured_at(actual: Tensor, reference: Tensor, beyond: float) -> Any:
    has_massive = bool((reference.abs() > beyond).any())
    pairs, beyond = [(actual, reference)], beyond if has_massive else math.inf
    row = site_errors(SITE, "blocks.1", "carried", 0, pairs, beyond=beyond)
    parts = {name: values for name, values in row.parts.items() if name != "worst_channel"}
    return dataclasses.replace(row, parts=parts)


def test_parts_that_are_no_longer_computed_fail() -> None:
    actual, reference = planted(0.01)
    whole = measured_at(actual, reference, 20.0)
    names = ("relative_mse", "one_minus_correlation", *whole.part_metrics())
    assert PART in names
    accepted = {name: whole.value(name) for name in names}
    limits = Policy().limits_of("mine")
    assert judge([dataclasses.replace(whole, accepted=accepted)], limits, True).passed
    lost = dataclasses.replace(whole, accepted=accepted, parts={})
    failed = judge([lost], limits, True).failed
    parts = {(name, "nonfinite") for name in whole.part_metrics()}
    assert {(check.metric, check.kind) for check in failed} == parts
