"""Attention of 16 bits with its known roundings, and the room that they give to gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qgate.expected import fused_attention
from qgate.expected.fused_attention import FusedAttention
from qgate.gate import Measured, Policy
from qgate.gate.checks import judge
from qgate.gate.ledger import with_accepted
from qgate.gate.measuring.bench import Bench
from qgate.modes.setups import ModelSetup
from tests.devices import simulated
from tests.gate.benches import LLAMA, SHORT, first_layers, mode_of
from tests.shares import proof

RECORDED = load_file(Path(__file__).parent / "recorded_attention.safetensors")
# Recorded kernels, whether they round gradients of scores after the scale, and the share of equal
# bits. The memory-efficient kernel adds in another order.
GROUPS = {
    "fp16/flash": (False, 1.0), "fp16/cudnn": (True, 1.0), "fp16/efficient": (True, 0.97),
    "bf16/flash": (False, 0.999), "bf16/cudnn": (True, 0.9996),
}  # fmt: skip
CPU, SIMULATED = "cpu-avx512-0badcafe", "sim"


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    simulated.register()


def attended(
    rounds_scaled: bool | None, sides: dict[str, Tensor], grad: Tensor, **options: object
) -> list[Tensor]:
    """Return the result and the gradients of q, k and v."""
    leaves = [side.clone().requires_grad_() for side in sides.values()]
    with FusedAttention(rounds_scaled) as attention:
        result = scaled_dot_product_attention(*leaves, **options)  # type: ignore[arg-type]
    assert attention.calls == 1
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


@pytest.mark.parametrize("group", GROUPS)
def test_gradients_are_those_of_a_gpu(group: str) -> None:
    dtype, rounds_scaled = group.partition("/")[0], GROUPS[group][0]
    sides = {name: RECORDED[f"{dtype}/{name}"] for name in "qkv"}

    def alike(way: bool | None) -> list[float]:
        gradients = attended(way, sides, RECORDED[f"{dtype}/go"])[1:]
        recorded = [RECORDED[f"{group}/d{name}"] for name in "qkv"]
        return [float((a == b).float().mean()) for a, b in zip(gradients, recorded, strict=True)]

    assert min(alike(rounds_scaled)) >= GROUPS[group][1]
    # Of q and k the other way gives other bits; how values are summed is the same.
    assert max(alike(not rounds_scaled)[:2]) < 0.6
    assert min(alike(None)) < 0.7


@pytest.mark.parametrize("rounds_scaled", [False, True])
@pytest.mark.parametrize("kind", ["full", "causal", "masked", "added", "grouped", "scaled"])
def test_attention_is_that_of_float32_but_for_roundings(
    kind: str, rounds_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(3)
    heads = 2 if kind == "grouped" else 4
    shapes = {"q": (2, 4, 37, 32), "k": (2, heads, 50, 32), "v": (2, heads, 50, 32)}
    sides = {name: torch.randn(of, generator=draw).half() for name, of in shapes.items()}
    grad = torch.randn(2, 4, 37, 32, generator=draw).half()
    options: dict[str, object] = {
        "full": {}, "causal": {"is_causal": True}, "scaled": {"scale": 0.3},
        "masked": {"attn_mask": torch.rand(37, 50, generator=draw) > 0.4},
        "added": {"attn_mask": torch.randn(1, 1, 1, 50, generator=draw).half()},
        "grouped": {"enable_gqa": True},
    }[kind]  # fmt: skip
    gradients = attended(rounds_scaled, sides, grad, **options)
    if kind == "added":
        options = {"attn_mask": options["attn_mask"].float()}  # type: ignore[attr-defined]
    leaves = [side.float().requires_grad_() for side in sides.values()]
    result = scaled_dot_product_attention(*leaves, **options)  # type: ignore[arg-type]
    exact = [result.detach(), *torch.autograd.grad(result, leaves, grad.float())]
    for one, other in zip(gradients, exact, strict=True):
        assert one.dtype == torch.float16
        error = (one.float() - other).square().mean() / other.square().mean()
        assert error < 1e-6
    monkeypatch.setattr(fused_attention, "_SCORES", 2 * 4 * 50 * 10)  # ten rows at once
    for one, other in zip(attended(rounds_scaled, sides, grad, **options), exact, strict=True):
        assert (one.float() - other).square().mean() / other.square().mean() < 1e-6


def test_other_attention_is_left_to_torch() -> None:
    q = torch.randn(1, 1, 8, 16)
    with FusedAttention(rounds_scaled=True) as attention:
        assert torch.equal(
            scaled_dot_product_attention(q, q, q), scaled_dot_product_attention(q, q, q)
        )
    assert attention.calls == 0


# Products in float16 of one CPU moved other gradients by 12 % beside those of another.
LIMITS = Policy.from_table(
    {"regression_other_device": 0.15, "reason": "products of CPUs with float16 instructions"}
)


@cache
def measured(device: str) -> list[Measured]:
    """Measure the gradients of one layer in float16."""
    return gradients_of(bench_on(device))


def bench_on(device: str) -> Bench:
    setup = ModelSetup(LLAMA, device, replace(SHORT, seqlen=256))
    return Bench(setup, _model=first_layers(setup.load(), 1))


def gradients_of(bench: Bench) -> list[Measured]:
    return bench.gradients(mode_of(bench, "fp16"))


def failing(rows: list[Measured]) -> set[str]:
    """Return the modules that are red against what a CPU accepted."""
    accepted = {
        row.site: {name: row.value(name) for name in row.compared} for row in measured("cpu")
    }
    accepted_rows = [
        with_accepted(row, accepted[row.site], dict.fromkeys(row.compared, CPU), SIMULATED)  # type: ignore[arg-type]
        for row in rows
    ]
    verdict = judge(accepted_rows, LIMITS.limits_of("fp16"))
    return {check.site.rpartition(".")[2] for check in verdict.failed}


@proof
def test_gradients_of_float16_are_green_with_the_room_of_the_device_alone() -> None:
    rows = measured("sim:0")
    assert failing(rows) == set()
    without = failing([replace(row, device_room={}) for row in rows])
    assert without == {"q_proj:weight", "k_proj:weight"}
    assert all(not row.device_room for row in measured("cpu"))


@proof
@pytest.mark.parametrize("module", ["q_proj", "k_proj", "v_proj", "gate_proj"])
def test_a_wrong_gradient_is_red_beside_the_room(module: str) -> None:
    """A weight of the mode alone is half a percent off."""
    bench = bench_on("sim:0")
    mode = mode_of(bench, "fp16")
    wrong = bench.quantized(mode).model.module
    with torch.no_grad():
        for name, parameter in wrong.named_parameters():
            if module in name:
                parameter.mul_(1.005)
    assert failing(bench.gradients(mode))
