"""`qgate.activations` on real models: one pass per sample, checked beforehand, nothing left behind."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.activation_stats import networks
from qgate.activation_stats.compute import ActivationsResult, activations
from qgate.activation_stats.record import LayerActivations
from qgate.activation_stats.sensitivity import (
    ModelRuns,
    QuantizableLayers,
    SensitivityTarget,
    propose,
    quantize_alone,
)
from qgate.activation_stats.subjects import Sample
from qgate.errors import QgateError
from tests.activation_stats.tiny_transformers import bert, llama, save
from tests.shares import proof, share

transformers = pytest.importorskip("transformers")
TEXT = "the quick brown fox jumps over the lazy dog while seven old sailors drink cold beer . "
FEW: dict[str, Any] = {"data__num_samples": 3, "data__seq_len": 48, "smoothing__enabled": False}
ALL = {
    "enabled.magnitude_weight": True,
    "enabled.distribution": True,
    "enabled.percentile_range": True,
    "enabled.heatmap_3d": True,
}


def rows(count: int = 3, tokens: int = 40, most: int = 64) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(5, most, (tokens + k,), generator=g) for k in range(count)]


def folder_of(model: nn.Module, path: Path) -> Path:
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return save(model, TEXT.split(), path, **special, pad_token="[PAD]")


def layer(result: ActivationsResult, module: str, role: str) -> LayerActivations:
    return next(x for x in result.record["layers"] if (x["module"], x["role"]) == (module, role))


def tensors_of(model: nn.Module, name: str, samples: list[Tensor]) -> dict[str, list[np.ndarray]]:
    """All inputs and outputs of a module, by plain hooks."""
    tensors: dict[str, list[np.ndarray]] = {"input": [], "output": []}

    def hook(_m: nn.Module, args: Any, result: Any) -> None:
        result = result[0] if isinstance(result, tuple) else result
        for role, t in (("input", args[0]), ("output", result)):
            tensors[role].append(t.detach().reshape(-1, t.shape[-1]).double().numpy())

    handle = model.get_submodule(name).register_forward_hook(hook)
    with torch.no_grad():
        for ids in samples:
            model(ids.reshape(1, -1))
    handle.remove()
    return tensors


def check(result: ActivationsResult, model: nn.Module, name: str, samples: list[Tensor]) -> None:
    """Figures of one linear layer against everything it saw."""
    for role, xs in tensors_of(model, name, samples).items():
        got = layer(result, name, role)
        every = np.concatenate(xs)
        assert got["tokens"] == len(every)
        assert got["portrait"]["max"] == pytest.approx(every.max(), rel=1e-4)
        assert got["portrait"]["rms"] == pytest.approx(math.sqrt((every**2).mean()), rel=1e-4)
        t = [np.sort(np.abs(x).max(1)) for x in xs]
        figures = got["magnitude"]["token"]
        assert figures["top"] == pytest.approx(np.mean([v[::-1][:3] for v in t], 0), rel=1e-4)
        assert figures["median"] == pytest.approx(
            np.mean([v[(len(v) - 1) // 2] for v in t]), rel=1e-4
        )
        counts = [int((v > 64 * v[(len(v) - 1) // 2]).sum()) for v in t]
        assert got["outliers"]["counts"] == counts


def test_tiny_llama_equals_what_plain_hooks_keep() -> None:
    result = activations("tiny-llama", **FEW)
    from qgate.models.samples import ByteTokenizer, DataRequest, read_samples

    samples = read_samples(DataRequest(num_samples=3, seq_len=48), ByteTokenizer()).ids
    model = qgate.models.load("tiny-llama", sampling=qgate.models.Sampling(samples=1)).module
    check(result, model, "model.layers.1.mlp.down_proj", list(samples))
    assert result.record["data"]["samples"] == 3
    assert not result.failed
    json.dumps(result.record, allow_nan=False)


@share(4)
@pytest.mark.parametrize("make", [llama, bert])
def test_hugging_face_folders_with_a_tokenizer(make: Any, tmp_path: Path) -> None:
    model = make()
    folder = folder_of(model, tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 40)
    overrides = {**ALL, "data.custom.format": "document"}
    result = activations(f"hf:{folder}", f"custom:{text}", **FEW, **overrides)
    assert {x["kind"] for x in result.record["layers"]} >= {"linear", "block"}
    names = [x["module"] for x in result.record["layers"] if x["kind"] == "linear"]
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT * 3)["input_ids"]
    own = activations(model, [ids], **FEW)
    check(own, model, names[0], [torch.tensor(ids)])
    assert result.record["data"]["samples"] == 3


def test_planted_outliers_are_named_with_their_text(tmp_path: Path) -> None:
    model = llama()
    folder = folder_of(model, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    position = TEXT.split().index("sailors")

    def plant(_m: nn.Module, _a: Any, out: Any) -> Any:
        hidden = out[0] if isinstance(out, tuple) else out
        hidden[0, position, 9] = 5e4
        return out

    model.get_submodule("model.layers.1").register_forward_hook(plant)
    result = activations(model, [ids], tokenizer=tokenizer, **FEW)
    outliers = layer(result, "model.layers.1", "output")["outliers"]
    [token] = outliers["tokens"]
    assert (token["position"], token["channel"], token["text"]) == (position, 9, "sailors")
    assert outliers["texts"] == {"sailors": 1}
    other = activations(model, [ids], tokenizer=tokenizer, outlier__decode_tokens=False, **FEW)
    assert "text" not in layer(other, "model.layers.1", "output")["outliers"]["tokens"][0]
    off = activations(model, [ids], outlier__threshold=1e6, **FEW)
    assert layer(off, "model.layers.1", "output")["outliers"]["counts"] == [0]


def test_there_is_one_pass_per_sample_for_everything() -> None:
    model, passes = llama(), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    activations(model, rows(4), **ALL, **{**FEW, "data__num_samples": 4})
    assert len(passes) == 4


@proof
def test_a_padded_batch_is_the_same_as_rows_without_padding() -> None:
    model, samples = llama(), rows()
    width = max(map(len, samples))
    ids = torch.full((3, width), 3)
    mask = torch.zeros(3, width, dtype=torch.long)
    for k, row in enumerate(samples):
        ids[k, : len(row)], mask[k, : len(row)] = row, 1
    padded = activations(model, [{"input_ids": ids, "attention_mask": mask}], **FEW, **ALL)
    plain = activations(model, samples, **FEW, **ALL)
    assert padded.record["layers"] == plain.record["layers"]


def test_nothing_is_left_behind() -> None:
    model = llama(use_cache=True)
    model.train()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    activations(model, rows(), sensitivity__enabled=True, **{**FEW, "smoothing__enabled": True})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    assert model.training
    assert model.config.use_cache  # type: ignore[union-attr]
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_values_that_are_not_finite_fail() -> None:
    model = llama()
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.down_proj").weight[3, 4] = math.nan  # type: ignore[index, operator]
    result = activations(model, rows(), **FEW)
    assert result.failed
    assert result.notes[0].startswith("values that are not finite: model.layers.1.mlp.down_proj")
    json.dumps(result.record, allow_nan=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"magnitude.patterns": ["h.0.fc"]}, r"magnitude.patterns 'h.0.fc' matches no module.*lm_head|first names are model, "),
        ({"outlier.pattern": "nope"}, "outlier.pattern 'nope' matches no module"),
        ({"layer_selection.patterns": ["nope"]}, "layer_selection.patterns 'nope' matches no"),
        ({"layer_selection.patterns": ["embed"]}, "leave no layer"),
        ({"magnitude.patterns": ["layers$"]}, "lists of modules"),
        ({"memory.device": "cuda:7"}, "device 'cuda:7' was asked for"),
        ({"outlier.treshold": 3}, "outlier.threshold"),
        ({"outlier.threshold": "many"}, "not allowed"),
    ],
)  # fmt: skip
def test_settings_that_fit_nothing_are_refused_before_any_pass(
    settings: dict[str, Any], said: str
) -> None:
    model, passes = llama(), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(QgateError, match=said):
        activations(model, rows(), **FEW, **settings)
    assert passes == []


def test_data_that_does_not_fit_is_refused_before_any_pass() -> None:
    model, passes = bert(), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    for data, words in (
        ([], "no samples"),
        ([torch.randint(0, 64, (100,))], "64 positions"),
        ([torch.tensor([70])], "0 to 63"),
        ([torch.empty(0, dtype=torch.long)], "without a single token"),
        (["text"], "a sample is"),
        (None, "without a tokenizer"),
        ([{"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.zeros(1, 3)}], "padding"),
    ):
        with pytest.raises(QgateError, match=words):
            activations(model, data, **FEW)
    assert passes == []
    with pytest.raises(QgateError, match="cannot run sample 0"):
        activations(llama(), [torch.randn(1, 3)], **FEW)


class Experts(nn.Module):
    """A router, experts that few samples reach, one that none does, and a block called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.again = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.experts[0](x) if x.mean() > 0 else self.experts[1](hidden := x) + hidden
        return self.again(self.again(x))


