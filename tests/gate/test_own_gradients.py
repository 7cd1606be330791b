"""Gradients of own kernels: a factor is a fault, and quantizing the gradient is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qgate
from tests.campaigns.first_lines.planting import first_line_of
from tests.gate.benches import mode_of, session
from tests.gate.own_kernels import FORMATS, WIDTH, Cast, Product, own_model
from tests.gate.test_own_kernel_faults import gates_of
from tests.shares import always, share, slow_file

pytestmark = slow_file

SUITE = "suites/test_gradients.py::test_gradients"


class _Product(torch.autograd.Function):
    """A product of quantized tensors with a pass back of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, fmt: str, of_weight: Cast, inner: Cast) -> Tensor:
        quantized = FORMATS[fmt].cast(x), FORMATS[fmt].of_weight(w)
        ctx.save_for_backward(*quantized)
        ctx.casts = of_weight, inner
        return quantized[0] @ quantized[1].T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), (of_weight, inner) = gradients, ctx.saved_tensors, ctx.casts
        return inner(g) @ w, of_weight(g).flatten(0, -2).T @ x.flatten(0, -2), None, None, None


def trained(fmt: str, of_weight: Cast, inner: Cast) -> Product:
    return lambda x, w, _b: _Product.apply(x, w, fmt, of_weight, inner)  # type: ignore[no-untyped-call, no-any-return]


def red(folder: Path, fmt: str, product: Product | None, seed: int = 0) -> dict[str, str]:
    """Run the gates of gradients; return what is red at each site."""
    gated = gates_of(own_model(fmt, product, seed=seed), folder)
    mode = gated.bench.setup.select("mine", gated.bench.model)[0]
    outcomes = [gated.gradients(SUITE, mode, layer) for layer in gated.bench.layers]
    rows = [row for outcome in outcomes for row in outcome.record["rows"]]
    assert len(rows) > 14
    return {row["site"]: row["finding"]["fault"] for row in rows if not row["passed"]}


def same(gradient: Tensor) -> Tensor:
    return gradient


@share(12)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_right_gradients_are_green(fmt: str, seed: int, tmp_path: Path) -> None:
    cast = FORMATS[fmt].cast
    casts = [
        (same, same),
        (cast, cast),
        (lambda g: cast(g.transpose(-1, -2)).transpose(-1, -2), same),
    ]
    for number, (of_weight, inner) in enumerate(casts):
        product = trained(fmt, of_weight, inner)
        assert red(tmp_path / str(number), fmt, product, seed) == {}


@share(8)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("factor", [1.01, 0.99, 1.5])
@pytest.mark.parametrize("part", ["its gradient", "the gradient of the input"])
def test_a_factor_is_red(part: str, factor: float, fmt: str, tmp_path: Path) -> None:
    def scaled(gradient: Tensor) -> Tensor:
        return factor * gradient

    casts = (scaled, same) if part == "its gradient" else (same, scaled)
    faults = red(tmp_path, fmt, trained(fmt, *casts))
    sites = {site for site in faults if site.endswith("_proj:weight")}
    assert len(sites) >= 8
    for site in sites:
        assert faults[site].startswith(f"{part} is {factor:.3g}"), faults[site]
        assert "times what FP32 code makes" in faults[site]


def at(place: tuple[Any, ...], factor: float) -> Cast:
    """Multiply a part of a gradient."""

    def changed(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[place] *= factor
        return gradient

    return changed


@share(4)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("of_weight", "inner", "words"),
    [
        (at((..., 5), -1), same, "its gradient is, in row 5 of 64, -1"),
        (at((..., 5), 1.1), same, "its gradient is, in row 5 of 64, 1.1 times"),
        (at((..., 7, slice(None)), -1), same, r"its gradient counts 2 of 64 tokens \(7, 39\) -"),
        (
            same,
            at((..., 7, slice(None)), 0),
            r"of the input is, in 2 of 64 tokens \(7, 39\), 0 times",
        ),
        (same, at((..., 7, slice(None)), 1.05), r"in 2 of 64 tokens \(7, 39\), 1.05 times"),
        (same, at((..., 5), 0), "of the input counts output channel 5 of 64 -?0"),
        (same, lambda g: g.roll(1, -2), "the gradient of the input stands one row later than"),
    ],
    ids=["row", "scaled row", "token", "lost token", "scaled token", "term", "late"],
)
def test_a_part_of_a_gradient_is_named(
    of_weight: Cast, inner: Cast, words: str, fmt: str, tmp_path: Path
) -> None:
    faults = red(tmp_path, fmt, trained(fmt, of_weight, inner))
    assert [fault for fault in faults.values() if re.search(words, fault)], faults


