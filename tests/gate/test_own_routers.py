"""Mixtures of one's own code: experts in a loop, and routers that choose the largest themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.modes.setups import ModelSetup
from tests.gate.benches import mode_of
from tests.shares import share

WIDTH, EXPERTS = 32, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(nn.functional.silu(self.up(x)))
        return result


class Mixture(nn.Module):
    """Sends each token to one expert or two; `fault` is what goes wrong."""

    fault, calls_all = "", False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.fault == "next best":
            scores = scores.scatter(1, scores.argmax(1, keepdim=True), 0.0)
        if self.kind == "topk":
            weights, numbers = scores.topk(2, dim=-1)
            return weights / weights.sum(-1, keepdim=True), numbers
        if self.kind == "max":
            weights, numbers = scores.max(-1, keepdim=True)
            return weights, numbers
        numbers = torch.argmax(scores, dim=-1)
        return scores.gather(1, numbers[:, None]), numbers[:, None]

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, numbers = self.choose(self.router(flat).softmax(-1))
        if self.fault == "weights":
            weights = weights * 1.02
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = (numbers == number).nonzero(as_tuple=True)
            if len(rows) or self.calls_all:
                mixed = mixed.index_add(0, rows, expert(flat[rows]) * weights[rows, slots][:, None])
        return x + mixed.view_as(x)


class Network(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, WIDTH)
        self.layers = nn.ModuleList(Mixture(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, 60)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def wrong(kind: str, mode: str, seed: int, fault: str = "") -> list[Measured]:
    torch.manual_seed(seed)
    samples = [torch.randint(60, (2, 48)) for _ in range(2)]
    model = qgate.Model(Network(kind).eval(), samples, "mixture", calibration=samples)
    bench = Bench(ModelSetup("mixture"), _model=model)
    chosen = mode_of(bench, mode)
    network: Any = bench.quantized(chosen).model.module
    network.layers[1].fault = fault
    every = [row for rows in (bench.measure, bench.gradients) for row in rows(chosen)]
    assert len(every) > 20
    return [row for row in every if row.why]


@share(12)
@pytest.mark.parametrize("kind", ["topk", "max", "argmax"])
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16", "fp16"])
@pytest.mark.parametrize("seed", range(3))
def test_a_right_mixture_is_green_wherever_its_router_sends_tokens(
    kind: str, mode: str, seed: int
) -> None:
    assert [f"{row.site} {row.why}" for row in wrong(kind, mode, seed)] == []


@pytest.mark.parametrize("mode", ["int8", "bf16"])
@pytest.mark.parametrize("fault", ["next best", "weights"])
def test_a_wrong_choice_and_a_wrong_weight_are_red(fault: str, mode: str) -> None:
    assert wrong("topk", mode, 0, fault)


@share(6)
@pytest.mark.parametrize("is_called", [True, False], ids=["empty calls", "no calls"])
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16"])
def test_experts_that_no_token_reaches_are_left_out(
    mode: str, is_called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gate.test_own_routers.EXPERTS", 16)
    monkeypatch.setattr(Mixture, "calls_all", is_called)
    torch.manual_seed(0)
    samples = [torch.randint(60, (1, 6)) for _ in range(2)]
    model = qgate.Model(Network("topk").eval(), samples, "mixture", calibration=samples)
    bench = Bench(ModelSetup("mixture"), _model=model)
    chosen = mode_of(bench, mode)
    rows = bench.measure(chosen) + bench.gradients(chosen)
    assert len(rows) > 100
    assert [f"{row.site} {row.why}" for row in rows if row.why] == []


def test_an_expert_whose_gradient_is_lost_is_red() -> None:
    torch.manual_seed(0)
    samples = [torch.randint(60, (2, 48)) for _ in range(2)]
    model = qgate.Model(Network("topk").eval(), samples, "mixture", calibration=samples)
    bench = Bench(ModelSetup("mixture"), _model=model)
    chosen = mode_of(bench, "int8")
    expert: Any = bench.quantized(chosen).model.module.layers[1].experts[2]  # type: ignore[union-attr, index]
    right = expert.forward
    expert.forward = lambda x: right(x).detach()
    lost = {row.site for row in bench.gradients(chosen) if "gradient is zero" in str(row.why)}
    assert {f"layers.1.experts.2.{leaf}:weight" for leaf in ("up", "down")} <= lost
