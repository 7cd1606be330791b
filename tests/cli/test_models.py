"""`qgate modes`, `qgate show` and `qgate calibrate` as their users meet them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qgate.cli import main
from qgate.models.tiny import TINY
from qgate.modes import find_mode, load_calibration, names

SMALL = ["--calib-samples", "2", "--calib-seqlen", "64", "--samples", "1", "--seqlen", "64"]
LEAVES = (
    "in_proj:input",
    "in_proj:output",
    "x_proj:input",
    "x_proj:output",
    "dt_proj:output",
    "scan:state",
    "out_proj:input",
)
Capsys = pytest.CaptureFixture[str]
OWN = """
import torch
from torch import nn
import qgate

def build(samples, seqlen):
    return qgate.Model(
        nn.Sequential(nn.Linear(seqlen, 8), nn.ReLU(), nn.Linear(8, 2)),
        [torch.ones(1, seqlen)] * samples,
        modes={"Mine": lambda model: nn.Identity()},
    )

number = 3

def nothing():
    return None
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which modules are found too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_of_cli_test", raising=False)
    return tmp_path


def lines(argv: list[str], capsys: Capsys) -> list[str]:
    assert main(argv) == 0
    return capsys.readouterr().out.splitlines()


def complaint(argv: list[str], capsys: Capsys) -> str:
    """The one line on standard error; nothing on standard output, exit code 2."""
    assert main(argv) == 2
    out, error = capsys.readouterr()
    error = error.rpartition("\r")[2]  # a progress bar before it
    assert out == ""
    assert error.count("\n") == 1
    words = argv[:2] if argv[0] == "show" else argv[:1]
    assert error.startswith(f"qgate {' '.join(words)}: ")
    return error


# qgate modes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [[], ["all"], ["--model", "tiny-mamba"], ["--model", "tiny-llama"]]
)
def test_modes_are_listed_with_what_they_do(argv: list[str], capsys: Capsys) -> None:
    table = lines(["modes", *argv], capsys)
    assert table[0].split() == ["mode", "models", "basis", "=", "what", "it", "does"]
    listed = {line.split()[0] for line in table[2 : table.index("")]}
    family = {"tiny-mamba": "mamba", "tiny-llama": "other"}.get(argv[-1] if argv else "")
    by_name = {
        name for kind in ("other", "mamba") for name in names(kind) if find_mode(name, kind).by_name
    }
    assert listed == set(names(family)) - {"fp32"} - by_name
    assert max(map(len, table)) <= 150
    assert any("Q(y)" in line for line in table) == (family != "other")


def test_modes_that_a_pattern_means(capsys: Capsys) -> None:
    table = lines(["modes", "2-*,mxfp4"], capsys)
    assert [line.split()[0] for line in table[2:8]] == ["2-0", "2-1", "2-2", "2-3", "2-4", "mxfp4"]
    assert "=2-2" in table[3]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["mxfp9"], ["unknown mode 'mxfp9'", "Did you mean", "mxfp8", "2-4"]),
        (["int8,"], ["unknown mode ''"]),
        (["7-*"], ["pattern '7-*' matches no mode", "2-4"]),
        (
            ["2-1", "--model", "tiny-llama"],
            ["mode '2-1' does not fit tiny-llama", "Mamba", "mxfp8"],
        ),
        (
            ["int8", "--model", "tiny-lama"],
            ["unknown model 'tiny-lama'", "Did you mean tiny-llama"],
        ),
    ],
)
def test_modes_that_are_none(argv: list[str], words: list[str], capsys: Capsys) -> None:
    error = complaint(["modes", *argv], capsys)
    assert all(word in error for word in words), error


# qgate show --------------------------------------------------------------------------------------


def test_the_plan_of_a_mode_with_static_scales(capsys: Capsys) -> None:
    output = lines(["show", "mode", "2-1", *SMALL], capsys)
    assert output[0].startswith("mode 2-1 on tiny-mamba, basis rotated: ")
    sites = [line.split()[0] for line in output[4:] if line]
    assert len(sites) == 5 * 19
    assert sites[0] == "backbone.layers.0.mixer.in_proj:weight"
    u = next(line for line in output if line.startswith("backbone.layers.3.mixer.scan:u"))
    assert "calibrated, percentile 0.9995 of 2 samples / 127" in u


@pytest.mark.parametrize("model", ["tiny-llama", "tiny_mamba"])
@pytest.mark.parametrize("name", ["mxfp4", "int8", "w4", "fp32", "fp16"])
def test_the_plan_of_a_format(name: str, model: str, capsys: Capsys) -> None:
    output = lines(["show", "mode", name, "--model", model, *SMALL], capsys)
    assert output[0].startswith(f"mode {name} on {model.replace('_', '-')}, basis ")
    assert (output[1:] == ["Nothing is quantized."]) == (name == "fp32")
    assert not any(line.startswith("lm_head") for line in output)


