"""Relations of models of transformers, whose caches, masks and positions are their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qgate
from qgate.relations.record import RELATIONS
from qgate.testing import RelationFailure, check_relations
from tests.shares import proof

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "attn_implementation": "eager",
}  # fmt: skip


def model_of(network: Any) -> qgate.Model:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(96, (1, 140), generator=generator) for _ in range(3)]
    return qgate.Model(network.eval(), samples, "net")


def windowed() -> Any:
    """Return a decoder with a sliding window and a cache."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=40)
    return transformers.MistralForCausalLM(config)


@proof
def test_a_decoder_is_asked_for_everything() -> None:
    report = check_relations(model_of(windowed()), mode="int8")
    assert {*report.agreed} == {*RELATIONS} - {"restart", "process"}
    assert not [name for name in report.left_out if "ranks" not in name]


def test_experts_and_routers_agree() -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    model = model_of(transformers.MixtralForCausalLM(config))
    relations = ("alone", "others", "padded left", "chunked")
    assert {*check_relations(model, mode="int8", relations=relations).agreed} == {*relations}


def test_an_encoder_is_padded_as_a_whole() -> None:
    torch.manual_seed(0)
    model = model_of(transformers.BertModel(transformers.BertConfig(**SIZES)))
    report = check_relations(model, mode="int8")
    assert report.agreed["padded right"] == 1
    assert "later tokens change earlier outputs" in report.left_out["padded left"]
    assert "later tokens change" in report.left_out["prefix, chunked, stepwise"]


def test_a_mask_that_is_dropped_is_named() -> None:
    network = windowed()
    attention = network.model.layers[0].self_attn

    class Careless(type(attention)):  # type: ignore[misc]
        def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            # Padding is attended to by the tokens behind it.
            mask = attention_mask.amax(0, keepdim=True).expand_as(attention_mask)
            return super().forward(*args, attention_mask=mask, **kwargs)

    attention.__class__ = Careless
    words = r"padded left: model\.layers\.0\.self_attn\.o_proj:input .* at rows 1, 2, 3"
    with pytest.raises(RelationFailure, match=words):
        check_relations(model_of(network), relations=["padded left"])
