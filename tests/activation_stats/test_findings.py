"""Findings of activations: no line twice, no headline without support, nothing that one hides."""

from __future__ import annotations

import copy

import pytest
import torch

import qgate
from qgate.activation_stats.findings import findings
from qgate.activation_stats.plots.pictures import pictures
from qgate.activation_stats.reading import losses, worst_format
from qgate.activation_stats.record import ActivationsRecord
from qgate.activation_stats.settings import report_settings
from qgate.activation_stats.texts import activation_text
from tests.shares import slow_file

pytestmark = slow_file


class Planted(torch.nn.Module):
    """Four layers, of which the third gets one massive element in each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * 3
            if index == 1:
                x = x.clone()
                x[..., 3, 5] = 3000.0
        return x


@pytest.fixture(scope="module")
def measured() -> ActivationsRecord:
    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(32, 64, generator=g) for _ in range(3)]
    return qgate.activations(Planted(), xs).record


@pytest.fixture
def planted(measured: ActivationsRecord) -> ActivationsRecord:
    """The record of the planted elements, to be changed."""
    return copy.deepcopy(measured)


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-mamba", "planted"])
def record(request: pytest.FixtureRequest, measured: ActivationsRecord) -> ActivationsRecord:
    if request.param == "planted":
        return measured
    return qgate.activations(request.param, data__num_samples=1, data__seq_len=128).record


def test_no_finding_is_repeated(record: ActivationsRecord) -> None:
    texts = [finding.text for finding in findings(record)]
    assert len(texts) > 5
    assert len(set(texts)) == len(texts)
    table = activation_text(record).split("\n\n")[1].splitlines()
    assert len(set(table)) == len(table)


def test_no_two_pictures_of_formats_have_one_title(record: ActivationsRecord) -> None:
    view = report_settings(record["settings"]).visualization
    drawings = [picture for picture in pictures(record, view) if picture.section == "formats"]
    titles = [sheet.title for picture in drawings if (sheet := picture.sheet()) is not None]
    assert len(titles) > 1
    assert len(set(titles)) == len(titles)


def test_a_layer_that_one_element_flatters_is_named(planted: ActivationsRecord) -> None:
    record = planted
    (finding,) = [f for f in findings(record) if f.text.startswith("int8 per tensor looks better")]
    assert finding.level == "warn"
    assert "layers.2 (input)" in finding.text
    assert "without its 3 elements" in finding.text
    assert "of its values become zero" in finding.text
    layer = next(e for e in record["layers"] if (e["module"], e["role"]) == ("layers.2", "input"))
    worst = worst_format(layer)
    assert worst is not None
    assert worst[0] == "int8 per tensor"
    assert worst[1].sqnr_db > 30 > 1 > worst[1].worse
    assert f"{worst[0]} {worst[1].short}".removesuffix(" dB") in activation_text(record)
    (broken,) = [f for f in findings(record) if f.text.startswith("int8 per tensor breaks")]
    assert "breaks 1 input of 4" in broken.text


def test_a_difference_of_less_than_six_decibels_is_no_finding(planted: ActivationsRecord) -> None:
    record = planted
    for layer in record["layers"]:
        for outcome in layer["portrait"]["formats"].values():
            outcome["rest_signal"], outcome["rest_noise"] = (
                outcome["signal"],
                outcome["noise"] * 3.9,
            )
    assert not [f for f in findings(record) if "looks better" in f.text]
    for layer in record["layers"]:
        for outcome in layer["portrait"]["formats"].values():
            outcome["rest_noise"] = outcome["noise"] * 4.1
    assert [f for f in findings(record) if "looks better" in f.text]
    assert all(losses(layer)["int8 per tensor"].flattered for layer in record["layers"])


def test_the_heaviest_tails_need_others_and_must_be_heavy(planted: ActivationsRecord) -> None:
    """A single layer has nothing to be compared with, and flat values have no tails."""
    record = planted
    assert [f for f in findings(record) if f.text.startswith("heaviest tails")]
    single = copy.deepcopy(record)
    single["layers"] = [e for e in single["layers"] if e["module"] == "layers.2"][:1]
    assert not [f for f in findings(single) if f.text.startswith("heaviest tails")]
    for layer in record["layers"]:
        layer["portrait"]["kurtosis"] = -0.5
    assert not [f for f in findings(record) if f.text.startswith("heaviest tails")]