def test_several_plans_are_made_with_one_calibration(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgate.modes import calibration

    calls: list[object] = []
    measure: Callable[..., Any] = calibration.measure
    monkeypatch.setattr(calibration, "measure", lambda *a, **k: calls.append(a) or measure(*a, **k))
    output = lines(["show", "mode", "0,2-1,int8", *SMALL], capsys)
    assert [line.split()[1] for line in output if line.startswith("mode ")] == ["0", "2-1", "int8"]
    assert len(calls) == 1


@pytest.mark.parametrize("model", ["tiny-mamba", "tiny-llama"])
def test_what_a_model_is_like(model: str, capsys: Capsys) -> None:
    output = lines(["show", "model", model, *SMALL], capsys)
    assert output[0].startswith(f"{model}: ")
    assert "5 layers; on 1 samples, 64 tokens, " in output[0]
    assert float(output[0].split()[-4]) < 3.5, "it predicts better than byte pairs"
    assert any(
        line.startswith(("backbone.layers.4.mixer.scan:u", "model.layers.4.mlp.down_proj:input"))
        for line in output
    )
    assert not any("lm_head" in line for line in output)
    assert "bits per byte of the whole held-out text" in output[-1]
    parameters = sum(p.numel() for p in TINY.get(model).build().parameters())
    assert f"{parameters:,} parameters" in output[0]


def test_token_ids_in_place_of_text(workplace: Path, capsys: Capsys) -> None:
    np.save(workplace / "ids.npy", np.arange(200) % 256)
    output = lines(["show", "model", "tiny-llama", "--tokens", "ids.npy", *SMALL], capsys)
    assert "on 1 samples, 64 tokens" in output[0]


def test_text_of_ones_own(workplace: Path, capsys: Capsys) -> None:
    (workplace / "a.txt").write_text("gr\u00fc\u00df dich " * 40)
    own = lines(["show", "model", "tiny-llama", "--text", "a.txt", *SMALL], capsys)[0]
    assert own != lines(["show", "model", "tiny-llama", *SMALL], capsys)[0]


def test_a_model_of_ones_own(workplace: Path, capsys: Capsys) -> None:
    (workplace / "own_of_cli_test.py").write_text(OWN)
    model = "own_of_cli_test:build"
    first = lines(["show", "model", model, "--samples", "3", "--seqlen", "16"], capsys)[0]
    assert first == f"{model}: 154 parameters, 2 layers; on 3 samples"
    plan = lines(["show", "mode", "int8", "--model", model, *SMALL], capsys)
    assert [line.split()[0] for line in plan[4:]] == ["0:input", "0:weight", "2:input", "2:weight"]
    assert lines(["modes", "Mine", "--model", model], capsys)[2].startswith("Mine")
    assert "quantized by the model's own callable" in "".join(
        lines(["show", "mode", "Mine", "--model", model, *SMALL], capsys)
    )


TASKS = """
import torch
from torch import nn

import qgate


class Tokens(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.embed, self.out, self.context = nn.Embedding(8, 16), nn.Linear(16, 16), context

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(x + x.mean(1, keepdim=True) if self.context else x)


def mean_size(outputs):
    return [float(output.abs().mean()) for output in outputs]


def made(context, **more):
    torch.manual_seed(0)
    ids = [torch.randint(0, 8, (2, 12)) for _ in range(3)]
    return qgate.Model(Tokens(context), ids, "tokens", **more)


def forward_only(): return made(False)
def both_directions(): return made(True)
def measured(): return made(True, metric=mean_size)
def wrong(): return made(True, metric=lambda outputs: "good")
"""


@pytest.mark.parametrize(
    ("model", "figures"),
    [
        ("forward_only", r", 72 tokens, [0-9.]+ bits per token"),
        ("both_directions", ", 72 tokens"),
        ("measured", r", 72 tokens, mean_size 0\.[0-9]+"),
    ],
)
def test_only_a_task_that_was_measured_is_shown(
    workplace: Path, capsys: Capsys, model: str, figures: str
) -> None:
    (workplace / "tasks.py").write_text(TASKS)
    first = lines(["show", "model", f"tasks.py:{model}"], capsys)[0]
    assert re.fullmatch(rf"tokens: 400 parameters, 1 layer; on 3 samples{figures}", first)


def test_a_metric_that_is_no_figure_is_one_error(workplace: Path, capsys: Capsys) -> None:
    (workplace / "tasks.py").write_text(TASKS)
    error = complaint(["show", "model", "tasks.py:wrong"], capsys)
    assert "metric metric of tokens, mode fp32, returned 'good', which is no number" in error


def files(at: Path) -> None:
    (at / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (at / "empty.txt").write_text("")
    (at / "short.txt").write_text("too short")
    (at / "own_of_cli_test.py").write_text(OWN)
    arrays: dict[str, Any] = {"floats": np.ones(200, "f4"), "large": np.full(200, 256), "negative": np.full(200, -1), "none": np.zeros(0, "i8"), "cube": np.zeros((2, 50, 2), "i8"), "few": np.arange(20)}  # fmt: skip
    for name, array in arrays.items():
        np.save(at / f"{name}.npy", array)
    np.savez(at / "two.npz", a=np.arange(200), b=np.arange(200))


BAD_OPTIONS: list[tuple[list[str], list[str]]] = [
    (["--model", "tiny-lama"], ["unknown model 'tiny-lama'", "Did you mean tiny-llama", "package.module:build"]),
    (["--model", "mamba:nowhere"], ["'mamba:nowhere'", "no folder 'nowhere'"]),
    (["--model", "hf:."], ["'hf:.'", "no config.json"]),
    (["--model", "no.such.module:build"], ["'build' from 'no.such.module'", "No module named"]),
    (["--model", "own_of_cli_test:bild"], ["unknown function of own_of_cli_test 'bild'. Did you mean build?"]),
    (["--model", "own_of_cli_test:number"], ["int", "not a callable"]),
    (["--model", "own_of_cli_test:nothing"], ["returned NoneType, not a qgate.Model"]),
    (["--device", "gpu"], ["unknown device 'gpu'", "auto, cpu, cuda"]),
    (["--device", "cuda:99"], ["'cuda:99' was asked for", "Use auto or cpu"]),
    (["--seqlen", "0"], ["seqlen 0 is not allowed"]),
    (["--samples", "-3"], ["samples -3 is not allowed"]),
    (["--text", "nowhere.txt"], ["'nowhere.txt' cannot be read: No such file"]),
    (["--text", "."], ["'.' cannot be read"]),
    (["--text", "binary.txt"], ["'binary.txt' is not text in UTF-8"]),
    (["--text", "empty.txt"], ["it is 0 tokens long"]),
    (["--text", "short.txt"], ["it is 9 tokens long, enough for 0"]),
    (["--tokens", "nowhere.npy"], ["no file 'nowhere.npy'"]),
    (["--tokens", "binary.txt"], ["'binary.txt'", ".npy"]),
    (["--tokens", "floats.npy"], ["torch.float32 (200,)", "whole numbers"]),
    (["--tokens", "cube.npy"], ["(2, 50, 2)", "one row"]),
    (["--tokens", "none.npy"], ["(0,)"]),
    (["--tokens", "large.npy"], ["from 0 to 255", "256 to 256"]),
    (["--tokens", "negative.npy"], ["-1 to -1"]),
    (["--tokens", "few.npy"], ["10 tokens long"]),
    (["--tokens", "two.npz"], ["2 tensors"]),
    (["--percentile-alpha", "99.95"], ["percentile alpha 99.95", "0.5 to 1"]),
]  # fmt: skip


@pytest.mark.parametrize("command", [["show", "model"], ["show", "mode", "int8"], ["calibrate"]])
@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda value: " ".join(value))
def test_bad_options_are_one_line(
    command: list[str], options: list[str], words: list[str], workplace: Path, capsys: Capsys
) -> None:
    files(workplace)
    before = sorted(path.name for path in workplace.iterdir())
    if command == ["show", "model"]:
        named = options[0] == "--model"
        command = [*command, options[1] if named else "tiny-mamba"]
        options = [] if named else options
    error = complaint([*command, *SMALL, *options], capsys)
    assert all(word in error for word in words), error
    assert [
        name for name in sorted(p.name for p in workplace.iterdir()) if "__" not in name
    ] == before


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["mode", "mxfp9"], ["unknown mode 'mxfp9'"]),
        (["mode", "int8,"], ["unknown mode ''"]),
        (["mode", "0", "--model", "tiny-llama"], ["mode '0' does not fit tiny-llama"]),
        (["mode", "2-*", "--model", "hf:nowhere"], ["'2-*' matches no mode that fits hf:nowhere"]),
        (["mode", "2-1", "--calib-seqlen", "0"], ["seqlen 0"]),
        (["mode", "2-1", "--calib-text", "short.txt"], ["it is 9 tokens long"]),
        (["mode", "2-1", "--calib-text", "nowhere"], ["'nowhere' cannot be read"]),
        (
            ["mode", "int8", "--model", "own_of_cli_test:build", "--device", "tpu"],
            ["unknown device 'tpu'"],
        ),
    ],
)
def test_modes_that_cannot_be_shown(
    argv: list[str], words: list[str], workplace: Path, capsys: Capsys
) -> None:
    files(workplace)
    error = complaint(["show", *argv], capsys)
    assert all(word in error for word in words), error


