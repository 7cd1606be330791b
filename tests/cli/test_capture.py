"""`qgate layers capture`: what is in the folder afterwards, and what never is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qgate.capture import run as run_model
from qgate.cli import main
from qgate.dumps import shards
from tests.shares import proof

SMALL = ["--samples", "1", "--seqlen", "64", "--set", "calib_samples=1", "--set", "calib_seqlen=64"]
Capsys = pytest.CaptureFixture[str]
OWN = """
import copy
import torch
from torch import nn
import qgate

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
    def forward(self, x):
        return x + self.mix(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
    def forward(self, ids, attention_mask=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

class Poisoned(Block):
    def forward(self, x):
        y = super().forward(x).clone()
        y[..., 3] = float("nan")
        y[:, 0, 0] = float("inf")
        return y

class Codes(Block):
    def forward(self, x):
        return super().forward(x).round().to(torch.int8)

class Short(Block):
    def forward(self, x):
        return super().forward(x)[:, 1:]

class RoundingLinear(nn.Linear):
    def forward(self, x):
        return super().forward((x * 16).round() / 16)

def last(cls):
    def mode(model):
        made = copy.deepcopy(model.module)
        block = cls()
        block.load_state_dict(made.layers[2].state_dict())
        made.layers[2] = block
        return made
    return mode

def fewer(model):
    made = copy.deepcopy(model.module)
    made.layers = made.layers[:2]
    return made

def net():
    torch.manual_seed(5)
    return Net()

def model(module, inputs):
    modes = {"poisoned": last(Poisoned), "codes": last(Codes), "short": last(Short)}
    return qgate.Model(module, inputs, name="own", modes={**modes, "fewer": fewer})

def build(samples, seqlen):
    return model(net(), [torch.arange(seqlen - 3 * i)[None] % 32 for i in range(samples)])

class Named(Net):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids)

def padded(samples, seqlen):
    torch.manual_seed(5)
    ids = torch.arange(seqlen)[None] % 32
    mask = (torch.arange(seqlen) < seqlen - 5).long()[None]
    return model(Named(), [{"input_ids": ids, "attention_mask": mask}] * samples)

def not_fp32(samples, seqlen):
    made = build(samples, seqlen)
    for block in made.module.layers:
        turned = RoundingLinear(8, 8)
        turned.load_state_dict(block.mix.state_dict())
        block.mix = turned
    return made

def half(samples, seqlen):
    made = build(samples, seqlen)
    made.module.half()
    return made
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_of_capture_test.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_of_capture_test", raising=False)
    return tmp_path


def own(build: str = "build") -> list[str]:
    return ["--model", f"own_of_capture_test:{build}", "--seqlen", "16", "--samples", "3"]


def capture(*argv: str) -> int:
    return main(["layers", "capture", "--output-dir", "out", *argv])


def complaint(capsys: Capsys, *argv: str) -> str:
    assert capture(*argv) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("qgate layers capture: ")
    return last


def names(folder: str = "out") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def stats(stem: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = Path(f"out/mode_{stem}_stats.json").read_text(encoding="utf-8")
    record: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return record


def loaded(stem: str, layer: int) -> np.ndarray:
    values: np.ndarray = np.load(f"out/mode_{stem}_layer_{layer}.npy", allow_pickle=False)
    return values


def test_a_mode_and_its_reference_are_written_as_users_know_them(capsys: Capsys) -> None:
    assert capture("--mode", "2-1,0,mxfp8", *SMALL) == 0
    out, err = capsys.readouterr()
    stems = ["2-1", "0", "fp32", "fp32-rotated", "mxfp8"]
    files = [f"mode_{s}_{e}" for s in stems for e in ("layer_0.npy", "layer_4.npy", "stats.json")]
    assert names() == sorted(files)
    assert len(out.splitlines()) == 5
    assert "out/mode_2-1_stats.json" in out
    assert "[3/5] mode 2-1, basis rotated" in err
    record = stats("2-1")
    assert (record["mode"], record["basis"], record["samples"]) == ("2-1", "rotated", 1)
    assert record["calibration"]
    assert stats("fp32-rotated")["calibration"] is None
    partners = {stem: stats(stem)["reference"] for stem in stems}
    assert partners == {
        "2-1": "fp32-rotated", "0": "fp32-rotated", "mxfp8": "fp32", "fp32": None,
        "fp32-rotated": None,
    }  # fmt: skip
    note_by_mode = {line.split()[0]: line.partition("; ")[2] for line in out.splitlines()}
    assert note_by_mode["2-1"] == "its reference is mode_fp32-rotated_layer_*.npy"
    assert note_by_mode["mxfp8"] == "its reference is mode_fp32_layer_*.npy"
    assert note_by_mode["fp32"] == ""
    casts = record["casts"]["backbone.layers.0.mixer.u_cast"]
    assert casts["values"] > 0
    assert casts["nonfinite"] == 0
    for layer in (0, 4):
        layer_stats, values = record["layers"][f"layer_{layer}"], loaded("2-1", layer)
        assert values.dtype == np.float32
        assert values.shape == tuple(layer_stats["shape"]) == (64, 128)
        assert layer_stats["tokens"] == [64]
        wide = values.astype(np.float64)
        expected = [wide.mean(), wide.std(), wide.min(), wide.max()]
        statistics = [layer_stats[key] for key in ("mean", "std", "min", "max")]
        np.testing.assert_allclose(statistics, expected, rtol=1e-12)
        assert layer_stats["reason"] == ""
    # Dead branches and a reference that is a mode in disguise would make these equal.
    assert not np.array_equal(loaded("0", 4), loaded("fp32-rotated", 4))
    assert not np.array_equal(loaded("fp32", 4), loaded("fp32-rotated", 4))


@proof
def test_the_plain_reference_is_there_whatever_is_captured() -> None:
    assert capture("--mode", "essential", *SMALL) == 0
    stems = ["0", "2-1", "2-2", "2-4", "fp32", "fp32-rotated"]
    files = [name for name in names() if name.endswith("json")]
    assert files == sorted(f"mode_{stem}_stats.json" for stem in stems)
    assert stats("fp32")["basis"] == "plain"
    # What people subtract by name is the partner, not its namesake in another basis.
    near = np.square(loaded("2-1", 4) - loaded(stats("2-1")["reference"], 4)).mean()
    far = np.square(loaded("2-1", 4) - loaded("fp32", 4)).mean()
    assert near < far / 100


def test_captures_without_the_name_of_their_reference_are_read() -> None:
    assert capture("--mode", "int8", *own()) == 0
    for stem in ("int8", "fp32"):
        record = stats(stem)
        del record["reference"]
        Path(f"out/mode_{stem}_stats.json").write_text(json.dumps(record), encoding="utf-8")
    assert main(["layers", "compare", "int8", "--output-dir", "out"]) == 0


def test_the_files_hold_what_the_model_computes() -> None:
    from qgate.models import Sampling, load

    assert capture("--mode", "fp_only", "--layers", "all", "--model", "tiny-llama", *SMALL) == 0
    model = load("tiny-llama", sampling=Sampling(samples=1, seqlen=64))
    ran = run_model(model)
    assert len(stats("fp32")["layers"]) == len(model.layers)
    for index, name in enumerate(model.layers):
        (tensor,) = ran[f"{name}:output"]
        assert np.array_equal(loaded("fp32", index), tensor[0].numpy())
    # The dtype is what was computed, before the conversion.
    assert {entry["dtype"] for entry in stats("fp16")["layers"].values()} == {"float16"}
    assert {entry["dtype"] for entry in stats("fp32")["layers"].values()} == {"float32"}
    assert loaded("fp16", 0).dtype == np.float32


def test_samples_of_different_lengths_follow_each_other() -> None:
    assert capture("--mode", "int8", *own()) == 0
    entry = stats("int8")["layers"]["layer_0"]
    assert (entry["tokens"], entry["shape"]) == ([16, 13, 10], [39, 8])
    values = loaded("fp32", 2)
    # Tokens of one id are the same wherever they stand in this model.
    assert np.allclose(values[:13], values[16:29], atol=1e-6)


def test_padding_is_left_out() -> None:
    assert capture("--mode", "int8", *own("padded")) == 0
    assert stats("fp32")["layers"]["layer_0"]["tokens"] == [11, 11, 11]


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ("first,last", [0, 2]),
        ("all", [0, 1, 2]),
        (r"layers\.[12]$", [1, 2]),
        ("1", [1]),
        ("last", [2]),
    ],
)
def test_layers_are_chosen(layers: str, found: list[int]) -> None:
    assert capture("--mode", "fp32", "--layers", layers, *own()) == 0
    assert list(stats("fp32")["layers"]) == [f"layer_{i}" for i in found]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mode", "int8", "--layers", "nothing"], ["'nothing'", "layers.2"]),
        (["--mode", "int8", "--layers", "0,3"], ["no layer 3", "0 to 2"]),
        (["--mode", "int8", "--layers", "("], ["'('"]),
        (["--mode", "2-1"], ["2-1"]),
        (["--mode", "nope"], ["'nope'", "int8"]),
        (["--mode", "fewer"], ["layers.2:output", "fewer"]),
        (["--mode", "codes"], ["mode 'codes'", "torch.int8", "floating-point outputs"]),
    ],
)
def test_what_cannot_be_captured_is_an_error(
    argv: list[str], words: list[str], capsys: Capsys
) -> None:
    message = complaint(capsys, *argv, *own())
    assert all(word in message for word in words)
    assert not [name for name in names() if "fp32" not in name]