@always
def test_a_kernel_without_straight_through_gradients_has_no_factor(tmp_path: Path) -> None:
    assert red(tmp_path, "int8", None) == {}


@share(4)
@pytest.mark.parametrize("mode", ["int8", "mxfp4"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (same, ""),
        (lambda g: 1.01 * g, "is not what FP32 code makes of .*: the result is 1.01 times"),
        (lambda g: g.bfloat16().float(), "is not what FP32 code makes of the gradients behind it"),
    ],
    ids=["right", "factor", "bfloat16"],
)
def test_gradients_of_the_modes_of_qgate_are_exact(
    change: Cast, words: str, mode: str, tmp_path: Path
) -> None:
    gates = session(tmp_path, updating="all", layers=1)
    name = "model.layers.0.self_attn.v_proj"
    gates.bench.model.module.get_submodule(name).weight.register_hook(change)  # type: ignore[operator,union-attr]
    outcome = gates.gradients(SUITE, mode_of(gates.bench, mode), gates.bench.layers[0])
    rows = [row for row in outcome.record["rows"] if not row["passed"]]
    faults = {row["site"]: row["finding"]["fault"] for row in rows}
    assert [*faults] == ([f"{name}:weight"] if words else [])
    assert all(re.match(words, fault) for fault in faults.values()), faults


class _Ending(nn.Module):
    """A block that ends in a product, whose gradient is the reference's, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.relu_(self.up(x)))
        return down


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 8, 3, padding=1)
        self.layers = nn.ModuleList(_Ending() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("mode", ["int8", "w4"])
def test_blocks_that_end_in_a_product_are_green(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qgate.Model(_Blocks(), [torch.randn(2, 8, WIDTH) for _ in range(2)], "blocks")
    gates = gates_of(model, tmp_path)
    outcomes = [gates.gradients(SUITE, mode_of(gates.bench, mode), at) for at in model.layers]
    rows = [row for outcome in outcomes for row in outcome.record["rows"]]
    compared = {c["site"] for row in rows for c in row["checks"] if c["kind"] == "conformance"}
    assert compared == {row["site"] for row in rows}
    assert len(compared) == 9
    assert [row["site"] for row in rows if not row["passed"]] == []


class FusedGate(torch.autograd.Function):
    """A gate whose way back is computed in float32, as fused kernels do: nearer to FP32."""

    share = 1.0

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.float() for tensor in ctx.saved_tensors)
        wide, sigmoid = gradient.float(), gate.sigmoid()
        of_gate = wide * up * sigmoid * (1 + FusedGate.share * gate * (1 - sigmoid))
        return of_gate.to(gradient.dtype), (wide * gate * sigmoid).to(gradient.dtype)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.is_fused = False

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        fused: Tensor = FusedGate.apply(gate, up)  # type: ignore[no-untyped-call]
        return x + self.down(fused if self.is_fused else nn.functional.silu(gate) * up)


@always
@pytest.mark.parametrize("mode", ["bf16", "fp16", "int8"])
def test_a_fused_way_back_of_float32_is_green_and_one_of_less_is_red(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant(network: nn.Module) -> None:
        for module in network.modules():
            if isinstance(module, Gated):
                module.is_fused = True

    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(50, 32), Gated(), Gated(), nn.Linear(32, 50))
    tokens = [torch.randint(50, (2, 40)) for _ in range(3)]
    model = qgate.Model(network, tokens[:2], name="gated", calibration=tokens[2:])
    assert first_line_of(model, mode, plant, "gradients", tmp_path) == ""
    monkeypatch.setattr(FusedGate, "share", 0.98)
    assert "gradient" in first_line_of(model, mode, plant, "gradients", tmp_path)
