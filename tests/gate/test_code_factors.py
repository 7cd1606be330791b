"""Code between sites: factors below the rounding of 16 bits, values that no sample has, words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qgate
from qgate.gate.measuring.bench import Bench
from qgate.gate.segments.code_faults import code_before
from qgate.gate.segments.half_code import gain_faults
from qgate.gate.segments.probes import several
from qgate.modes.setups import ModelSetup
from tests.gate.benches import mode_of
from tests.shares import always, share, slow_file

pytestmark = slow_file

WIDTH = 32


class Block(nn.Module):
    """Attention of one head and an activation, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.up, self.gate, self.down = (
            nn.Linear(WIDTH, WIDTH) for _ in range(6)
        )
        self.act = nn.SiLU()
        self.scale, self.residual, self.most = WIDTH**-0.5, 1.0, float("inf")
        self.swaps = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = self.residual * x + mixed
        y = self.second_norm(x)
        gate, up = self.gate(y), self.up(y)
        gate, up = (up, gate) if self.swaps else (gate, up)
        return x + self.down(self.act(gate).clamp(max=self.most) * up)  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def small_bench(seed: int = 0) -> Bench:
    torch.manual_seed(seed)
    network = Network().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2.0)
    texts = [torch.randint(40, (1, 48)) for _ in range(2)]
    model = qgate.Model(network, texts, "small", calibration=texts)
    return Bench(ModelSetup("small"), _model=model)


def reasons(bench: Bench, mode: str, **attributes: Any) -> dict[str, str]:
    """Return by site what is wrong with a mode whose second block has other attributes."""
    chosen = mode_of(bench, mode)
    block = bench.quantized(chosen).model.module.get_submodule("blocks.1")
    for name, value in attributes.items():
        setattr(block, name, value)
    rows = bench.measure(chosen)
    return {row.site: row.why["isolated"] for row in rows if row.why and "isolated" in row.why}


@share(3)
@pytest.mark.parametrize(
    ("mode", "attributes", "words"),
    [
        ("bf16", {"residual": 1.01}, "the block's input counts 1.01 times"),
        ("fp16", {"residual": 1.001}, "the block's input counts 1.001 times"),
        ("bf16", {"scale": 1.01 * WIDTH**-0.5}, "the scores of the softmax are 1.01 times"),
    ],
)
def test_a_factor_below_the_rounding_of_16_bits_is_named(
    mode: str, attributes: dict[str, float], words: str
) -> None:
    site_reasons = reasons(small_bench(), mode, **attributes)
    assert any(words in reason for reason in site_reasons.values()), site_reasons
    assert all(site.startswith("blocks.1") for site in site_reasons)


@share(2)
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_right_code_in_16_bits_has_no_factor(mode: str) -> None:
    for seed in range(3):
        bench = small_bench(seed)
        segments = bench.segments(bench.quantized(mode_of(bench, mode)))
        assert gain_faults(segments, several(bench.model.inputs)) == {}


@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_an_activation_that_is_cut_where_no_sample_goes_is_named(mode: str) -> None:
    site_reasons = reasons(small_bench(), mode, most=60.0)
    assert [*site_reasons] == ["blocks.1.down:input"]
    assert "saturates" in site_reasons["blocks.1.down:input"]
    assert "massive values" in site_reasons["blocks.1.down:input"]


@always
def test_a_tensor_that_is_read_in_the_place_of_another_is_named() -> None:
    bench = small_bench()
    chosen = mode_of(bench, "int8")
    network = bench.quantized(chosen).model.module
    network.get_submodule("blocks.1").swaps = True  # type: ignore[assignment]
    view = bench.segments(bench.quantized(chosen)).view
    model = bench.quantized(chosen).model
    for site, words in (
        ("act:input", "up:output is read in the place of gate:output"),
        ("down:input", "gate:output is read in the place of up:output"),
    ):
        code = code_before(model, bench.model, view, f"blocks.1.{site}")
        assert code is not None
        assert code.fault() == words


@share(4)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16", "w4"])
def test_massive_values_are_no_fault_of_right_code(mode: str) -> None:
    assert reasons(small_bench(1), mode) == {}
