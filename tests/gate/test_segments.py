"""Isolated errors: FP32 code fed with the tensors that a run made, segment by segment."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.segments.segments import swapped
from qgate.modes import Kernel
from qgate.modes.setups import ModelSetup
from tests.gate.benches import LLAMA, MAMBA, Stack, mode_of
from tests.gate.benches import bench as short
from tests.shares import proof, share


class Block(nn.Module):
    """Two linear layers, a ReLU that writes in place, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Linear(64, 32)
        self.residual = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.residual * x + self.down(self.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def net(modes: dict[str, Any] | None = None) -> qgate.Model:
    torch.manual_seed(0)
    samples = [torch.randn(2, 16, 32) for _ in range(2)]
    return qgate.Model(Stack(Block), samples, "net", modes=modes or {})


def bench_of(model: qgate.Model) -> Bench:
    return Bench(ModelSetup("net"), _model=model)


def isolated(bench: Bench, mode: str, break_it: Callable[[Any], None] | None = None) -> list[Any]:
    chosen = mode_of(bench, mode)
    if break_it is not None:
        break_it(bench.quantized(chosen).model.module)
    return [row for row in bench.measure(chosen) if row.scope == "isolated"]


def size(row: Measured) -> float:
    value = row.value("relative_mse@worst_token")
    assert value is not None
    return math.sqrt(value)


def red(rows: list[Measured]) -> dict[str, str]:
    return {row.site: row.why["isolated"] for row in rows if row.why}


@share(3)
@pytest.mark.parametrize(("model", "mode"), [(LLAMA, "mxfp4"), (MAMBA, "6-4"), (MAMBA, "fp16")])
def test_every_product_and_block_is_held_and_within_its_noise(model: str, mode: str) -> None:
    bench = short(model, layers=2)
    rows = isolated(bench, mode)
    sites = {row.site for row in rows}
    base = bench.model.in_basis(bench.quantized(mode_of(bench, mode)).model.basis)
    outputs = {s.name for s in base.sites() if s.kind in ("linear", "block") and s.port == "output"}
    assert outputs <= sites | {"lm_head:output"}
    assert red(rows) == {}
    for row in rows:
        assert size(row) <= 0.2 * math.sqrt(row.floor), row.site
        assert 1e-7 < math.sqrt(row.floor) < 1e-4, "float noise, and not a share of the error"


@share(3)
@pytest.mark.parametrize("mode", ["mxfp4", "int8", "bf16"])
def test_code_that_writes_in_place_is_no_fault(mode: str) -> None:
    rows = isolated(bench_of(net()), mode)
    assert red(rows) == {}
    assert "layers.1.relu:output" in {row.site for row in rows}


def _residual(module: Any) -> None:
    module.layers[1].residual = 1.0001


def _eps(module: Any) -> None:
    module.layers[1].norm.eps = 1e-3


def _bias(module: Any) -> None:
    module.layers[1].up.bias = None


@share(6)
@pytest.mark.parametrize("mode", ["mxfp4", "int8"])
@pytest.mark.parametrize(
    ("fault", "site", "words"),
    [
        (_residual, "layers.1:output", "is not what FP32 code of layers.1 makes"),
        (_eps, "layers.1.norm:output", "is not what FP32 code of layers.1.norm makes"),
        (_bias, "layers.1.up:output", "a bias is dropped"),
    ],
)
def test_a_fault_is_red_at_its_place_alone(
    mode: str, fault: Callable[[Any], None], site: str, words: str
) -> None:
    faults = red(isolated(bench_of(net()), mode, fault))
    assert list(faults) == [site]
    assert words in faults[site]


def _channel(module: Any) -> None:
    up = module.layers[1].up
    plain = up.forward
    up.forward = lambda x: plain(x) - x[..., 5:6] * up.weight[:, 5]


@pytest.mark.parametrize("mode", ["mxfp4", "int8", "w4", "bf16"])
def test_a_lost_input_channel_is_named(mode: str) -> None:
    faults = red(isolated(bench_of(net()), mode, _channel))
    assert "input channel 5 is missing" in faults["layers.1.up:output"]


def test_a_module_that_runs_twice_cannot_be_compared() -> None:
    def twice(module: Any) -> None:
        block = module.layers[1]
        plain = block.up.__class__.__call__
        block.norm.forward = lambda x, f=block.norm.forward: (plain(block.up, f(x)), f(x))[1]

    faults = red(isolated(bench_of(net()), "int8", twice))
    assert "cannot be compared with FP32 code" in faults["layers.1.up:input"]


def _own(broken: bool) -> Callable[[qgate.Model], nn.Module]:
    def build(model: qgate.Model) -> nn.Module:
        module = copy.deepcopy(model.module)
        for block in module.layers:  # type: ignore[union-attr]
            for linear in (block.up, block.down):
                scale = linear.weight.abs().amax(1, keepdim=True) / 127
                linear.weight.data = (linear.weight / scale).round() * scale
        if broken:
            _residual(module)
        return module

    return build


def test_code_between_kernels_is_held_and_products_are_left_to_the_budget() -> None:
    for broken in (False, True):
        model = net({"mine": Kernel(_own(broken), "w8")})
        faults = red(isolated(bench_of(model), "mine"))
        assert list(faults) == (["layers.1:output"] if broken else [])


def test_a_mode_that_may_quantize_anything_says_that_it_is_not_held(tmp_path: Path) -> None:
    bench = bench_of(net({"mine": _own(broken=False)}))
    assert isolated(bench, "mine") == []
    session = ModelGates(bench, tmp_path, Policy(), updating="all")
    outcome = session.layer("layer_outputs", mode_of(bench, "mine"), "layers.1")
    notes = outcome.record["rows"][0]["notes"]
    assert "may quantize anything" in notes["isolated error of *"]


def test_the_reference_has_its_parameters_again_after_an_error() -> None:
    module = nn.Linear(4, 4)
    weight = module.weight
    inside = []

    def fail() -> None:
        with swapped(module, {"": {"weight": weight * 2}}):
            inside.append(module.weight)
            raise QgateError("stop")

    with pytest.raises(QgateError, match="stop"):
        fail()
    assert inside[0] is not weight
    assert module.weight is weight


@proof
def test_a_length_that_the_model_refuses_is_left_out_with_its_reason() -> None:
    def refuse(_module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments[0].shape[-1] == 1:
            raise ValueError("at least two tokens")

    of = short(LLAMA, layers=2)
    mode = mode_of(of, "int8")
    quantized = of.quantized(mode)
    quantized.model.module.register_forward_pre_hook(refuse)
    assert any(row.scope == "isolated" for row in of.measure(mode))
    assert of.segments(quantized).left_out == {
        "one token alone": "the model refuses it (ValueError)"
    }
