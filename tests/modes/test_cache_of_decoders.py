"""Modes of the cache on decoders of transformers."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import QgateError, models, modes
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.serving.cache_rows import ServedCaches
from qgate.gate.serving.cache_traces import attentions_of
from qgate.models import Model
from qgate.modes.attention import sources
from qgate.modes.attention.core import AttentionCore
from qgate.modes.attention.sources import AttentionSource, source_of
from qgate.modes.resolving import misfit_of
from tests.gate.test_cache_faults import findings
from tests.models.families import model_of
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
WINDOWED = (
    "Mistral", "Mixtral", "Qwen2-windowed", "Gemma2", "Gemma3", "Cohere2", "Cwm", "Exaone4",
    "Ministral", "Olmo3", "Phimoe", "SmolLM3", "Starcoder2",
)  # fmt: skip
LIKE_LLAMA = (
    "Apertus", "Arcee", "Cohere", "Cohere-normed", "Dots1", "Ernie4_5", "Ernie4_5_Moe", "FlexOlmo",
    "Glm", "Glm4", "Glm4Moe", "Glm4Moe-normed", "Granite", "GraniteMoe", "GraniteMoeShared",
    "Helium", "MiniMaxM2", "Nemotron", "Olmo2", "Qwen2Moe", "SeedOss", "SmolLM3-plain",
)  # fmt: skip
LATENT = ("DeepseekV2", "DeepseekV3", "DeepseekV3-lora", "Glm4MoeLite", "MiniCPM3", "KimiLinear")
HYBRIDS = (
    "Bamba", "FalconH1", "GraniteMoeHybrid", "KimiLinear", "Lfm2", "Lfm2Moe", "NemotronH",
    "OlmoHybrid", "Qwen3Next", "Qwen3_5", "Zamba2",
)  # fmt: skip
DECODERS = (
    "Llama",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Gemma",
    "Jamba",
    "Llama-linear",
    "Llama-llama3",
    "Llama-yarn",
    "Llama-longrope",
    "Llama-dynamic",
    *WINDOWED,
    *LIKE_LLAMA,
    *LATENT[:-1],
    *HYBRIDS,
)
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
    "beta_fast": 8.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "long_factor": [4.0] * 8,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "original_max_position_embeddings": 96,
}  # fmt: skip
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
ROPES = {
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "longrope": LONGROPE,
    "dynamic": DYNAMIC,
}
_SPECIAL: dict[str, Any] = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16,
}  # fmt: skip
_IN_TURNS: dict[str, Any] = _SPECIAL | {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = _SPECIAL | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_ROUTED: dict[str, Any] = _EXPERTS | {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Apertus", "Arcee", "Cohere", "Ernie4_5", "Glm", "Glm4", "Helium", "Nemotron", "Olmo2", "SeedOss", "Ministral", "Starcoder2"), _SPECIAL),
    **dict.fromkeys(("Cohere2", "Cwm", "Exaone4", "Olmo3"), _IN_TURNS),
    "Dots1": _ROUTED, "Glm4Moe": _ROUTED | {"num_local_experts": 4}, "FlexOlmo": _EXPERTS,
    "Qwen2Moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "Ernie4_5_Moe": _EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "Granite": {"attention_multiplier": 0.1}, "GraniteMoe": _LOCAL | {"attention_multiplier": 0.1},
    "GraniteMoeShared": _LOCAL, "MiniMaxM2": _EXPERTS | _LOCAL,
    "SmolLM3": _IN_TURNS | {"use_sliding_window": True, "no_rope_layers": [1, 0]},
}  # fmt: skip
"""Sizes of families beside those that all take, and windows in one layer of two."""
MODES = ("kv-fp8", "kv-fp8-prerope", "kv-int8", "kv-mxfp4", "attn-fp8-head")


def folder(path: Path, kind: str, **more: Any) -> Path:
    torch.manual_seed(0)
    named = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, named)(**SIZES | more)
    network = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(8)
    network.save_pretrained(path)
    return path


def load(path: Path) -> Model:
    tokens = torch.randint(64, (600,), generator=torch.Generator().manual_seed(1))
    sampling = models.Sampling(
        samples=3, seqlen=80, calib_samples=2, calib_seqlen=80, tokens=tokens
    )
    return models.load(f"hf:{path}", name="decoder", sampling=sampling)


def decoder(path: Path, kind: str) -> Model:
    """Return a decoder; those with windows see 40 tokens, Qwen2 and Gemma 3 in one layer of two."""
    kind, _, special = kind.partition("-")
    if kind in HYBRIDS:
        return model_of(kind, tokens=80)
    more: dict[str, Any] = {"sliding_window": 40} if kind in WINDOWED else {}
    if special in ROPES:
        more |= {"rope_parameters": ROPES[special]}
    if kind in LATENT:
        more |= {
            "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
            "v_head_dim": 12, "kv_lora_rank": 24, "q_lora_rank": 20 if special else None,
        }  # fmt: skip
    if kind in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite"):
        more |= {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        }  # fmt: skip
    if kind == "DeepseekV3" and special:
        more |= {"rope_parameters": YARN, "attention_bias": True}
    if special == "windowed":
        more |= {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    if kind == "Gemma3":
        kinds = ["sliding_attention", "full_attention"]
        positions = dict(
            zip(kinds, ({"rope_type": "default", "rope_theta": 10000.0}, LINEAR), strict=True)
        )
        more |= {"layer_types": kinds, "rope_parameters": positions, "query_pre_attn_scalar": 40}
    if kind == "Jamba":
        more |= {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 9,
            "expert_layer_offset": 8,
            "num_experts": 1,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        }
    if kind.startswith(("Qwen3", "Gemma")):
        more |= {"head_dim": 16}
    if kind == "Qwen3Moe":
        more |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    more |= {"num_local_experts": 4} if kind in ("Mixtral", "Phimoe") else {}
    more |= OTHERS.get(kind, {})
    if special == "normed":
        more |= {"use_qk_norm": True}
    if kind == "SmolLM3" and special:
        more |= {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}
    return load(folder(path, kind, **more))


@share(24)
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_is_held_like_tiny_llama(kind: str, tmp_path: Path) -> None:
    model = decoder(tmp_path, kind)
    names = MODES[:-1] if kind in LATENT else MODES
    scales = modes.measure(model, modes.CalibrationSettings())
    for name in names:
        mode = modes.find_mode(name, "other")
        calibration = scales if mode.calibrated else None
        quantized = modes.apply(mode, model, calibration)
        run = ServedCaches(quantized)
        with torch.no_grad(), run.watch():
            logits = quantized.model(torch.cat(list(model.inputs)))
            plain = model(torch.cat(list(model.inputs)))
        error = float((logits - plain).square().mean() / plain.square().mean())
        assert 1e-9 < error < 0.05, name
        rows = run.rows(model, ModelSites({}, lambda _site: ""))
        assert findings(rows) == {}, name
        layers = 1 if kind in {*HYBRIDS, "Jamba"} - {"FalconH1"} else 2
        layers = 3 if kind == "Zamba2" else layers
        assert len({row.site for row in rows if ":decode" in row.site}) == layers


def reference(model: Model, ids: Tensor) -> Tensor:
    """Return logits of transformers' own attention over keys and values that are rounded.

    Written out: an int8 scale for all heads of a token, as its cache would store them.
    """

    def rounded(x: Tensor) -> Tensor:
        # Keys of the padding token are zeros in some families.
        scales = x.abs().amax((1, 3), keepdim=True).clamp_min(1e-30) / 127
        return (x / scales).round() * scales

    def rounding(update: Any) -> Any:
        return lambda keys, values, *more: update(rounded(keys), rounded(values), *more)

    network: Any = model.module
    cache = transformers.DynamicCache(config=network.config)
    for layer in filter(lambda layer: hasattr(layer, "update"), cache.layers):
        layer.update = rounding(layer.update)
    # Bamba of transformers gives other numbers with a cache, by its rotary positions.
    parts = [ids] if type(network).__name__.startswith("Bamba") else ids.split(1, 1)
    with torch.no_grad():
        tokens = [network(part, past_key_values=cache) for part in parts]
    return torch.cat([token.logits for token in tokens], 1)


@share(8)
@pytest.mark.parametrize("kind", DECODERS)
def test_a_mode_decodes_as_transformers_with_a_rounded_cache(kind: str, tmp_path: Path) -> None:
    model = decoder(tmp_path, kind)
    network: Any = modes.apply(modes.find_mode("kv-int8", "other"), model).model.module
    ids = torch.cat([sample[:, :64] for sample in model.inputs])
    expected = reference(model, ids)
    with torch.no_grad():
        whole, plain = network(ids).logits, model.module(ids).logits
        cache, parts = None, []
        for part in ids.split([30, 1, 1, 32], 1):
            result = network(part, past_key_values=cache, use_cache=True)
            cache = copy.deepcopy(result.past_key_values)
            parts.append(result.logits)
    lost = float((expected - plain).norm() / plain.norm())
    for actual in (whole, torch.cat(parts, 1)):
        distances = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(distances.quantile(0.5)) < 0.01 * lost
        assert float(distances.max()) < lost


def test_adapters_of_another_layer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zamba2's layers share the weights of attention; each has adapters of its own."""
    model, mode = model_of("Zamba2", tokens=40), modes.find_mode("kv-int8", "other")
    ids = torch.cat(list(model.inputs))
    expected = reference(model, ids)

    def distance() -> float:
        with torch.no_grad():
            actual = modes.apply(mode, model).model.module(ids).logits
        return float((actual - expected).norm() / expected.norm())

    healthy = distance()
    monkeypatch.setattr(sources, "layer_of", lambda *_of: 1)
    assert healthy < 1e-4 < 0.01 < distance()


