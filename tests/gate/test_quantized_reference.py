"""A reference that is quantized itself, or has weights that nothing reads, is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from qgate import Model, QgateError, Quantizer
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.self_checks import (
    quantized_parts,
    unquantized,
    unread_weight,
    weight_grid,
)
from qgate.modes.setups import ModelSetup
from tests.gate.benches import LLAMA, bench

GRIDS = {
    "int8": {"granularity": "channel", "axis": 0},
    "int4": {"granularity": "block", "block": 128},
    "fp8_e4m3": {"granularity": "channel", "axis": 0},
    "fp8_e5m2": {"granularity": "tensor"},
    "mxfp8_e4m3": {},
    "mxfp4_e2m1": {},
    "nvfp4": {},
}


def weight() -> Tensor:
    return torch.randn(96, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fmt", GRIDS)
def test_a_weight_on_a_grid_is_seen(fmt: str) -> None:
    assert weight_grid(Quantizer(fmt, **GRIDS[fmt])(weight()))
    assert weight_grid(Quantizer(fmt, **GRIDS[fmt])(weight()).T, transposed=True)


@pytest.mark.parametrize(
    "values",
    [weight(), weight().bfloat16().float(), weight().half().float(), torch.zeros(96, 128),
     weight().sign(), torch.ones(96, 128), weight()[:, :8]],
)  # fmt: skip
def test_ordinary_weights_pass(values: Tensor) -> None:
    assert weight_grid(values) == ""


def test_weights_on_a_grid_are_no_reference() -> None:
    of = bench(LLAMA)
    assert quantized_parts(of.model) == ""
    network = copy.deepcopy(of.model.module)
    projection = network.get_submodule("model.layers.2.mlp.up_proj")
    assert isinstance(projection, nn.Linear)
    with torch.no_grad():
        projection.weight.copy_(Quantizer("int8", granularity="channel", axis=0)(projection.weight))
    of._model = of.model.with_module(network)
    with pytest.raises(QgateError, match=r"is quantized: 1 of 36 weights .* grid of int8 already, "
                       r"model\.layers\.2\.mlp\.up_proj:weight first"):  # fmt: skip
        unquantized(of)


class CodedLinear(nn.Module):
    """A linear layer that holds codes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.ones(4, 4, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_modules_that_hold_codes_are_no_reference() -> None:
    network = nn.Sequential(nn.Linear(4, 4), CodedLinear())
    model = Model(network, [torch.randn(1, 4)], "coded", layers=("0", "1"))
    assert quantized_parts(model) == "1 of its modules are quantized, 1 (CodedLinear) first"


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_norm_of_torch_is_no_quantization_and_others_may_be(norm: str) -> None:
    layer = getattr(nn.utils.parametrizations, norm)(nn.Conv1d(4, 4, 3))
    model = Model(nn.Sequential(layer, nn.ReLU()), [torch.randn(1, 4, 8)], layers=("0", "1"))
    assert quantized_parts(model) == ""
    nn.utils.parametrize.register_parametrization(layer, "weight", Rounded())
    assert quantized_parts(model) == "1 of its modules are quantized, 0.parametrizations (ModuleDict) first"  # fmt: skip


class Rounded(nn.Module):
    """A parametrization that rounds."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.round()


# Weights that nothing reads -------------------------------------------------------------------------


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
