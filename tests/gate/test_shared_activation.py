"""One activation for images and for vectors, as in a U-Net: its gates run, and faults are red."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.modes.setups import ModelSetup


class Shifted(nn.Module):
    """A convolution whose result is moved by a time, both behind the same activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time, self.act = nn.Conv2d(3, 8, 3), nn.Linear(6, 8), nn.SiLU()
        self.last = nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            # The product is small beside its bias, which a mode in 16 bits rounds as well.
            self.time.weight *= 0.01

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        moved = self.time(self.act(time.to(self.time.weight.dtype)))
        return self.last(self.act(self.conv(image) + moved[:, :, None, None]))  # type: ignore[no-any-return]


def wrong(mode: str, factor: float = 1.0) -> list[Measured]:
    torch.manual_seed(0)
    samples = [{"image": torch.randn(2, 3, 8, 8), "time": torch.randn(2, 6)} for _ in range(2)]
    model = qgate.Model(Shifted(), samples, "shifted", calibration=samples)
    of = Bench(ModelSetup("shifted"), _model=model)
    network: Any = of.quantized(of.mode(mode)).model.module
    if factor != 1.0:
        network.act = copy.copy(network.act)
        right = network.act.forward
        network.act.forward = lambda x: right(x) * (factor if x.dim() == 2 else 1.0)
    rows = of.measure(of.mode(mode))
    assert any(row.site == "act:output" for row in rows)
    return [
        row for row in rows if row.why or any(f.differing for f in row.conformance or ())
        or (row.ideal is not None and row.values["relative_mse"] > 1.1 * row.ideal["relative_mse"])
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16", "fp16"])
def test_a_right_one_is_green(mode: str) -> None:
    assert wrong(mode) == []


@pytest.mark.parametrize(("mode", "factor"), [("int8", 1.001), ("bf16", 1.2)])
def test_a_fault_at_vectors_alone_is_red(mode: str, factor: float) -> None:
    assert "act:output" in [row.site for row in wrong(mode, factor)]