def test_padding_and_foreign_caches_are_refused(tmp_path: Path) -> None:
    model = decoder(tmp_path, "Qwen3")
    network: Any = modes.apply(modes.find_mode("kv-int8", "other"), model).model.module
    ids = model.inputs[0]
    mask = torch.ones_like(ids)
    with torch.no_grad():
        assert torch.equal(network(ids, attention_mask=mask).logits, network(ids).logits)
        mask[:, :9] = 0
        with pytest.raises(QgateError, match="texts without padding"):
            network(ids, attention_mask=mask)
        foreign = model.module(ids, use_cache=True).past_key_values
        with pytest.raises(QgateError, match="a cache of 80 tokens has 0 that this mode stored"):
            network(ids[:, :1], past_key_values=foreign)


def test_gradients_go_through_a_cache_mode(tmp_path: Path) -> None:
    model = decoder(tmp_path, "Qwen3")
    network = modes.apply(modes.find_mode("kv-int8", "other"), model).model.module
    weight = model.module.get_parameter("model.layers.0.self_attn.k_proj.weight")

    def gradient(of: Any) -> Tensor:
        return torch.autograd.grad(of(model.inputs[0]).logits.square().sum(), weight)[0].flatten()

    assert 0.9 < float(torch.cosine_similarity(gradient(network), gradient(model.module), 0)) < 1


