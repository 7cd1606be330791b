"""Modes and kernels of rarer codebooks are held to the budget of an ideal one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

import qgate
from qgate import modes
from qgate.errors import QgateError
from qgate.expected.searched_scales import searched_error
from qgate.gate.measuring.bench import Bench
from qgate.modes import Kernel, Mode, Rule
from qgate.modes.setups import ModelSetup
from qgate.testing import CheckFailure, check
from tests.checkpoints.test_gguf import BLOCKS
from tests.gate.test_model_kernels import failures
from tests.shares import share

FORMATS = ["iq4_nl", "iq2_xxs", "iq1_m", "nf4_double", "lloyd2_qjl"]
WRITTEN = [name for name in BLOCKS.files if name.startswith("IQ")]
DECIBEL = 10 ** (1 / 20)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).repeat(1, 1, 16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


def model_of(cast: Callable[[Tensor], Tensor], fmt: str, **options: str) -> qgate.Model:
    """Return a model of ggml's weight, and a kernel that quantizes it."""
    torch.manual_seed(0)
    net = Net()
    weight = torch.from_numpy(BLOCKS["weight"]).float()
    net.layers[0].up.weight = nn.Parameter(weight)

    def build(model: qgate.Model) -> nn.Module:
        quantized = copy.deepcopy(model.module)
        quantized.layers[0].up.weight = nn.Parameter(cast(weight))  # type: ignore[index, union-attr]
        return quantized

    kernel = Kernel(build, Rule(":weight$", fmt), **options)
    return qgate.Model(net, [torch.randn(1, 512, 256)], "net", modes={"mine": kernel})


@share(9)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_decibel_beyond_an_ideal_quantizer_is_red(fmt: str, tmp_path: Path) -> None:
    right = model_of(lambda w: qgate.quantize(w, fmt), fmt)
    assert failures(right, tmp_path) == []
    wrong = model_of(lambda w: w + (qgate.quantize(w, fmt) - w) * DECIBEL, fmt)
    (line,) = failures(wrong, tmp_path)
    assert f"1.0 dB over the ideal {fmt} quantizer, 0.5 allowed" in line


@share(9)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_mode_of_rules_is_ideal(fmt: str) -> None:
    mode = Mode("mine", "weights of one format", rules=(Rule(":weight$", fmt),))
    model = model_of(lambda w: w, fmt)
    bench = Bench(ModelSetup("net"), _model=model)
    rows = [row for row in bench.site_errors(bench.quantized(mode)) if row.ideal is not None]
    assert {row.site.partition(":")[2] for row in rows} == {"weight", "output"}
    for row in rows:
        assert row.ideal is not None
        assert row.values["relative_mse"] == pytest.approx(row.ideal["relative_mse"], rel=1e-6)


def test_channels_along_another_axis_than_blocks_are_refused() -> None:
    net = nn.Sequential(nn.Conv1d(64, 4, 3))
    mode = Mode("mine", "NF4 with double scales", rules=(Rule("weight$", "nf4_double", of="conv"),))
    model = qgate.Model(net, [torch.randn(1, 64, 8)], "net", modes={})
    with pytest.raises(
        QgateError, match="blocks along the last axis, and the channels of 0:weight"
    ):
        modes.apply(mode, model)


@share(4)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_search_for_scales_of_vectors_comes_as_near_as_ggml(name: str) -> None:
    weight, q = BLOCKS["weight"].astype(np.float64), qgate.Quantizer(name.split()[0].lower())
    error = np.square(read(name).double().numpy() - weight).sum() / np.square(weight).sum()
    assert -1.5 < 10 * np.log10(searched_error(weight, q) / error) < 0.1


@share(9)
@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_of_ggml_are_within_the_budget_of_searched_scales(name: str, tmp_path: Path) -> None:
    fmt = name.split()[0].lower()
    theirs = model_of(lambda _: read(name), fmt, convention="mse")
    assert failures(theirs, tmp_path) == []
    wrong = model_of(lambda w: w + (read(name) - w) * DECIBEL, fmt, convention="mse")
    (line,) = failures(wrong, tmp_path)
    assert f"dB over the ideal {fmt} (searched scales) quantizer" in line


@share(4)
@pytest.mark.parametrize("name", WRITTEN)
def test_checks_of_blocks_of_ggml_allow_what_a_search_leaves(name: str) -> None:
    weight, fmt = torch.from_numpy(BLOCKS["weight"]).float(), name.split()[0].lower()
    check(read(name), weight, format=fmt, convention="mse")
    with pytest.raises(CheckFailure, match="times the squared error of searched"):
        check(weight + (read(name) - weight) * 1.25, weight, format=fmt, convention="mse")


def read(name: str) -> Tensor:
    """Return what ggml's own quantizer made of the weight, as gguf reads it."""
    return torch.from_numpy(gguf.dequantize(BLOCKS[name], Kind[name.split()[0]])).float()
