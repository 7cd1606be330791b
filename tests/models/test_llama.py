"""The small Llama computes what transformers' LlamaForCausalLM computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.models.llama import Llama, LlamaConfig
from qgate.models.tiny import TINY
from tests.models.checkpoints import assert_same, outputs, randomize

transformers = pytest.importorskip("transformers")

SIZES = {
    "tiny-llama": TINY.get("tiny-llama").make_config(),
    "one head for all": LlamaConfig(50, 32, 3, heads=4, kv_heads=1, d_ff=48, eps=1e-3),
    "a head each, another base": LlamaConfig(50, 24, 2, 2, 2, 80, rope_base=100.0),
}


def twin(config: LlamaConfig, **fields: Any) -> Any:
    """The same model as transformers has it, not initialized."""
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        rms_norm_eps=config.eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=True,
        **fields,
    )
    settings._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(settings).eval()


@pytest.mark.parametrize("name", SIZES)
def test_logits_and_blocks_are_those_of_transformers(name: str) -> None:
    config = SIZES[name]
    ours = Llama(config).eval()
    randomize(ours)
    theirs = twin(config)
    missing, unexpected = theirs.load_state_dict(ours.state_dict())
    assert not missing
    assert not unexpected
    blocks = [f"model.layers.{k}" for k in range(config.n_layer)]
    assert_same(ours, theirs, blocks, config.vocab_size)


def test_the_comparison_sees_another_rotation() -> None:
    config = SIZES["one head for all"]
    ours = Llama(config).eval()
    randomize(ours)
    other = Llama(LlamaConfig(50, 32, 3, heads=4, kv_heads=1, d_ff=48, eps=1e-3, rope_base=9000.0))
    other.load_state_dict(ours.state_dict())
    with pytest.raises(AssertionError):
        assert_same(ours, other.eval(), ["model.layers.0"], 50)


def test_what_comes_later_changes_nothing_before() -> None:
    network = Llama(SIZES["tiny-llama"]).eval()
    randomize(network)
    ids = torch.arange(32).view(1, -1)
    long, _ = outputs(network, [], ids)
    short, _ = outputs(network, [], ids[:, :20])
    torch.testing.assert_close(long[:, :20], short, rtol=0, atol=1e-5)
    first: Tensor = outputs(network, [], ids)[0]
    assert torch.equal(first, long)
