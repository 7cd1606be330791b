"""Findings of activations: no line twice, no headline without support, nothing that one hides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import qgate
from qgate.activation_stats.findings import findings
from qgate.activation_stats.plots.pictures import pictures
from qgate.activation_stats.reading import look_of, losses, worst_format
from qgate.activation_stats.record import ActivationsRecord
from qgate.activation_stats.texts import activation_text


class Planted(torch.nn.Module):
    """Four layers, of which the third gets one massive element in each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * 3
            if place == 1:
                x = x.clone()
                x[..., 3, 5] = 3000.0
        return x


def planted(**overrides: Any) -> ActivationsRecord:
    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(32, 64, generator=g) for _ in range(3)]
    return qgate.activations(Planted(), xs, **overrides).record


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-mamba", "planted"])
def record(request: pytest.FixtureRequest) -> ActivationsRecord:
    if request.param == "planted":
        return planted()
    return qgate.activations(request.param, data__num_samples=1).record


def test_no_line_is_said_twice(record: ActivationsRecord) -> None:
    told = [each.text for each in findings(record)]
    assert len(told) > 5
    assert len(set(told)) == len(told)
    table = activation_text(record).split("\n\n")[1].splitlines()
    assert len(set(table)) == len(table)


def test_no_two_pictures_of_formats_have_one_title(record: ActivationsRecord) -> None:
    found = [p for p in pictures(record, look_of(record["settings"])) if p.section == "formats"]
    titles = [sheet.title for p in found if (sheet := p.sheet()) is not None]
    assert len(titles) > 1
    assert len(set(titles)) == len(titles)


def test_a_layer_that_one_element_flatters_is_named() -> None:
    record = planted()
    (said,) = [f for f in findings(record) if f.text.startswith("int8 per tensor looks better")]
    assert said.level == "warn"
    assert "layers.2 (input)" in said.text
    assert "without its 3 elements" in said.text
    assert "of its values become zero" in said.text
    layer = next(e for e in record["layers"] if (e["module"], e["role"]) == ("layers.2", "input"))
    worst = worst_format(layer)
    assert worst is not None
    assert worst[0] == "int8 per tensor"
    assert worst[1].sqnr_db > 30 > 1 > worst[1].worse
    assert f"{worst[0]} {worst[1].short}".removesuffix(" dB") in activation_text(record)
    (broken,) = [f for f in findings(record) if f.text.startswith("int8 per tensor breaks")]
    assert "breaks 1 input of 4" in broken.text


def test_a_difference_of_less_than_six_decibels_is_no_finding() -> None:
    record = copy.deepcopy(planted(formats=["int8"]))
    for each in record["layers"]:
        for fate in each["portrait"]["formats"].values():
            fate["rest_signal"], fate["rest_noise"] = fate["signal"], fate["noise"] * 3.9
    assert not [f for f in findings(record) if "looks better" in f.text]
    for each in record["layers"]:
        for fate in each["portrait"]["formats"].values():
            fate["rest_noise"] = fate["noise"] * 4.1
    assert [f for f in findings(record) if "looks better" in f.text]
    assert all(losses(each)["int8 per tensor"].flattered for each in record["layers"])


def test_the_heaviest_tails_need_others_and_must_be_heavy() -> None:
    """A single layer has nothing to be compared with, and flat values have no tails."""
    record = planted()
    assert [f for f in findings(record) if f.text.startswith("heaviest tails")]
    single = copy.deepcopy(record)
    single["layers"] = [e for e in single["layers"] if e["module"] == "layers.2"][:1]
    assert not [f for f in findings(single) if f.text.startswith("heaviest tails")]
    for each in record["layers"]:
        each["portrait"]["kurtosis"] = -0.5
    assert not [f for f in findings(record) if f.text.startswith("heaviest tails")]
