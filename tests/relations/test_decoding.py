"""Decoding along a text that no sample reaches: planted faults are red by name, right code green."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import qgate
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.models.long_texts import long_text
from qgate.models.tiny import TINY
from qgate.modes import apply, modes_of
from qgate.modes.setups import ModelSetup
from qgate.relations.caches import TextCalls
from qgate.relations.compute import ModelRelations
from qgate.relations.decoding import check_briefly
from qgate.relations.gate import RelationGates
from qgate.relations.generating import generated_calls
from qgate.testing import RelationReport
from tests.relations.decoders import small_model
from tests.shares import always, share, slow_file

pytestmark = slow_file


def brief(model: qgate.Model, mode: str = "int8") -> RelationReport:
    """Compare what every run compares."""
    quantized = apply(modes_of(model, mode)[0], model)
    return check_briefly(ModelRelations(quantized, model), long_text(model))


FAULTS = (
    ("residual dropped in decoding", "layers.0.mlp_norm:input", "1 off (float noise 7e-06) token by token"),
    ("mask early in decoding", "layers.0.attention.o_proj:input", "behind a prefill of 1, at row 0, t"),
    ("window lost with a cache", "layers.0.attention.o_proj:input", "prefill of 63, at row 0, tokens 63 to 65"),
    ("positions wrap with a cache", "places:output", "behind a prefill of 255, at row 0, tokens 256 to 257"),
    ("padding attended in decoding", "layers.0.attention.o_proj:input", "a row behind 7 tokens of padding"),
    ("positions off by the padding", "places:output", "a row behind 7 tokens of padding"),
    ("positions anew per chunk", "places:output", "behind a prefill of 1, at row 0, tokens 1 to 16"),
    ("cache shared by rows", "layers.0.attention.o_proj:input", "in a batch"),
    ("leak across rows", "layers.0:input", "beside 16 rows of other text"),
    ("window of a batch early", "layers.0.attention.o_proj:input", "token by token in a batch of 9"),
    ("window early beyond 128 in a batch", "layers.0.attention.o_proj:input", "in a prefill of 133"),
    ("window early from step 12 on", "layers.0.attention.o_proj:input", "behind a prefill of 1"),
)  # fmt: skip


@share(8)
@pytest.mark.parametrize(("fault", "site", "words"), FAULTS)
def test_a_fault_of_decoding_is_named(fault: str, site: str, words: str) -> None:
    report = brief(small_model(fault))
    assert report.disagreements, report
    first = str(report.first_of(report.broken[0]))
    assert first.startswith(("decoded: " if "leak" not in fault else "others: ") + site), first
    assert words in first, first


@share(12)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", ["int8", "bf16", "mxfp4"])
def test_right_code_decodes_as_it_reads(seed: int, mode: str) -> None:
    report = brief(small_model(seed=seed), mode)
    assert not report.disagreements, report
    assert {"decoded", "others"} <= {*report.agreed}
    assert max(report.errors[site] / report.limits[site] for site in report.errors) < 0.25


def tiny(name: str) -> qgate.Model:
    texts = [
        torch.randint(256, (1, 48), generator=torch.Generator().manual_seed(k)) for k in (1, 2)
    ]
    return qgate.Model(TINY.get(name).load(), texts, name, calibration=texts)


@share(3)
@pytest.mark.parametrize("mode", ["int8", "kv-int8", "kv-int4", "fp16"])
def test_a_residual_that_is_dropped_with_a_cache_is_named(mode: str) -> None:
    model = tiny("tiny_llama")
    block = model.module.model.layers[2]

    class Careless(type(block)):  # type: ignore[misc]
        def forward(self, hidden: Any, cache: Any = None) -> Any:
            output = super().forward(hidden, cache)
            return output if cache is None else output - hidden

    block.__class__ = Careless
    report = brief(model, mode)
    first = str(report.first_of(report.broken[0]))
    assert first.startswith("decoded: model.layers.2:output is "), first
    assert ("without a cache" if mode.startswith("kv") else "behind a prefill of 1") in first


def test_a_model_of_which_nothing_can_be_asked_says_so(tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.inner(x.sum(0))

    network = Sum()
    bench = Bench(
        ModelSetup("sum"),
        _model=qgate.Model(network, [torch.randn(3, 8)], "sum", layers=("inner",)),
    )
    gates = RelationGates(bench, tmp_path, Policy())
    outcome = gates.mode("relations", bench.mode("w8"))
    (row,) = outcome.record["rows"]
    assert "left out: sum " in str(row)


def test_a_scale_of_a_whole_call_is_a_note_of_a_mode_that_declares_nothing() -> None:
    def build(of: qgate.Model) -> torch.nn.Module:
        module = apply(modes_of(of, "fp32")[0], of).model.module
        up = module.layers[1].up  # type: ignore[union-attr, index]
        plain = up.forward
        up.forward = lambda x: plain(qgate.quantize(x, "int8", granularity="tensor"))
        return module

    report = brief(dataclasses.replace(small_model(), modes={"own": build}), "own")
    assert not report.disagreements, report
    assert "a louder row changes" in str(report.left_out)


class Anew(torch.nn.Module):
    """A decoder that begins each piece of several tokens with an empty cache."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def new_cache(self) -> Any:
        return self.inner.new_cache()

    def forward(self, ids: Any, cache: Any = None) -> Any:
        if cache is not None and cache.length and ids.shape[1] > 1:
            return self.inner(ids)
        return self.inner(ids, cache=cache)


@always
def test_a_piece_behind_a_cache_is_held_beside_the_reference() -> None:
    model = small_model()
    quantized = apply(modes_of(model, "int8")[0], model)
    quantized.model.module.get_submodule("layers.0.attention").fault = "mask of a piece early"  # type: ignore[assignment]
    report = check_briefly(ModelRelations(quantized, model), long_text(model))
    first = str(report.first_of("chunked"))
    assert first.startswith("chunked: layers.0.attention.o_proj:input"), first
    assert "a piece of 33 tokens behind a prefill of 17" in first


def test_a_piece_that_the_reference_begins_anew_is_left_out() -> None:
    right = small_model()
    model = qgate.Model(Anew(right.module), right.inputs, "anew", calibration=right.inputs)
    report = brief(model)
    assert not report.disagreements, report
    assert "begins a piece of a text anew" in report.left_out["chunked"]


def test_calls_of_generate_have_its_own_positions_and_no_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, use_cache=False,
    )  # fmt: skip
    network = transformers.Qwen2ForCausalLM(config).eval()
    model = qgate.Model(network, [torch.arange(12)[None]], "qwen")
    ids, mask = torch.randint(1, 40, (2, 5)), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    following = torch.tensor([[7, 8, 9], [4, 5, 6]])
    calls = generated_calls(TextCalls.of(model), ids, mask, following)
    assert [call["input_ids"].tolist() for call in calls] == [ids.tolist(), [[7], [4]], [[8], [5]]]
    assert calls[1]["position_ids"].tolist() == [[5], [3]]
    assert calls[2]["attention_mask"].sum(1).tolist() == [7, 5]
    assert not any("past_key_values" in call for call in calls)
    assert brief(model).agreed["decoded"] >= 7