@pytest.mark.parametrize("argv", [["show"], ["show", "mode"], ["show", "modle", "x"], ["calibrate", "--arithmetic", "bf16"], ["calibrate", "--samples", "x"]])  # fmt: skip
def test_a_command_that_is_not_complete_says_what_it_takes(argv: list[str], capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("qgate ")
    assert error.count("\n") == 1
    assert error.endswith("--help` shows what it takes.\n")


# qgate calibrate ---------------------------------------------------------------------------------


def test_scales_are_measured_written_and_kept(workplace: Path, capsys: Capsys) -> None:
    output = lines(["calibrate", *SMALL], capsys)
    assert output[-1] == "calibration.json written"
    assert [line.split()[0] for line in output[2:-2]] == [
        f"backbone.layers.{k}.mixer.{leaf}" for k in range(5) for leaf in LEAVES
    ]
    file = workplace / "calibration.json"
    calibration, content = load_calibration(file), file.read_bytes()
    assert (calibration.samples, calibration.model, calibration.settings.percentile_alpha) == (
        2,
        "tiny-mamba",
        0.9995,
    )
    assert f"{calibration.scales['backbone.layers.0.mixer.x_proj:input'].scale:.6g}" in " ".join(
        output
    )
    assert lines(["calibrate", *SMALL], capsys)[-1] == "calibration.json fits and was kept as it is"
    assert lines(["show", "mode", "2-1", *SMALL, "--calibration", "calibration.json"], capsys)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--percentile-alpha", "0.99"], ["other settings", "0.9995", "0.99"]),
        (["--arithmetic", "fp16"], ["other settings", "fp32", "fp16"]),
        (["--seed", "1"], ["other calibration samples"]),
        (["--calib-samples", "3"], ["other calibration samples"]),
    ],
)
def test_scales_of_something_else_are_refused(
    options: list[str], words: list[str], capsys: Capsys
) -> None:
    lines(["calibrate", *SMALL], capsys)
    for command in (["calibrate"], ["show", "mode", "0"]):
        error = complaint([*command, *SMALL, "--calibration", "calibration.json", *options], capsys)
        assert all(word in error for word in ["'calibration.json'", "Delete the file", *words])