def test_numbers_that_are_not_finite_are_null_with_a_reason(capsys: Capsys) -> None:
    assert capture("--mode", "poisoned", *own()) == 0
    assert "NaN" in capsys.readouterr().out
    entry = stats("poisoned")["layers"]["layer_2"]
    assert [entry[key] for key in ("mean", "std", "min", "max")] == [None] * 4
    assert entry["non_finite"] == {"nan": 39, "positive_infinity": 3, "negative_infinity": 0}
    assert "39 NaN, 3 +Inf" in entry["reason"]
    assert stats("poisoned")["layers"]["layer_0"]["mean"] is not None


@pytest.mark.parametrize(("build", "word"), [("not_fp32", "layers.0.mix"), ("half", "float16")])
def test_a_reference_that_is_quantized_is_none(build: str, word: str, capsys: Capsys) -> None:
    message = complaint(capsys, "--mode", "int8", *own(build))
    assert word in message
    assert "FP32" in message
    assert names() == []


def test_a_folder_belongs_to_one_model_and_choice(capsys: Capsys) -> None:
    assert capture("--mode", "int8", *own()) == 0
    Path("out/notes.txt").write_text("mine", encoding="utf-8")
    before = {name: Path("out", name).read_bytes() for name in names()}
    message = complaint(capsys, "--mode", "mxfp8", "--model", "tiny-llama", *SMALL)
    assert all(word in message for word in ["'out'", "'own'", "'tiny-llama'", "--overwrite"])
    other_inputs = [*own()[:-1], "2"]
    assert "inputs" in complaint(capsys, "--mode", "int8", *other_inputs)
    assert "layers" in complaint(capsys, "--mode", "int8", "--layers", "all", *own())
    assert {name: Path("out", name).read_bytes() for name in names()} == before
    assert capture("--mode", "mxfp8", "--model", "tiny-llama", "--overwrite", *SMALL) == 0
    assert not [name for name in names() if "int8" in name]
    assert Path("out/notes.txt").read_text(encoding="utf-8") == "mine"
    assert stats("fp32")["model"] == "tiny-llama"