def test_any_module_with_experts_and_repeated_calls() -> None:
    data = [torch.ones(1, 4, 8), -torch.ones(1, 4, 8)]
    result = activations(Experts(), data, **FEW)
    assert layer(result, "experts.0", "input")["coverage"] == 0.5
    assert layer(result, "experts.1", "input")["magnitude"]["token"]["top"][0] == 1
    assert layer(result, "experts.2", "input")["coverage"] == 0
    repeated = layer(result, "again", "input")
    assert (repeated["calls"], repeated["samples"], repeated["tokens"]) == (4, 2, 16)
    assert any("experts.2 (input)" in note for note in result.notes)
    assert any("experts.0 (input) in 1 of 2" in note for note in result.notes)
    with pytest.raises(QgateError, match=r"nothing was seen of experts\.2"):
        activations(
            Experts(), data, magnitude__patterns=["experts.2"], outlier__pattern="s.2", **FEW
        )


def test_outputs_of_the_root_and_of_tuples_are_unpacked() -> None:
    model = llama()
    result = activations(model, rows(), magnitude__patterns=["^$", "^model$", "self_attn$"], **FEW)
    assert layer(result, "", "output")["width"] == 64
    assert layer(result, "model", "output")["width"] == 32
    assert layer(result, "model.layers.0.self_attn", "input")["width"] == 32
    assert result.record["panels"]["magnitude_input"]["^model$"] == ["model"]