@share(3)
@pytest.mark.parametrize(("name", "step"), [("kv-int8", -1), ("attn-int8", 1), ("attn-int8", -1)])
def test_a_window_that_is_off_by_one_is_named(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(tmp_path, "Mistral")
    visible = AttentionCore.visible

    def off(self: AttentionCore, *args: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(self, "window", self.window + step)
            return visible(self, *args)

    quantized = modes.apply(modes.find_mode(name, "other"), model)
    run = ServedCaches(quantized)
    monkeypatch.setattr(AttentionCore, "visible", off)
    red = findings(run.rows(model, ModelSites({}, lambda _site: "")))
    words = f"the sliding window is one token {'short' if step < 0 else 'long'}"
    assert any(words in text for text in red.values()), red
    with torch.no_grad(), pytest.raises(QgateError, match="masks of nothing but later tokens"):
        quantized.model(model.inputs[0])


@proof
def test_positions_that_are_not_scaled_and_another_factor_of_scores_are_red(tmp_path: Path) -> None:
    cases = (("Llama-llama3", "keys"), ("Glm", "keys"), ("Gemma3", "the factor of their width"))
    for kind, words in cases:
        model = decoder(tmp_path / kind, kind)
        quantized = modes.apply(modes.find_mode("kv-int8", "other"), model)
        for name, attention in attentions_of(quantized).items():
            source = source_of(model.module.get_submodule(name))
            assert source is not None
            if kind == "Gemma3":
                attention.core.attend.scaling = None
            else:
                attention.core.rope = replace(source.positions, speeds=(), in_pairs=False).turn
        red = findings(ServedCaches(quantized).rows(model, ModelSites({}, lambda _site: "")))
        assert any(words in text for text in (*red.values(), *red)), red


@pytest.mark.parametrize("leaf", ["q_norm", "k_norm"])
def test_a_norm_that_is_left_out_is_red(
    leaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(tmp_path, "Qwen3")
    named = AttentionSource.leaf
    monkeypatch.setattr(
        AttentionSource, "leaf",
        lambda self, side: f"{side}_proj" if side == leaf[0] else named(self, side),
    )  # fmt: skip
    network: Any = modes.apply(modes.find_mode("kv-int8", "other"), model).model.module
    ids = model.inputs[0][:, :40]
    with torch.no_grad():
        actual, expected = network(ids).logits, reference(model, ids)
    assert float((actual - expected).norm() / expected.norm()) > 0.05


def test_a_model_whose_caches_are_reached_in_part_is_refused(tmp_path: Path) -> None:
    model = decoder(tmp_path, "Llama")
    config = transformers.OlmoeConfig(**SIZES)
    kind = type(transformers.OlmoeForCausalLM(config).model.layers[0].self_attn)
    model.module.model.layers[1].self_attn = kind(config, 1)  # type: ignore[union-attr, operator, index]
    with pytest.raises(QgateError, match="but caches of OlmoeAttention: these modes are for"):
        modes.apply(modes.find_mode("kv-int8", "other"), model)


@always
def test_what_does_not_fit_is_left_out_with_a_word(tmp_path: Path) -> None:
    short = {"max_position_embeddings": 64}
    cases = (
        (
            folder(tmp_path / "a", "Llama", rope_parameters=DYNAMIC, **short), "kv-int8",
            "of type 'dynamic' turn otherwise in texts of more than 64 tokens, and here are 80",
        ),
        (folder(tmp_path / "b", "Olmoe"), "kv-int8", "can be quantized, but caches of OlmoeAtt"),
        (
            folder(tmp_path / "c", "Mistral", sliding_window=16), "kv-mxfp4",
            "the last 32 tokens stay as they are.* see 16 at most",
        ),
    )  # fmt: skip
    for path, name, words in cases:
        model, mode = load(path), modes.find_mode(name, "other")
        with pytest.raises(QgateError, match=words):
            modes.apply(mode, model)
        assert re.search(words, misfit_of(mode, model))
    mode = modes.find_mode("attn-int8", "other")
    assert "reads latents of all heads" in misfit_of(mode, model_of("KimiLinear"))
