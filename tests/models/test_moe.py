"""The small mixture of experts: what transformers computes, its two layouts, and fair routing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from qgate import QgateError
from qgate.models import Model, Sampling, load, training
from qgate.models.experts import AlignedExperts, FusedExperts, slice_experts, top_experts
from qgate.models.moe import Moe, MoeConfig
from qgate.models.tiny import TINY
from qgate.models.train import train
from tests.models.checkpoints import randomize

SMALL = MoeConfig(50, 32, 2, heads=4, kv_heads=2, d_ff=24, experts=4, top_k=2)
SHORT = Sampling(samples=4, seqlen=256)
LAYOUTS = ("tiny-moe", "tiny-moe-list")


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: load(name, sampling=SHORT) for name in LAYOUTS}


def numpy_mixture(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, asked: int) -> Any:
    """A mixture token by token, from its definition."""
    x, router, gate_up, down = (t.double().numpy() for t in (x, router, gate_up, down))
    result = np.zeros_like(x)
    for token, row in enumerate(x):
        logits = router @ row
        shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-shares)[:asked]
        for expert in chosen:
            gate, up = np.split(gate_up[expert] @ row, 2)
            part = down[expert] @ (gate / (1 + np.exp(-gate)) * up)
            result[token] += shares[expert] / shares[chosen].sum() * part
    return result


def test_a_mixture_is_what_its_definition_says() -> None:
    network = Moe(SMALL).eval()
    randomize(network)
    mixture = network.model.layers[0].mlp
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
    weights = mixture.experts.gate_up_proj, mixture.experts.down_proj
    with torch.no_grad():
        expected = numpy_mixture(x[0], mixture.router.weight, *weights, 2)
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(mixture(x)[0].numpy(), expected, atol=1e-5)
        for listed in (False, True):
            sliced = Moe(SMALL).eval()
            sliced.load_state_dict(network.state_dict())
            names = slice_experts(sliced, listed=listed)
            assert names == [f"model.layers.{k}.mlp.experts" for k in range(2)]
            np.testing.assert_allclose(sliced.model.layers[0].mlp(x)[0], expected, atol=1e-5)


def test_logits_are_those_of_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        rms_norm_eps=1e-5, tie_word_embeddings=True, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    settings._attn_implementation = "eager"
    theirs = transformers.MixtralForCausalLM(settings).eval()
    ours = Moe(SMALL).eval()
    randomize(ours)
    state = {k.replace("mlp.router", "mlp.gate"): v for k, v in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(state)
    assert not missing
    assert not unexpected
    ids = torch.arange(40).view(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_both_layouts_compute_the_same_and_share_storage(models: dict[str, Model]) -> None:
    ids = models["tiny-moe"].inputs[0]
    with torch.no_grad():
        fused, listed = (models[name](ids) for name in LAYOUTS)
    torch.testing.assert_close(fused, listed, rtol=1e-5, atol=1e-5)
    network = Moe(SMALL)
    randomize(network)
    weight = network.model.layers[0].mlp.experts.gate_up_proj
    slice_experts(network)
    part = network.model.layers[0].mlp.experts.get_submodule("2.gate_up_proj").weight
    assert part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert torch.equal(part, weight[2])
    assert sum(p.numel() for p in models["tiny-moe"].module.parameters()) == 1_021_056


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_expert_has_sites_of_its_own(name: str, models: dict[str, Model]) -> None:
    sites = {site.name for site in models[name].sites()}
    parts = ("gate_up_proj", "down_proj") if name == "tiny-moe" else ("gate_proj", "up_proj")
    for layer in range(4):
        assert f"model.layers.{layer}.mlp.router:weight" in sites
        assert f"model.layers.{layer}.mlp.experts.routing:output" in sites
        for expert in range(8):
            for part in parts:
                at = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                assert {f"{at}:input", f"{at}:weight", f"{at}:output"} <= sites
    assert models[name].layers == tuple(f"model.layers.{k}" for k in range(4))


def test_tokens_of_other_experts_are_zero_at_an_expert(models: dict[str, Model]) -> None:
    model = models["tiny-moe"]
    experts: Any = model.module.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(experts, AlignedExperts)
    tensors: dict[str, Tensor] = {}
    hooks = [
        experts.routing.register_forward_hook(lambda _m, _a, out: tensors.update(routing=out)),
        getattr(experts, "3").register_forward_pre_hook(lambda _m, args: tensors.update(x=args[0])),
    ]
    with torch.no_grad():
        model(model.inputs[0])
    for hook in hooks:
        hook.remove()
    routed = tensors["routing"][..., 3] != 0
    assert torch.equal((tensors["x"] != 0).any(-1), routed)
    assert 0 < float(routed.float().mean()) < 1
    torch.testing.assert_close(tensors["routing"].sum(-1), torch.ones(routed.shape))


def test_every_expert_gets_a_fair_share_of_tokens(models: dict[str, Model]) -> None:
    model, counts = models["tiny-moe"], torch.zeros(4, 8)
    hooks = []
    for layer in range(4):

        def count(_m: nn.Module, _a: Any, routing: Tensor, layer: int = layer) -> None:
            counts[layer] += (routing != 0).flatten(0, -2).sum(0)

        routing = model.module.get_submodule(f"model.layers.{layer}.mlp.experts.routing")
        hooks.append(routing.register_forward_hook(count))
    with torch.no_grad():
        for sample in model.inputs:
            model(sample)
    for hook in hooks:
        hook.remove()
    shares = counts / counts.sum(1, keepdim=True)
    assert torch.equal(counts.sum(1), torch.full((4,), 2.0 * 4 * 256))
    assert float(shares.min()) > 0.04
    assert float(shares.max()) < 0.3


def test_routing_weights_decide_and_are_no_copies_of_each_other(models: dict[str, Model]) -> None:
    model = models["tiny-moe"]
    experts: Any = model.module.get_submodule("model.layers.2.mlp.experts")
    downs = torch.stack([getattr(experts, str(k)).down_proj.weight.flatten() for k in range(8)])
    similar = torch.corrcoef(downs.detach()) - torch.eye(8)
    assert float(similar.abs().max()) < 0.5


def test_the_record_says_how_it_was_trained() -> None:
    tiny = TINY.get("tiny-moe")
    with safe_open(tiny.file, framework="numpy") as file:
        record = json.loads(file.metadata()["qgate"])
    assert record["sizes"].items() <= asdict(tiny.make_config()).items()
    assert record["training"]["steps"] == tiny.steps
    bits = record["bits_per_byte"]
    assert bits["model"] < 0.75 * bits["bigram"] < bits["unigram"]
    assert TINY.get("tiny-moe-list").file == tiny.file
    assert tiny.file.stat().st_size < 4.2e6


def test_training_is_reproducible_and_spreads_tokens() -> None:
    text = "the cat sat on the mat. " * 400
    states = []
    for _ in range(2):
        network = Moe(MoeConfig(256, 32, 1, 2, 2, 16, experts=4, top_k=2))
        training.fit(
            network, text, text[:1200], steps=2, rate=1e-2, seed=3, on_step=lambda *_: None
        )
        states.append(network.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_layout_of_other_weights_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(
        QgateError, match="tiny-moe-list has the weights of tiny-moe: train tiny-moe"
    ):
        train("tiny-moe-list", tmp_path, 1, 0)


def test_top_experts_add_up_to_one_in_any_dtype() -> None:
    logits = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        weights, chosen = top_experts(logits.to(dtype), 2)
        assert weights.dtype == dtype
        assert chosen.shape == (5, 7, 2)
        torch.testing.assert_close(weights.float().sum(-1), torch.ones(5, 7), rtol=0, atol=0.01)


def test_fused_experts_without_tokens_change_nothing() -> None:
    fused = FusedExperts(3, 8, 4)
    nn.init.normal_(fused.gate_up_proj)
    nn.init.normal_(fused.down_proj)
    x, chosen = torch.randn(1, 5, 8), torch.zeros(1, 5, 1, dtype=torch.int64)
    whole = fused(x, chosen, torch.ones(1, 5, 1))
    assert whole.shape == x.shape
    assert bool(whole.abs().sum() > 0)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 24}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "intermediate_size": 24, "head_dim": 8}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24}),
    "qwen2-moe": (
        "Qwen2Moe",
        {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
}


def network_of(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    kind, sizes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts_per_tok=2, pad_token_id=0, use_cache=False, **sizes,
    )  # fmt: skip
    network = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    randomize(network)
    return network.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_transformers_are_sliced_and_compute_the_same(family: str) -> None:
    network, ids = network_of(family), torch.arange(40).view(1, -1)
    with torch.no_grad():
        before = network(ids).logits
        names = slice_experts(network)
        after = network(ids).logits
    assert names == [f"model.layers.{k}.mlp.experts" for k in range(2)]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    model = Model(network, [ids], family)
    sites = {site.name for site in model.sites()}
    assert "model.layers.1.mlp.experts.3.gate_up_proj:weight" in sites
    assert "model.layers.1.mlp.experts.routing:output" in sites


def test_experts_that_compute_something_else_stay_as_they_are() -> None:
    network = network_of("mixtral")
    fused = network.model.layers[0].mlp.experts
    kind = type(fused)
    twice = type("Other", (kind,), {"forward": lambda self, *a: 2 * kind.forward(self, *a)})
    fused.__class__ = twice
    assert slice_experts(network) == ["model.layers.1.mlp.experts"]
    assert network.model.layers[0].mlp.experts is fused
    assert fused.gate_up_proj.dim() == 3
