"""Activations with several workers: the bits of one process, or an error that says what is missing.

The models stand at the top level of this file, because other processes import it.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate.activation_stats import networks, shards
from qgate.activation_stats.compute import activations
from qgate.activation_stats.settings import read_settings
from qgate.activation_stats.subjects import Sample, subject_of
from qgate.cli import main
from qgate.engine import PackedValue, Workers
from qgate.errors import QgateError
from tests.shares import proof, share

ALL: dict[str, Any] = {
    "enabled.magnitude_weight": True,
    "enabled.distribution": True,
    "enabled.percentile_range": True,
    "enabled.heatmap_3d": True,
    "heatmap_3d.sample_idx": 12,
    "magnitude.reduce_dim": None,
    "output.include_raw_data": True,
}
SENSITIVE: dict[str, Any] = {
    "sensitivity.enabled": True,
    "sensitivity.formats": ["mxfp4_e2m1", "int8"],
    "sensitivity.target_sqnr_db": 20.0,
}


class Small(nn.Module):
    """Reads tokens, and what comes after them."""

    def __init__(self, width: int = 32, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, width)
        self.up = nn.Linear(width, 48)
        self.gate = nn.Linear(width, 48)
        self.down = nn.Linear(48, width)
        self.head = nn.Linear(width, 64)
        self.to(dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.down(self.up(x) * self.gate(x).sigmoid())
        logits: Tensor = self.head(x)
        return logits


class Deadly(Small):
    """Ends its process at token 63, unless that is the one it was made in."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def forward(self, input_ids: Tensor) -> Tensor:
        if os.getpid() != self.home and bool((input_ids == 63).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(input_ids)


class Rare(Small):
    """Uses a layer for samples that begin with token 62 alone."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.up(x) if int(input_ids.view(-1)[0]) == 62 else self.gate(x)
        logits: Tensor = self.head(self.down(x))
        return logits


class TinyAttention(nn.Module):
    """Attention whose last dimension is as long as the sample is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.query = nn.Linear(16, 16)
        self.softmax = nn.Softmax(-1)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        weights = self.softmax(self.query(x) @ x.transpose(-1, -2))
        logits: Tensor = weights @ x
        return logits


def rows(count: int, tokens: int = 24, most: int = 63) -> list[Tensor]:
    g = torch.Generator().manual_seed(count)
    return [torch.randint(0, most, (tokens + k % 5,), generator=g) for k in range(count)]


def plain(record: Any) -> str:
    """All of it as it is written, but for the times."""
    return json.dumps({**record, "seconds": {}}, allow_nan=False)


def same(model: Any, data: Any, workers: Workers | int = 2, **more: Any) -> Any:
    one = activations(model, data, **more).record
    assert plain(activations(model, data, workers=workers, **more).record) == plain(one)
    return one


@proof
def test_two_processes_give_the_bits_of_one() -> None:
    record = same(Small(), rows(21), **ALL, **SENSITIVE)
    assert len(record["sensitivity"]) == 2 * 4
    assert len(record["proposals"]) == 2
    assert sum("heat_map" in layer for layer in record["layers"]) == 2


def test_sixteen_bits_and_one_sample_more_than_a_shard() -> None:
    same(Small(dtype=torch.bfloat16), rows(9), **{**ALL, "heatmap_3d.sample_idx": 8})


@share(6)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_how_samples_are_cut_changes_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes: the workers' own merging, at sizes that leave a rest and at one shard."""
    model, samples = Small(), rows(13)
    one = activations(model, samples, **ALL).record
    cut = shards._shards
    monkeypatch.setattr(shards, "_shards", lambda given, _: cut(given, size))
    assert plain(activations(model, samples, **ALL).record) == plain(one)


@proof
def test_padding_and_batches_are_the_same_everywhere() -> None:
    ids = torch.randint(0, 63, (11, 30), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for k in range(11):
        mask[k, 30 - k :] = 0
    record = same(Small(), [{"input_ids": ids, "attention_mask": mask}])
    assert record["data"]["tokens"] == int(mask.sum())
    assert record["layers"][0]["tokens"] == int(mask.sum())


@proof
def test_a_width_that_changes_with_the_sample_is_the_same_everywhere() -> None:
    patterns = {
        "magnitude.patterns": ["softmax", "query"],
        "percentile_range.patterns": ["softmax"],
    }
    same(TinyAttention(), rows(19), **{**ALL, **patterns, "smoothing.enabled": False})


@proof
def test_a_model_by_name_is_loaded_by_each_process(tmp_path: Path) -> None:
    few = {"data.num_samples": 9, "data.seq_len": 24, "smoothing.enabled": False}
    same("tiny-llama", None, **few)
    file = tmp_path / "made.py"
    build = (
        "import torch\nfrom torch import nn\nfrom qgate.models import Model\n\n\n"
        "def build():\n    SEED\n"
        "    made = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8))\n"
        "    return Model(made, [torch.arange(20)[None] + k for k in range(9)], 'made')\n"
    )
    file.write_text(build.replace("SEED", "torch.manual_seed(1)"))
    same(f"{file}:build", None, smoothing__enabled=False)
    file.write_text(build.replace("SEED", "torch.seed()"))
    with pytest.raises(QgateError, match="has other weights each time it is loaded: seed"):
        activations(f"{file}:build", workers=2, smoothing__enabled=False)


@proof
def test_a_shard_whose_worker_dies_fails_the_run_and_is_named() -> None:
    samples = rows(20)
    samples[17][3] = 63
    with pytest.raises(QgateError, match=r"samples 16 to 19 are missing: its process ended twice"):
        activations(Deadly(), samples, workers=2)
    switches: dict[str, Any] = {"visualization.enabled." + k: False for k in ("magnitude_input", "magnitude_output",
             "outlier_layer_wise", "outlier_position", "outlier_token")}  # fmt: skip
    with pytest.raises(QgateError, match=r"sensitivity of up in mxfp4_e2m1 is missing"):
        activations(
            Deadly(), samples, workers=2, sensitivity__enabled=True, smoothing__enabled=False,
            **switches,
        )  # fmt: skip


def test_a_model_that_cannot_be_sent_says_so() -> None:
    model = Small()
    model.head.register_forward_hook(lambda _m, _a, out: out)
    with pytest.raises(QgateError, match=r"Small cannot be sent .*Name a model.*leave --jobs"):
        activations(model, rows(3), workers=2)


def test_errors_of_a_sample_are_those_of_one_process() -> None:
    samples = rows(12)
    broken: list[Any] = [{"x": row} if k == 9 else row for k, row in enumerate(samples)]
    for workers in (1, 2):
        with pytest.raises(
            QgateError, match=r"Small cannot run sample 9 \(x int64 28\): TypeError: .*"
        ):
            activations(Small(), broken, workers=workers)


@proof
def test_a_module_that_a_shard_never_reaches_counts() -> None:
    samples = rows(17)
    for k, row in enumerate(samples):
        row[0] = 62 if k == 16 else 1
    record = same(Rare(), samples)
    assert [x["samples"] for x in record["layers"] if x["module"] == "up"] == [1, 1]
    assert any(note.startswith("not reached by all samples: up") for note in record["notes"])


def test_progress_is_of_shards() -> None:
    steps: list[tuple[str, int, int]] = []
    activations(Small(), rows(17), workers=2, smoothing__enabled=False,
                progress=lambda *step: steps.append(step))  # fmt: skip
    assert steps == [("samples", 8, 17), ("samples", 16, 17), ("samples", 17, 17)]


def test_the_weights_of_the_caller_are_not_touched() -> None:
    model = Small().train()
    before = {
        name: (value.data_ptr(), value.is_shared()) for name, value in model.named_parameters()
    }
    activations(model, rows(9), workers=2)
    assert before == {n: (v.data_ptr(), v.is_shared()) for n, v in model.named_parameters()}
    assert model.training


def test_samples_travel_as_plain_bits() -> None:
    arguments = (torch.arange(4), {"x": [torch.tensor(1.5), torch.ones(2, 0)]}, "word", None)
    back = PackedValue(Sample(arguments)).value().args
    assert torch.equal(back[0], arguments[0])
    assert float(back[1]["x"][0]) == 1.5
    assert back[1]["x"][1].shape == (2, 0)
    assert back[2:] == arguments[2:]
    half = PackedValue(Sample((torch.ones(3, dtype=torch.bfloat16),), {}, torch.arange(3))).value()
    assert half.args[0].dtype == torch.bfloat16
    assert half.ids is not None
    assert half.ids.tolist() == [0, 1, 2]


def test_a_process_has_one_network_at_a_time() -> None:
    first, second = (
        networks.packed_recipe(subject_of(Small()), (), read_settings().memory) for _ in range(2)
    )
    try:
        host = networks.network_of(first)
        assert networks.network_of(first) is host
        assert not host.root.training
        assert networks.network_of(second) is not host
        assert len(networks._loaded) == 1
    finally:
        networks._loaded.clear()


@proof
@pytest.mark.usefixtures("ray_cluster")
def test_the_command_line_writes_the_same_record_with_any_engine(tmp_path: Path) -> None:
    engines = {"one": (), "two": ("--jobs", "2"), "ray": ("--set", "engine=ray", "--jobs", "2")}
    records = []
    for name, options in engines.items():
        words = [
            "activations", "--model", "tiny-llama", "--data.num_samples", "9", "--data.seq_len",
            "24", "--output.formats", "json", "--magnitude.patterns", "down_proj", "--save_dir",
            str(tmp_path / name), "--sensitivity.enabled", "true", *options,
        ]  # fmt: skip
        assert main(words) == 0
        record = json.loads((tmp_path / name / "activations.json").read_text())
        record["settings"].pop("visualization.save_dir")
        records.append(plain(record))
    assert records[0] == records[1] == records[2]
