"""Modes of the cache on decoders of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qgate import QgateError, models, modes
from qgate.gate.measuring.cache_rows import cache_rows
from qgate.gate.measuring.cache_traces import RunTraces
from qgate.gate.measuring.site_rows import ModelSites
from qgate.models import Model
from tests.gate.test_cache_faults import findings
from tests.shares import share

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODES = ("kv-fp8", "kv-fp8-prerope", "kv-int8", "kv-mxfp4", "attn-fp8-head")


def folder(path: Path, kind: str, **more: Any) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
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


@share(6)
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2"])
def test_a_decoder_is_held_like_tiny_llama(kind: str, tmp_path: Path) -> None:
    more = {"sliding_window": None} if kind == "Mistral" else {}
    model = load(folder(tmp_path, kind, **more))
    scales = modes.measure(model, modes.CalibrationSettings())
    for name in MODES:
        mode = modes.find_mode(name, "other")
        given = scales if mode.calibrated else None
        quantized = modes.apply(mode, model, given)
        run = RunTraces(quantized)
        with torch.no_grad(), run.watch():
            logits = quantized.model(torch.cat(list(model.inputs)))
            plain = model(torch.cat(list(model.inputs)))
        error = float((logits - plain).square().mean() / plain.square().mean())
        assert 1e-9 < error < 0.05, name
        rows = cache_rows(quantized, model, run, ModelSites({}, lambda _site: ""))
        assert findings(rows) == {}, name
        assert len({row.site for row in rows if ":decode" in row.site}) == 2


def test_what_is_not_plain_attention_is_refused(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    windowed = folder(tmp_path / "a", "Mistral", sliding_window=16)
    turned = folder(tmp_path / "b", "Llama", rope_parameters=scaled)
    other = folder(tmp_path / "c", "Qwen3", head_dim=16)
    for path, words in (
        (windowed, "has a sliding window"),
        (turned, "has rotary positions of type 'linear'"),
        (other, "has no attention whose cache can be quantized"),
    ):
        with pytest.raises(QgateError, match=words):
            modes.apply(modes.find_mode("kv-int8", "other"), load(path))
