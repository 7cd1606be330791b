"""Mixtures in 16 bits: near ties of a router are no fault, and faults of routers stay red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import qgate
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.modes.setups import ModelSetup
from tests.gate.benches import mode_of
from tests.shares import share, slow_file

pytestmark = slow_file

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
MIXTRAL = transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}
QWEN = (
    transformers.Qwen3MoeConfig,
    transformers.Qwen3MoeForCausalLM,
    {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
)


def wrong(
    family: Any, mode: str, seed: int, change: Callable[[nn.Module], None] | None = None
) -> list[Measured]:
    config, network, sizes = family
    torch.manual_seed(seed)
    samples = [torch.randint(1, 128, (1, 96)) for _ in range(3)]
    model = network(config(**SIZES, **sizes)).eval()
    of = Bench(ModelSetup("moe"), _model=qgate.Model(model, samples, "moe", calibration=samples))
    chosen = mode_of(of, mode)
    if change is not None:
        change(of.quantized(chosen).model.module.model.layers[1].mlp.gate)
    rows = of.measure(chosen)
    assert rows
    return [row for row in rows if row.why]


@share(4)
@pytest.mark.parametrize("family", [MIXTRAL, QWEN], ids=["mixtral", "qwen"])
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("seed", range(5))
def test_near_ties_of_right_routers_are_green(family: Any, mode: str, seed: int) -> None:
    assert wrong(family, mode, seed) == []


def _another_expert(router: Any) -> None:
    right = router.forward

    def forward(hidden: Any) -> Any:
        logits, scores, numbers = right(hidden)
        return logits, scores, numbers.flip(0)

    router.forward = forward


def _one_expert_louder(router: Any) -> None:
    with torch.no_grad():
        router.weight[2] *= 1.5


@share(8)
@pytest.mark.parametrize("family", [MIXTRAL, QWEN], ids=["mixtral", "qwen"])
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("change", [_another_expert, _one_expert_louder])
def test_a_wrong_router_is_red(family: Any, change: Callable[[nn.Module], None], mode: str) -> None:
    rows = wrong(family, mode, 0, change)
    assert rows
    assert all(row.site.startswith(("model.layers.1", "logits")) for row in rows)