def test_panels_of_one_pattern_keep_their_widths() -> None:
    result = activations(llama(), rows(), magnitude__patterns=["(up|down)_proj"], **FEW, **ALL)
    modules = result.record["panels"]["percentile_range"]["(up|down)_proj"]
    widths = {n: len(layer(result, n, "input")["ranges"]["percentiles"]["50"]) for n in modules}
    assert set(widths.values()) == {32, 64}
    maps = result.record["panels"]["heat_map"]["(up|down)_proj"]
    assert all("heat_map" in layer(result, n, "output") for n in maps)


def test_tables_have_a_row_for_each_layer_and_statistic() -> None:
    result = activations(llama(), rows(), **{**FEW, "smoothing__enabled": True}, **ALL)
    tables = result.tables()
    count = len(result.record["layers"])
    assert len(tables["layers"]) == count
    assert len(tables["formats"]) == 5 * count
    assert len(tables["smoothing"]) == 3 * 14
    assert {row["role"] for row in tables["magnitude"]} == {"input", "output", "weight"}
    for table in tables.values():
        assert all(
            isinstance(v, str | int | float | bool | None) for r in table for v in r.values()
        )


@proof
def test_offloading_gives_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    plain = activations(model, rows(), **FEW)
    monkeypatch.setattr(networks, "fits", lambda *_: False)
    offloaded = activations(model, rows(), **FEW)
    assert offloaded.record["layers"] == plain.record["layers"]
    assert any("one by one" in note for note in offloaded.notes)
    off = activations(model, rows(), memory__auto_offload=False, **FEW)
    assert off.notes == plain.notes


