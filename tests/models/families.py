"""Small models of transformers' families, of random weights, whose states and caches matter."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import qgate

transformers = pytest.importorskip("transformers")
VOCABULARY = 64
_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "max_position_embeddings": 256,
}  # fmt: skip
_HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 6,
    "mamba_chunk_size": 16,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 8, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

STATES: dict[str, dict[str, Any]] = {
    "Mamba": _BASE | {"state_size": 6},
    "FalconMamba": _BASE | {"state_size": 6},
    "Jamba": _BASE
    | _HEADS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 6},
    "Mamba2": _BASE
    | {
        "state_size": 6, "expand": 2, "n_groups": 2, "num_heads": 4, "head_dim": 16,
        "chunk_size": 16,
    },
    "FalconH1": _BASE | _HEADS | _MAMBA2 | {"head_dim": 8, "mamba_d_ssm": 64},
    "Bamba": _BASE | _HEADS | _MAMBA2 | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": _BASE
    | _HEADS
    | _MAMBA2
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32},
    "NemotronH": _BASE
    | _HEADS
    | {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "head_dim": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 6,
        "chunk_size": 16,
    },
    "Zamba2": _BASE
    | _HEADS
    | {
        "num_key_value_heads": 4, "mamba_d_state": 6, "mamba_ngroups": 1, "n_mamba_heads": 4,
        "mamba_headdim": 16, "chunk_size": 16, "layers_block_type": ["mamba", *["hybrid"] * 3],
        "num_hidden_layers": 4, "num_mem_blocks": 2, "use_mem_rope": True,
        "use_shared_attention_adapter": True, "adapter_rank": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Qwen3Next": _BASE | _HEADS | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3_5": _BASE | _HEADS | _DELTA,
    "Qwen3_5Moe": _BASE | _HEADS | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "OlmoHybrid": _BASE | _HEADS | _DELTA | {"linear_num_key_heads": 4, "eos_token_id": 1},
    "KimiLinear": _BASE
    | _HEADS
    | _LATENT
    | {
        "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 4,
        "num_experts_per_token": 2, "moe_intermediate_size": 16,
    },
    "Lfm2": _BASE | _HEADS | {"layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": _BASE
    | _HEADS
    | _EXPERTS
    | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}  # fmt: skip
"""Sizes of models with recurrent states, by the beginning of the names of their classes."""

_TEXT_CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


@functools.cache
def network_of(family: str, seed: int = 0) -> Any:
    """Return a network whose projections are large, so that states are not lost in the residual."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        named = _TEXT_CONFIGS.get(family, f"{family}Config")
        config = getattr(transformers, named)(**STATES[family])
        network = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if ("proj" in name or "adapter" in name) and parameter.dim() == 2:
                    parameter.mul_(8)
                if name.endswith("out_proj.weight"):
                    parameter.mul_(4)
    return network


def texts(count: int, tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """Return rows of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(2, VOCABULARY, (count, tokens), generator=generator).split(1))


def model_of(family: str, count: int = 3, tokens: int = 48, seed: int = 0) -> qgate.Model:
    """Return a family's network with random texts to run and to calibrate on."""
    network, calibration = network_of(family, seed), texts(2, tokens, seed + 100)
    return qgate.Model(network, texts(count, tokens, seed), family, calibration=calibration)
