"""Which modules of a model are its layers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from qgate import Model, QgateError
from qgate.models.blocks import blocks_of
from tests.models.networks import NAMES, Residual, network

ANYWHERE = re.compile("")
LAYERS = {
    "convnet": ["conv1", "conv2", "classifier"],
    "resnet": ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    "mixed": ["blocks.0", "blocks.1", "blocks.2", "blocks.3"],
    "flat": ["0", "2", "4"],
    "tagger": ["lstm", "out"],
    "attending": ["layers.0", "layers.1"],
    "decoding": ["layers.0", "layers.1"],
    "tied": ["first", "second"],
    "upsampling": ["down", "up", "wide", "out"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_any_kind_has_layers(name: str) -> None:
    model = network(name)
    model.sites()
    assert list(model.layers) == LAYERS[name]


def test_stages_are_divided_into_the_blocks_that_they_hold() -> None:
    stages = nn.ModuleDict({"stages": nn.Sequential(*(
        nn.ModuleDict({"blocks": nn.Sequential(*(Residual(4) for _ in range(count)))})
        for count in (2, 5)
    ))})  # fmt: skip
    first = [f"stages.0.blocks.{k}" for k in range(2)]
    assert list(blocks_of(stages, ANYWHERE)) == first + [f"stages.1.blocks.{k}" for k in range(5)]


def test_experts_and_lists_of_linear_layers_are_parts_of_a_block() -> None:
    def block() -> nn.Module:
        experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(8))
        heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
        return nn.ModuleDict({"experts": experts, "heads": heads})

    layers = nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(2))})
    assert blocks_of(layers, ANYWHERE) == ("layers.0", "layers.1")


def test_a_wrapper_of_a_backbone_and_a_head_is_no_list_of_blocks() -> None:
    backbone = nn.Sequential(Residual(4), Residual(4))
    head = nn.Sequential(nn.Linear(4, 2))
    model = nn.Sequential(nn.ModuleDict({"body": backbone}), head)
    assert blocks_of(model, ANYWHERE) == ("0.body.0", "0.body.1")


def test_modules_without_parameters_are_no_blocks() -> None:
    body = nn.Sequential(Residual(4), nn.ReLU(), Residual(4), nn.Dropout())
    assert blocks_of(nn.ModuleDict({"body": body}), ANYWHERE) == ("body.0", "body.2")


def test_parts_that_no_regular_expression_finds_have_no_blocks() -> None:
    towers = nn.ModuleDict({
        name: nn.ModuleList(Residual(4) for _ in range(2)) for name in ("text", "vision")
    })  # fmt: skip
    assert blocks_of(towers, re.compile("^vision")) == ("vision.0", "vision.1")


class Twice(nn.Module):
    """Runs one block twice, and one module that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(3) for _ in range(2))
        self.idle = nn.Linear(3, 3)
        self.out = nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.out(x)


def test_a_block_that_runs_twice_is_no_layer() -> None:
    model = Model(Twice(), [torch.randn(2, 3, 8, 8)])
    model.sites()
    assert model.layers == ("out",)


def test_the_channels_of_images_are_found_behind_convolutions() -> None:
    model = network("resnet")
    assert model.channel_axis("layer1.0:output") == -3
    assert model.channel_axis("layer1.0.bn1:output") == -3
    assert model.channel_axis("fc:output") == -1
    assert model.channel_axis("logits") == -1
    assert network("upsampling").channel_axis("logits") == -3
    assert network("attending").channel_axis("layers.0:output") == -1


def test_a_model_without_a_floating_output_is_refused() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).argmax(-1)

    with pytest.raises(QgateError, match=r"only torch.int64 \(2,\): a gate compares floating"):
        Model(Choice(), [torch.randn(2, 4)], "choice").sites()
