"""`qgate show modes` and `qgate layers calibrate` as their users meet them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qgate.cli import main
from qgate.modes import find_mode, load_calibration, names
from tests.shares import share

SMALL = ["--set", "calib_samples=2", "--set", "calib_seqlen=64", "--samples", "1", "--seqlen", "64"]
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
    assert error.startswith(f"qgate {argv[0]} {argv[1]}: ")
    return error


# qgate show modes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [[], ["all"], ["--model", "tiny-mamba"], ["--model", "tiny-llama"]]
)
def test_modes_are_listed_with_what_they_do(argv: list[str], capsys: Capsys) -> None:
    table = lines(["show", "modes", *argv], capsys)
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
    table = lines(["show", "modes", "2-*,mxfp4"], capsys)
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
    error = complaint(["show", "modes", *argv], capsys)
    assert all(word in error for word in words), error


def test_modes_of_a_model_of_ones_own(workplace: Path, capsys: Capsys) -> None:
    (workplace / "own_of_cli_test.py").write_text(OWN)
    assert lines(["show", "modes", "Mine", "--model", "own_of_cli_test:build"], capsys)[
        2
    ].startswith("Mine")


# qgate layers calibrate ---------------------------------------------------------------------------------


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
    (["--set", "percentile_alpha=99.95"], ["percentile alpha 99.95", "0.5 to 1"]),
]  # fmt: skip


@share(4)
@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda value: " ".join(value))
def test_bad_options_are_one_line(
    options: list[str], words: list[str], workplace: Path, capsys: Capsys
) -> None:
    files(workplace)
    before = sorted(path.name for path in workplace.iterdir())
    error = complaint(["layers", "calibrate", *SMALL, *options], capsys)
    assert all(word in error for word in words), error
    assert [
        name for name in sorted(p.name for p in workplace.iterdir()) if "__" not in name
    ] == before


@pytest.mark.parametrize(
    "argv",
    [
        ["layers", "calibrate", "--set", "calib_arithmetic=bf16"],
        ["layers", "calibrate", "--samples", "x"],
    ],
)
def test_a_command_that_is_not_complete_says_what_it_takes(argv: list[str], capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("qgate ")
    assert error.count("\n") == 1
    assert error.endswith("--help` shows what it takes.\n")


def test_scales_are_measured_written_and_kept(workplace: Path, capsys: Capsys) -> None:
    output = lines(["layers", "calibrate", *SMALL], capsys)
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
    assert (
        lines(["layers", "calibrate", *SMALL], capsys)[-1]
        == "calibration.json fits and was kept as it is"
    )
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "percentile_alpha=0.99"], ["other settings", "0.9995", "0.99"]),
        (["--set", "calib_arithmetic=fp16"], ["other settings", "fp32", "fp16"]),
        (["--seed", "1"], ["other calibration samples"]),
        (["--set", "calib_samples=3"], ["other calibration samples"]),
    ],
)
def test_scales_of_something_else_are_refused(
    options: list[str], words: list[str], capsys: Capsys
) -> None:
    lines(["layers", "calibrate", *SMALL], capsys)
    error = complaint(
        ["layers", "calibrate", *SMALL, "--calibration", "calibration.json", *options], capsys
    )
    assert all(word in error for word in ["'calibration.json'", "Delete the file", *words])


def test_files_that_are_no_scales(workplace: Path, capsys: Capsys) -> None:
    for name, content in {
        "a.json": "{",
        "b.json": json.dumps({"qgate": "results"}),
        "c.json": "[]",
    }.items():
        (workplace / name).write_text(content)
        assert f"'{name}' is no calibration of qgate" in complaint(
            ["layers", "calibrate", *SMALL, "--calibration", name], capsys
        )
        assert (workplace / name).read_text() == content
    assert "directory" in complaint(["layers", "calibrate", *SMALL, "--calibration", "."], capsys)
    complaint(["layers", "calibrate", *SMALL, "--calibration", "a.json/below.json"], capsys)


def test_a_model_without_static_scales_is_told_so(workplace: Path, capsys: Capsys) -> None:
    (workplace / "own_of_cli_test.py").write_text(OWN)
    error = complaint(
        ["layers", "calibrate", "--model", "own_of_cli_test.py:build", *SMALL], capsys
    )
    assert "own_of_cli_test.py:build fits no mode with calibrated scales" in error
    assert not list(workplace.glob("*.json"))


def test_ranges_of_a_cache_are_calibrated(workplace: Path, capsys: Capsys) -> None:
    lines(
        ["layers", "calibrate", "--model", "tiny-llama", *SMALL, "--calibration", "llama.json"],
        capsys,
    )
    stored = load_calibration(workplace / "llama.json")
    heads = {"queries": 4, "keys": 2, "keys_before_rope": 2, "values": 2}
    leaves = [f"{side}{head}" for side, count in heads.items()
              for head in ("", *(f"[{k}]" for k in range(count)))]  # fmt: skip
    sites = {f"model.layers.{k}.self_attn.cache:{leaf}" for k in range(5) for leaf in leaves}
    assert set(stored.scales) == sites
    for site, reach in stored.ranges().items():
        of_heads = [r for name, r in stored.ranges().items() if name.startswith(f"{site}[")]
        assert reach == max(of_heads, default=reach) > 0
