"""What `qgate.activations` refuses before the first pass, and what it does not pretend to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.activation_stats.findings import findings
from qgate.activation_stats.settings import ActivationSettings, read_settings
from qgate.activation_stats.subjects import SampleSet, sample_set_of, subject_of
from qgate.errors import QgateError
from tests.activation_stats.tiny_transformers import bert, llama

QUICK: dict[str, Any] = {"smoothing__enabled": False, "data__num_samples": 2}


class Counting(nn.Module):
    """Knows how often it ran; `skipped` is used, and its forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.skipped = nn.Linear(8, 8), nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        output: Tensor = self.used(x) + nn.functional.linear(x, self.skipped.weight)
        return output


def masked() -> Any:
    return bert("BertForMaskedLM", vocab_size=300)


def test_a_sample_to_draw_that_is_not_there_is_refused() -> None:
    model = Counting()
    overrides: dict[str, Any] = {"enabled__heatmap_3d": True, "heatmap_3d__sample_idx": 5}
    with pytest.raises(QgateError, match=r"sample_idx 5 .* 3 samples.* 0 to 2"):
        qgate.activations(model, [torch.randn(4, 8)] * 3, **overrides)
    assert not model.runs
    overrides["heatmap_3d__sample_idx"] = 2
    result = qgate.activations(model, [torch.randn(4, 8)] * 3, **overrides)
    assert any("heat_map" in layer for layer in result.record["layers"])


@pytest.mark.parametrize("pattern", ["skipped", "used|skipped"])
def test_a_module_that_never_ran_fails_and_all_else_is_kept(pattern: str) -> None:
    result = qgate.activations(Counting(), [torch.randn(4, 8)], magnitude__patterns=[pattern])
    assert result.failed
    assert any("skipped" in note and "never ran" in note for note in result.notes)
    first = findings(result.record)[0]
    assert (first.level, "skipped" in first.text) == ("fail", True)
    reached = [layer["module"] for layer in result.record["layers"] if layer["calls"]]
    assert "used" in reached


def test_a_module_that_is_given_ids_is_no_module_that_never_ran() -> None:
    model = masked()
    patterns = ["word_embeddings", r"attention\.self\.query"]
    result = qgate.activations(model, [[1, 2, 3, 4]], magnitude__patterns=patterns, **QUICK)
    assert not result.failed
    assert any("no floating point numbers" in note for note in result.notes)
    roles = {
        entry["role"] for entry in result.record["layers"] if "word_embeddings" in entry["module"]
    }
    assert roles == {"output"}
    assert not [entry for entry in findings(result.record) if "no sample reached" in entry.text]


def test_a_model_that_sees_later_tokens_has_no_loss_of_the_next_one() -> None:
    rows = [torch.arange(20) + k for k in range(2)]
    overrides: dict[str, Any] = {"sensitivity__enabled": True, **QUICK}
    result = qgate.activations(masked(), rows, **overrides)
    assert result.record["sensitivity"]
    assert not [entry for entry in result.record["sensitivity"] if "loss_change" in entry]
    ran: list[int] = []
    model = masked()
    model.bert.encoder.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(QgateError, match="target_loss needs a model that predicts next tokens"):
        qgate.activations(model, rows, sensitivity__target_loss=2.0, **overrides)
    assert len(ran) <= 2, "told before any layer was quantized"


@pytest.mark.parametrize("form", ["rows", "mapping"])
def test_a_model_that_predicts_the_next_token_has_its_loss(form: str) -> None:
    model = llama(num_hidden_layers=1)
    ids = torch.arange(20).reshape(1, -1)
    data: Any = [ids] if form == "rows" else [{"input_ids": ids}]
    result = qgate.activations(model, data, sensitivity__enabled=True, **QUICK)
    assert all("loss_change" in entry for entry in result.record["sensitivity"])


@pytest.mark.parametrize("wrong", [3, 2.5, object()])
def test_data_that_is_no_list_is_refused(wrong: Any) -> None:
    with pytest.raises(QgateError, match="a list of samples"):
        qgate.activations(Counting(), wrong)


def passes(model: Any, text: Path, **overrides: str) -> tuple[SampleSet, ActivationSettings]:
    from qgate.models.samples import ByteTokenizer

    pairs = [(name.replace("__", "."), value) for name, value in overrides.items()]
    settings = read_settings(None, [("data.source", f"custom:{text}"), *pairs])
    return sample_set_of(subject_of(model, ByteTokenizer()), None, settings), settings


def test_samples_are_no_longer_than_a_model_has_positions_unless_that_is_asked(
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("seven old sailors drink cold beer and watch the sea from afar. " * 30)
    overrides = {"data__custom__format": "document", "data__num_samples": "2"}
    sample_set, _ = passes(masked(), text, **overrides)
    assert [len(s.ids) for s in sample_set.calls if s.ids is not None] == [64, 64]
    assert any("64 tokens" in note and "positions" in note for note in sample_set.notes)
    with pytest.raises(QgateError, match=r"data\.seq_len 64 at most"):
        passes(masked(), text, data__seq_len="100", **overrides)


def test_a_proposal_says_what_its_numbers_are() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    result = qgate.activations(
        model, [torch.randn(16, 32)], sensitivity__enabled=True, sensitivity__target_sqnr_db=5
    )
    texts = [finding.text for finding in findings(result.record) if "≥ 5 dB" in finding.text]
    assert len(texts) == 1
    assert " dB)" in texts[0]


def test_a_configuration_cannot_let_code_run_and_says_what_can(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("model:\n  trust_remote_code: true\n")
    with pytest.raises(
        QgateError, match="--trust-remote-code is an option of the command line alone"
    ):
        read_settings(path)


def test_tokens_that_are_fewer_than_asked_for_are_refused(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "ids.npy"
    np.save(path, np.arange(40))
    model = masked()
    for overrides in ({}, {"data__seq_len": "40"}, {"data__seq_len": "16"}):
        settings = [(k.replace("__", "."), v) for k, v in overrides.items()]
        read = read_settings(None, [("data.source", f"tokens:{path}"), *settings])
        assert sample_set_of(subject_of(model), None, read).calls
    read = read_settings(None, [("data.source", f"tokens:{path}"), ("data.seq_len", "50")])
    with pytest.raises(QgateError, match=r"40 tokens, fewer than the 50"):
        sample_set_of(subject_of(model), None, read)


def test_a_missing_tokenizer_is_reported_with_options_of_this_command(tmp_path: Path) -> None:
    masked().save_pretrained(tmp_path / "model")
    with pytest.raises(QgateError, match=r"--data\.source tokens:FILE\.npy"):
        qgate.activations(f"hf:{tmp_path / 'model'}")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(QgateError, match="--trust-remote-code"):
        qgate.activations(f"hf:{tmp_path / 'model'}")
