"""Static scales of activations beside tensors of a calibration."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints.calibrated_scales import judge_scale
from qgate.checkpoints.gate import CheckpointGates, CheckpointSubject
from qgate.cli import main
from qgate.dumps import DumpWriter, Record
from qgate.errors import QgateError
from qgate.gate import Policy
from tests.checkpoints.exports import write
from tests.checkpoints.test_served_values import LARGEST, pair
from tests.shares import proof

__all__ = ["pair"]
TOP = {"nvfp4": 6.0 * 448, "fp8_e4m3": 448.0, "int8": 127.0}


def activations(seed: int, outlier: float = 1.0, count: int = 4) -> list[Tensor]:
    """Draw inputs of a layer: normal numbers, and one channel that is larger."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, 128, 96, generator=generator) for _ in range(count)]
    for x in tensors:
        x[..., 5] *= outlier
    return tensors


def judged(fmt: str, scale: float, tensors: list[Tensor]) -> str:
    def again() -> Iterator[Tensor]:
        return iter(tensors)

    return judge_scale(fmt, scale, again)


@proof
@pytest.mark.parametrize("fmt", TOP)
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_scales_of_other_samples_are_right(fmt: str, outlier: float) -> None:
    for seed in range(20):
        largest = max(float(x.abs().max()) for x in activations(seed + 100, outlier))
        assert judged(fmt, largest / TOP[fmt], activations(seed, outlier)) == ""


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "nvfp4"])
def test_larger_scales_cost_floating_point_nothing(fmt: str) -> None:
    tensors = activations(1)
    largest = max(float(x.abs().max()) for x in tensors)
    assert judged(fmt, 8 * largest / TOP[fmt], tensors) == ""


@pytest.mark.parametrize(
    ("fmt", "factor", "words"),
    [
        ("int8", 1 / 4, "saturate"), ("fp8_e4m3", 1 / 4, "saturate"), ("nvfp4", 1 / 4, "saturate"),
        ("int8", 4, "4 times what the largest of 49,152 values needs"),
        ("fp8_e4m3", 2.0**15, "3.28e+04 times what"), ("nvfp4", 2.0**18, "2.62e+05 times what"),
    ],
)  # fmt: skip
def test_a_wrong_scale_is_named(fmt: str, factor: float, words: str) -> None:
    tensors = activations(2)
    scale = factor * max(float(x.abs().max()) for x in tensors) / TOP[fmt]
    assert words in judged(fmt, scale, tensors)


def dump_of(folder: Path, *, prefix: str = "", name: str = "input") -> Path:
    """Write inputs of the layers as `qgate collect` does."""
    with DumpWriter(folder) as dump:
        for order, (layer, kind) in enumerate(itertools.product(range(5), LARGEST)):
            largest = LARGEST[kind]
            most = largest * (60 if (kind, layer) == ("down_proj", 1) else 1 + 0.1 * layer)
            owner = "self_attn" if kind in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            x = torch.randn(64, 96, generator=torch.Generator().manual_seed(order))
            record = Record(
                order=order, layer_type="linear", operation="forward", phase="pre",
                component="linear", name=name, layer=layer, shape=tuple(x.shape),
                module=f"{prefix}layers.{layer}.{owner}.{kind}", dtype="float32",
            )  # fmt: skip
            dump.add(record, x * (most / float(x.abs().max())))
    return folder


def checkpoint(child: Path, *options: str | Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "qgate", "checkpoint", str(child), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@proof
def test_the_command_holds_scales_beside_a_dump(pair: tuple[Path, Path], tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "dump", prefix="model.")
    assert checkpoint(pair[0], "--calibration", dump)[0] == 0
    tensors = load_file(pair[0] / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.input_scale"] /= 8
    write(tmp_path / "wrong", tensors, json.loads((pair[0] / "config.json").read_text()))
    assert checkpoint(tmp_path / "wrong")[0] == 0, "no other check sees it"
    status, output = checkpoint(tmp_path / "wrong", "--calibration", dump)
    assert status == 1
    assert "model.layers.2.mlp.down_proj.input_scale" in output
    assert "saturate" in output


def test_gates_hold_the_same_scales_beside_a_dump(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = dump_of(tmp_path / "dump", prefix="model.")
    tensors = load_file(pair[0] / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.input_scale"] /= 8
    wrong = write(tmp_path / "wrong", tensors, json.loads((pair[0] / "config.json").read_text()))

    def accounting(child: Path, calibration: Path | None) -> str:
        named = None if calibration is None else str(calibration)
        subject = CheckpointSubject(str(child), str(pair[1]), "mine", calibration=named)
        gates = CheckpointGates(subject, tmp_path / "baselines", Policy.from_table({}))
        gates.check_policy()
        return gates.accounting("checkpoint").text

    assert accounting(pair[0], dump) == accounting(wrong, None) == ""
    first = accounting(wrong, dump).partition("\n")[0]
    assert main(["checkpoint", str(wrong), "--calibration", str(dump), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert first == f"{finding['subject']} (checkpoint accounting) {finding['cause']}"
    with pytest.raises(QgateError, match="unknown module of the calibration"):
        accounting(pair[0], dump_of(tmp_path / "other", prefix="decoder.block."))


@proof
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "weight"}, "has no inputs or outputs of modules with their values"),
        ({"prefix": "decoder.block."}, "unknown module of the calibration"),
    ],
)
def test_a_dump_of_something_else_is_refused(
    options: dict[str, str], words: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    status, output = checkpoint(pair[0], "--calibration", dump_of(tmp_path / "dump", **options))
    assert status == 2
    assert words in output


@proof
def test_a_checkpoint_without_static_scales_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(pair[0] / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if not name.endswith("input_scale")}
    write(tmp_path / "child", tensors, json.loads((pair[0] / "config.json").read_text()))
    dump = dump_of(tmp_path / "dump")
    status, output = checkpoint(tmp_path / "child", "--calibration", dump)
    assert (status, "leave --calibration out" in output) == (2, True)
