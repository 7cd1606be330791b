"""Factors in code of one's own in 16 bits are red where each value could be a rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.modes import Kernel
from tests.campaigns.first_lines.planting import first_line_of
from tests.gate.test_own_kernel_faults import causes, gates_of
from tests.shares import share, slow_file

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5EncoderModel

pytestmark = slow_file

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Change = Callable[[LlamaForCausalLM], object]


class Logits(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=50, max_position_embeddings=64, initializer_range=0.2,
        )  # fmt: skip
        self.lm = LlamaForCausalLM(config).eval()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm(ids, use_cache=False).logits
        return logits


def first_lines(half: str, change: Change, folder: Path, seed: int = 0) -> list[str]:
    """Run the gates of two layers of a model in 16 bits, whose code is changed."""

    def build(reference: qgate.Model) -> nn.Module:
        own = copy.deepcopy(reference.module).to(HALVES[half])
        change(own.lm)  # type: ignore[arg-type]
        return own

    module = Logits(seed)
    samples = [torch.randint(0, 50, (1, 32)) for _ in range(2)]
    own = {"mine": Kernel(build, stands_for=half)}
    model = qgate.Model(module, samples, "net", head=("lm.lm_head",), modes=own)
    return causes(gates_of(model, folder), layers=2)


def scaled(factor: float) -> Change:
    def change(lm: LlamaForCausalLM) -> None:
        lm.model.layers[1].self_attn.scaling *= factor

    return change


def activated(factor: float) -> Change:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (nn.functional.silu(x.float()) * factor).to(x.dtype)

    return lambda lm: setattr(lm.model.layers[0].mlp, "act_fn", Scaled())


@share(3)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled(1.004), "layers.1.self_attn.o_proj:input .* the result of q_proj counts 1.00"),
        (scaled(0.996), "layers.1.self_attn.o_proj:input .* the result of q_proj counts 0.99"),
        (activated(1.002), "layers.0.mlp.act_fn:output .* times the expected one"),
    ],
    ids=["1.004", "0.996", "activation"],
)
def test_a_factor_below_one_rounding_is_red(
    half: str, change: Change, words: str, tmp_path: Path
) -> None:
    lines = first_lines(half, change, tmp_path)
    assert len(lines) == 1
    assert words.split(" .* ")[0] in lines[0]
    assert words.split(" .* ")[1] in lines[0]
    assert "is the size of float noise, and it is none" in lines[0]


def eager(lm: LlamaForCausalLM) -> None:
    lm.set_attn_implementation("eager")


@share(4)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("change", [eager, activated(1.0)], ids=["eager", "activation"])
def test_right_code_that_rounds_otherwise_is_green(
    change: Change, seed: int, half: str, tmp_path: Path
) -> None:
    assert first_lines(half, change, tmp_path, seed) == []


def cut(lm: LlamaForCausalLM) -> None:
    """Cut off a residual where no sample goes."""
    layer: Any = lm.model.layers[0]
    right = layer.forward
    layer.forward = lambda *args, **kwargs: right(*args, **kwargs).clamp(-500.0, 500.0)


def test_a_residual_that_is_cut_among_massive_values_is_red(tmp_path: Path) -> None:
    (line,) = first_lines("bf16", cut, tmp_path)
    assert line.startswith("lm.model.layers.0:output ")
    assert "the result saturates: no value is above 500 or below -500" in line


@pytest.mark.parametrize("half", HALVES)
def test_what_a_model_keeps_in_float32_is_no_fault(half: str, tmp_path: Path) -> None:
    """T5 keeps a product in float32 where it runs in float16."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    module = T5EncoderModel(T5Config(**sizes, num_layers=1)).eval()
    model = qgate.Model(module, [torch.randint(1, 50, (1, 16))], "t5")
    assert first_line_of(model, half, lambda _: None, "forward", tmp_path) == ""