def test_a_folder_of_another_tool_is_refused(capsys: Capsys) -> None:
    Path("out").mkdir()
    Path("out/mode_2-1_stats.json").write_text('{"layer_0": {}}', encoding="utf-8")
    message = complaint(capsys, "--mode", "int8", *own())
    assert "mode_2-1_stats.json" in message
    assert names() == ["mode_2-1_stats.json"]
    assert capture("--mode", "int8", "--overwrite", *own()) == 0
    assert "mode_2-1_stats.json" not in names()


def test_more_modes_join_a_folder_and_the_same_one_is_replaced() -> None:
    assert capture("--mode", "int8", *own()) == 0
    first = loaded("int8", 2)
    assert capture("--mode", "mxfp4", *own()) == 0
    assert capture("--mode", "int8", *own()) == 0
    assert np.array_equal(loaded("int8", 2), first)
    assert {f"mode_{m}_stats.json" for m in ("int8", "mxfp4", "fp32")} <= set(names())


def test_a_run_that_fails_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    assert capture("--mode", "int8", *own()) == 0
    before = {name: Path("out", name).read_bytes() for name in names()}
    real = shards.ShardWriter.add

    def full(self: Any, blocks: Any) -> None:
        if self.size:
            raise OSError(28, "No space left on device")
        real(self, blocks)

    monkeypatch.setattr(shards.ShardWriter, "add", full)
    message = complaint(capsys, "--mode", "int8", *own())
    assert "No space left" in message
    assert {name: Path("out", name).read_bytes() for name in names()} == before
    # A fresh folder stays empty: no layer without its stats, no temporary file.
    assert main(["layers", "capture", "--mode", "int8", "--output-dir", "fresh", *own()]) == 2
    assert names("fresh") == []


def test_a_folder_that_cannot_be_written_is_said_before_the_work(capsys: Capsys) -> None:
    Path("out").write_text("a file", encoding="utf-8")
    message = complaint(capsys, "--mode", "int8", *own())
    assert "'out' is a file; name a folder with --output-dir" in message
    Path("out").unlink()
    Path("out").mkdir(mode=0o555)
    if os.geteuid():
        assert "Permission denied" in complaint(capsys, "--mode", "int8", *own())


def test_a_read_only_folder_is_said_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert "cannot write into 'out': Permission denied" in complaint(
        capsys, "--mode", "int8", *own()
    )
