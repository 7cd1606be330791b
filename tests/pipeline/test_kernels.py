"""A model's own kernel that stands for a mode is held to that mode's ideal quantizer."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.modes import Kernel
from qgate.pipeline.gates.bench import Bench
from qgate.pipeline.gates.gating import GateSession
from qgate.pipeline.setups import ModelSetup


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def grid(x: Tensor, largest: int) -> Tensor:
    """Symmetric integers of a row, written down anew."""
    scale = x.abs().amax(-1, keepdim=True) / largest
    return (x / scale).round().clamp(-largest, largest) * scale


class Product(nn.Module):
    def __init__(self, linear: nn.Linear, largest: int, bias: bool = True) -> None:
        super().__init__()
        self.weight, self.bias, self.largest, self.with_bias = (
            linear.weight,
            linear.bias,
            largest,
            bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.largest:
            x, w = grid(x, self.largest), grid(self.weight, self.largest)
        else:
            w = self.weight
        return nn.functional.linear(x, w, self.bias if self.with_bias else None)


def model(stands_for: str = "int8", largest: int = 127, broken: str = "") -> qgate.Model:
    torch.manual_seed(0)

    def build(given: qgate.Model) -> nn.Module:
        made = copy.deepcopy(given.module)
        for name, module in given.module.named_modules():
            if isinstance(module, nn.Linear):
                made.set_submodule(name, Product(module, largest, name != broken))
        return made

    samples = [torch.randn(2, 16, 32) for _ in range(2)]
    return qgate.Model(Net(), samples, "net", modes={"mine": Kernel(build, stands_for)})


def failures(of: qgate.Model, folder: Path) -> list[str]:
    """First lines of what an update cannot accept."""
    bench = Bench(ModelSetup("net"), _model=of)
    session = GateSession(bench, folder, Policy(), updating="all")
    mode = bench.setup.select("mine", of)[0]
    outcomes = [session.layer("layer_outputs", mode, layer) for layer in bench.layers]
    return [each.text.splitlines()[0] for each in outcomes if not each.passed]


def test_a_kernel_that_does_what_it_stands_for_is_within_its_budget(tmp_path: Path) -> None:
    bench = Bench(ModelSetup("net"), _model=model())
    rows = bench.site_errors(bench.quantized(bench.setup.select("mine", bench.model)[0]))
    held = [row for row in rows if row.ideal is not None]
    assert [row.site for row in held] == [
        f"layers.{k}.{name}:output" for k in range(3) for name in ("up", "down")
    ], "what a kernel quantizes inside cannot be seen, what it returns can"
    for row in held:
        assert row.ideal is not None
        assert abs(10 * math.log10(row.values["relative_mse"] / row.ideal)) < 0.05
        assert row.quantizer == "int8"
    assert failures(model(), tmp_path) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"largest": 63}, "dB over the ideal int8 quantizer, 0.5 allowed"),
        ({"largest": 0}, "better than an ideal int8 quantizer: nothing is quantized here"),
        ({"broken": "layers.0.up"}, "dB over the ideal int8 quantizer"),
        ({"stands_for": "mxfp8", "largest": 7}, "dB over the ideal mxfp8 quantizer"),
    ],
    ids=["seven-bits", "not-quantized", "dropped-bias", "other-format"],
)
def test_a_kernel_that_does_not_cannot_be_accepted(
    given: dict[str, object], words: str, tmp_path: Path
) -> None:
    found = failures(model(**given), tmp_path)  # type: ignore[arg-type]
    assert len(found) == (1 if "broken" in given else 3)
    assert all(words in line for line in found), found


@pytest.mark.parametrize("name", ["int9", "mine", "2-1", ""])
def test_what_it_stands_for_is_a_mode_that_fits(name: str) -> None:
    of = model(name)
    setup = ModelSetup("net")
    if not name:
        assert setup.select("mine", of)[0].stands_for == ""
        return
    with pytest.raises(QgateError, match=f"unknown mode that 'mine' of net stands for '{name}'"):
        setup.select("mine", of)
