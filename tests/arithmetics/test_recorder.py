"""What is recorded on a device can be read back, with inputs that are the same on every device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.arithmetics import recorder
from tests.arithmetics.recordings import FOLDER, calls_of, share_of_equal, write_calls
from tests.devices.__main__ import main

MATCH = "^(?!compiled|triton|scaled_mm_splits).*(K64|K96|causal/|eager|conv|cast|int)"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    assert recorder.record("cpu", folder, MATCH) == 0
    return folder


def test_every_group_is_a_file_like_those_of_the_repository(recorded: Path) -> None:
    on_cuda = {
        path.name for path in FOLDER.glob("*.safetensors") if not path.name.startswith("cpu")
    }
    assert {path.name for path in recorded.iterdir()} == on_cuda
    for path in recorded.iterdir():
        calls, stored = calls_of(path), calls_of(FOLDER / path.name)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert set(json.loads(metadata["notes"])) == set(calls)
        assert metadata["device"] == "cpu"
        alike = set(calls) & set(stored)
        assert alike
        for name in alike:
            if not name.startswith("sdpa"):  # gradients are recorded with the result now
                assert set(calls[name]) == set(stored[name])
            for key in set(calls[name]) & set(stored[name]):
                assert calls[name][key].dtype == stored[name][key].dtype


def test_results_are_those_of_the_inputs_beside_them(recorded: Path) -> None:
    call = calls_of(recorded / "16bit.safetensors")["mm/bf16/K64"]
    assert call["y"].shape == (16, 16)
    assert (
        share_of_equal((call["a"].double() @ call["b"].double().mT).float().bfloat16(), call["y"])
        == 1
    )
    call = calls_of(recorded / "fp8.safetensors")["scaled_mm/K96/slow/f32"]
    exact = call["a"].double() @ call["b"].double().mT * call["scale_a"] * call["scale_b"]
    assert torch.allclose(call["y"].double(), exact, rtol=1e-3, atol=1e-4)


def test_inputs_depend_on_the_name_alone(recorded: Path, tmp_path: Path) -> None:
    recorder.record("cpu", tmp_path, "scaled_mm_unit/K64/gauss")
    name = "scaled_mm_unit/K64/gauss/fast"
    first, second = (calls_of(folder / "fp8.safetensors")[name] for folder in (recorded, tmp_path))
    assert all(share_of_equal(first[key], second[key]) == 1 for key in first)


def test_what_a_device_refuses_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recorder.record("cpu", tmp_path, "sdpa/fp16/causal/(cudnn|math)") == 0
    printed = capsys.readouterr().out
    assert "attention: 1 calls, 1 refused" in printed
    assert "sdpa/fp16/causal/cudnn_attention: RuntimeError: No viable backend" in printed
    assert recorder.record("cpu", tmp_path, "int", minutes=0) == 1
    assert "int_mm/K1024: no time left" in capsys.readouterr().out


def test_equal_tensors_are_kept_once(tmp_path: Path) -> None:
    x, nan = torch.randn(100, 100), torch.full((100, 100), torch.nan)
    calls = {"a/b": {"x": x, "y": nan}, "a/c": {"x": x.clone(), "y": nan, "z": x.half()}}
    write_calls(tmp_path / "calls.safetensors", calls, {})
    assert (tmp_path / "calls.safetensors").stat().st_size < 105_000
    for name, call in calls_of(tmp_path / "calls.safetensors").items():
        assert set(call) == set(calls[name])
        assert all(share_of_equal(call[key], calls[name][key]) == 1 for key in call)


def test_the_command_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["cpu", "--record", str(tmp_path), "--match", "int_mm"]
    monkeypatch.setattr(sys, "argv", ["devices", *options])
    assert main() == 0
    assert list(calls_of(tmp_path / "int8.safetensors")) == ["int_mm/K1024"]