def test_files_that_are_no_scales(workplace: Path, capsys: Capsys) -> None:
    for name, content in {
        "a.json": "{",
        "b.json": json.dumps({"qgate": "results"}),
        "c.json": "[]",
    }.items():
        (workplace / name).write_text(content)
        assert f"'{name}' is no calibration of qgate" in complaint(
            ["calibrate", *SMALL, "--calibration", name], capsys
        )
        assert (workplace / name).read_text() == content
    assert "directory" in complaint(["calibrate", *SMALL, "--calibration", "."], capsys)
    complaint(["calibrate", *SMALL, "--calibration", "a.json/below.json"], capsys)


def test_a_model_without_static_scales_is_told_so(workplace: Path, capsys: Capsys) -> None:
    (workplace / "own_of_cli_test.py").write_text(OWN)
    error = complaint(["calibrate", "--model", "own_of_cli_test.py:build", *SMALL], capsys)
    assert "own_of_cli_test.py:build fits no mode with calibrated scales" in error
    assert not list(workplace.glob("*.json"))


def test_ranges_of_a_cache_are_calibrated(workplace: Path, capsys: Capsys) -> None:
    lines(["calibrate", "--model", "tiny-llama", *SMALL, "--calibration", "llama.json"], capsys)
    stored = load_calibration(workplace / "llama.json")
    heads = {"queries": 4, "keys": 2, "keys_before_rope": 2, "values": 2}
    leaves = [f"{side}{head}" for side, count in heads.items()
              for head in ("", *(f"[{k}]" for k in range(count)))]  # fmt: skip
    sites = {f"model.layers.{k}.self_attn.cache:{leaf}" for k in range(5) for leaf in leaves}
    assert set(stored.scales) == sites
    for site, reach in stored.ranges().items():
        of_heads = [r for name, r in stored.ranges().items() if name.startswith(f"{site}[")]
        assert reach == max(of_heads, default=reach) > 0
    (plan, *_) = lines(["show", "mode", "kv-fp8", "--model", "tiny-llama", *SMALL,
                        "--calibration", "llama.json"], capsys)  # fmt: skip
    assert "FP8 (E4M3), a calibrated scale per tensor" in plan
