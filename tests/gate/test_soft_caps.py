"""Bounds of scores and logits that a fused kernel forgets, named by what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import qgate
from tests.campaigns.first_lines.planting import first_line_of
from tests.shares import share


def gemma() -> qgate.Model:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, head_dim=16, final_logit_softcapping=3.0,
        attn_logit_softcapping=5.0,
    )  # fmt: skip
    network = transformers.Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    texts = [torch.randint(0, 96, (1, 32)) for _ in range(2)]
    return qgate.Model(network, texts, "gemma", calibration=texts)


def without_cap_of_logits(network: Any) -> None:
    config = network.config.to_dict() | {"final_logit_softcapping": None}
    network.config = type(network.config)(**config)


def without_cap_of_scores(network: Any) -> None:
    network.model.layers[0].self_attn.attn_logit_softcapping = None


@share(3)
@pytest.mark.parametrize(
    ("plant", "site", "mode"),
    [
        (without_cap_of_logits, "logits", "int8"),
        (without_cap_of_logits, "logits", "bf16"),
        (without_cap_of_scores, "model.layers.0.self_attn.o_proj:input", "int8"),
    ],
)
def test_a_bound_that_is_left_out_is_named(
    plant: Any, site: str, mode: str, tmp_path: Path
) -> None:
    line = first_line_of(gemma(), mode, plant, "forward", tmp_path)
    assert line.startswith(f"{site} (gemma, mode {mode})")
    assert "tanh is left out" in line