def test_progress_tells_every_sample() -> None:
    steps: list[tuple[str, int, int]] = []
    activations(llama(), rows(), progress=lambda *step: steps.append(step), **FEW)
    assert steps == [("samples", k, 3) for k in range(4)]


# Sensitivity -------------------------------------------------------------------------------------


def runs_of(model: nn.Module, fmt: str = "mxfp4_e2m1") -> tuple[ModelRuns, QuantizableLayers]:
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    samples = [Sample((r[None],), ids=r) for r in rows(2)]
    return ModelRuns(model, samples, torch.device("cpu"), "m"), QuantizableLayers(model, names, fmt)


def test_a_layer_alone_is_what_quantizing_it_by_hand_gives() -> None:
    model = llama()
    runs, layers = runs_of(model)
    name = "model.layers.0.mlp.down_proj"
    sensitive = quantize_alone(runs, layers, name)
    twin = llama()
    target: Any = twin.get_submodule(name)
    target.weight.data = qgate.quantize(target.weight.data, "mxfp4_e2m1")
    local: list[Tensor] = []
    target.register_forward_pre_hook(lambda _m, a: (qgate.quantize(a[0], "mxfp4_e2m1"),))
    target.register_forward_hook(lambda _m, _a, out: local.append(out))
    signal = noise = own_signal = own_noise = 0.0
    for k, row in enumerate(rows(2)):
        with torch.no_grad():
            actual, right = twin(row[None]).logits.double(), model(row[None]).logits.double()
        truth = torch.from_numpy(tensors_of(model, name, [row])["output"][0])
        own_signal += float(truth.square().sum())
        own_noise += float((local[k][0].double() - truth).square().sum())
        signal += float(right.square().sum())
        noise += float((actual - right).square().sum())
    assert sensitive["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    assert sensitive["local_sqnr_db"] == pytest.approx(
        10 * math.log10(own_signal / own_noise), abs=1e-3
    )
    assert "loss_change" in sensitive


def test_a_proposal_is_measured_and_no_layer_of_it_is_spare() -> None:
    model = llama()
    runs, layers = runs_of(model)
    losses = {n: quantize_alone(runs, layers, n)["sqnr_db"] for n in layers.names}
    order = sorted(losses, key=lambda name: losses[name])
    none = runs.errors(layers, layers.names).sqnr_db
    target = SensitivityTarget(sqnr_db=none + 3)
    proposal = propose(runs, layers, order, target)
    assert proposal["reached"]
    assert proposal["all_quantized"] == none
    quantized = [n for n in layers.names if n not in proposal["keep"]]
    assert runs.errors(layers, quantized).sqnr_db == proposal["value"] >= none + 3
    for name in proposal["keep"]:
        assert runs.errors(layers, [*quantized, name]).sqnr_db < none + 3
    assert proposal["curve"][0] == (0, none)
    assert propose(runs, layers, order, SensitivityTarget(sqnr_db=-5.0))["keep"] == []
    loss = propose(runs, layers, order, SensitivityTarget(loss=0.01))
    assert not loss["reached"]


def test_weights_are_the_same_tensors_after_an_error() -> None:
    model = llama()
    _, layers = runs_of(model)
    before = {n: (p.data_ptr(), p.clone()) for n, p in model.named_parameters()}
    name = "model.layers.1.mlp.down_proj"
    model.get_submodule(name).register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), layers.quantized(layers.names):
        model(rows(1)[0][None])
    for n, p in model.named_parameters():
        assert p.data_ptr() == before[n][0]
        assert torch.equal(p, before[n][1])


def test_sensitivity_is_part_of_the_record() -> None:
    settings = {"sensitivity.enabled": True, "sensitivity.target_sqnr_db": 20.0}
    result = activations(llama(), rows(), **FEW, **settings)
    ranking = result.record["sensitivity"]
    assert [x["sqnr_db"] for x in ranking] == sorted(x["sqnr_db"] for x in ranking)
    assert len(ranking) == 14
    assert result.record["proposals"][0]["target"].startswith("SQNR of the output ≥ 20")
