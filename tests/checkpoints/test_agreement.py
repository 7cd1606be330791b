from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints import agreement, grids, rows
from qgate.checkpoints.agreement import TensorAgreement, compare_exports
from qgate.cli import main
from tests.checkpoints.exports import export, write
from tests.checkpoints.methods import Export, export_awq, export_gptq
from tests.checkpoints.references import gptq_parts

UP = "model.layers.1.mlp.up_proj"


def _changed(folder: Path, change: Callable[[dict[str, Tensor]], None], scheme: str) -> str:
    tensors = load_file(export(folder, scheme) / "model.safetensors")
    configuration = json.loads((folder / "config.json").read_text())
    change(tensors)
    return str(write(folder, tensors, configuration))


def _steps(tensors: dict[str, Tensor]) -> None:
    codes = tensors[f"{UP}.weight"][0, :3]
    steps = torch.tensor([1, 2, 7], dtype=torch.int8)
    codes += torch.where(codes > 0, -steps, steps)


def _one_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight_scale"][5] *= 2


def _cast_norm(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()


def _change_norm(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][3] = 9


def _leave_out(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["model.more.weight"] = torch.ones(3)


def _unquantize(tensors: dict[str, Tensor]) -> None:
    scale = tensors.pop(f"{UP}.weight_scale")
    tensors[f"{UP}.weight"] = (tensors[f"{UP}.weight"] * scale.float()).bfloat16()


def _shorten(tensors: dict[str, Tensor]) -> None:
    for ending in ("weight", "weight_scale"):
        tensors[f"{UP}.{ending}"] = tensors[f"{UP}.{ending}"][:100]


@pytest.mark.parametrize(
    ("change", "outcome", "words"),
    [
        (_steps, "other values", "3 of 8,192 codes differ: 1 by one step, 1 by two, 1 by more"),
        (_one_scale, "other values", "1 of 128 scales differ, at the median by 2"),
        (_cast_norm, "equal values", "stored as bfloat16 and float32"),
        (_change_norm, "other values", "1 of 64 values differ"),
        (_leave_out, "missing", "it is in the first export alone"),
        (_add, "missing", "it is in the second export alone"),
        (_unquantize, "other values", r"it is values beside scales, and not quantized \(BF16\)"),
        (_shorten, "other values", r"shapes are \(128, 64\) and \(100, 64\)"),
    ],
)
def test_what_differs_between_two_exports_is_named(
    change: Callable[[dict[str, Tensor]], None], outcome: str, words: str, tmp_path: Path
) -> None:
    first = str(export(tmp_path / "a", "int8"))
    record = compare_exports(first, _changed(tmp_path / "b", change, "int8"))
    (tensor,) = (t for t in record.tensors if t.outcome != "equal bits")
    assert tensor.outcome == outcome
    assert re.search(words, tensor.difference), tensor
    assert bool(record.differences) == (outcome != "equal values")


@pytest.mark.parametrize("scheme", ["int8", "w4a16-zero-points", "nvfp4", "mxfp4", "fp8-block"])
def test_two_runs_of_one_export_are_the_same(scheme: str, tmp_path: Path) -> None:
    paths = [str(export(tmp_path / name, scheme)) for name in "ab"]
    record = compare_exports(*paths)
    assert {tensor.outcome for tensor in record.tensors} == {"equal bits"}
    assert record.differences == []


def _tensor(tensors: list[TensorAgreement], name: str) -> TensorAgreement:
    return next(tensor for tensor in tensors if name in tensor.name)


def test_one_weight_in_two_packings_has_equal_values(tmp_path: Path) -> None:
    awq = export_awq(0)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    other = Export(awq.weights, awq.others, gptq_parts, settings)
    paths = [str(e.write(tmp_path / name)) for name, e in (("a", awq), ("b", other))]
    record = compare_exports(*paths)
    assert record.differences == []
    packed = [tensor for tensor in record.tensors if tensor.outcome == "equal values"]
    assert {tensor.difference for tensor in packed} == {"packed as AWQ and as GPTQ"}
    assert len(packed) == 14


@pytest.mark.parametrize("scheme", ["int8", "int8-tensor", "w4a16-zero-points", "fp8-block"])
def test_some_rows_at_a_time_have_the_agreement_of_all(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_scale"] *= 2
        tensors["model.norm.weight"][-1] += 1

    paths = str(export(tmp_path / "a", scheme)), _changed(tmp_path / "b", change, scheme)
    whole = compare_exports(*paths)
    for module in (grids, rows):
        monkeypatch.setattr(module, "CHUNK", 1 << 10)
        monkeypatch.setattr(module, "TALL", 32)
    monkeypatch.setattr(agreement, "TALL", 32)
    assert compare_exports(*paths) == whole
    assert len(whole.differences) > 1


def test_zero_points_of_another_version_are_told_from_codes(tmp_path: Path) -> None:
    first, second = export_gptq(0), export_gptq(0)
    second.weights[UP].zeros[3, 1] += 1
    paths = [str(e.write(tmp_path / name)) for name, e in (("a", first), ("b", second))]
    (tensor,) = compare_exports(*paths).differences
    assert tensor.difference.startswith("1 of 256 zero points differ; 32 of 8,192 codes differ")
    assert tensor.steps == {1: 32}


def test_formats_and_groups_that_differ_are_named(tmp_path: Path) -> None:
    paths = [str(export(tmp_path / scheme, scheme)) for scheme in ("w4a16", "w8a16", "fp8")]
    tensors = compare_exports(*paths[:2]).tensors
    words = _tensor(tensors, "up_proj").difference
    assert words.startswith("elements are int4 and int8; groups are 1 x 32 and 1 x 64")


def test_the_command_has_the_status_of_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (str(export(tmp_path / name, "int8")) for name in "ab")
    assert main(["checkpoint", a, b, "--same"]) == 0
    assert capsys.readouterr().out == f"{a} and {b} are the same: 21 tensors are equal\n"
    _changed(tmp_path / "b", _steps, "int8")
    assert main(["checkpoint", a, b, "--same"]) == 1
    assert f"differ in 1 of 21 tensors; {UP.removeprefix('model.')}" in capsys.readouterr().out
    assert main(["checkpoint", a, b, "--same", "--json"]) == 1
    steps = [t["steps"] for t in json.loads(capsys.readouterr().out)["tensors"] if t["steps"]]
    assert len(steps) == 1
    assert sum(steps[0].values()) == 3
    for arguments in ([a, b], [a, "--same"], [a, b, "--same", "--parent", a], [a, "no", "--same"]):
        assert main(["checkpoint", *arguments]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    write(tmp_path / "c", {"other.weight": torch.ones(2)}, {})
    assert main(["checkpoint", a, str(tmp_path / "c"), "--same"]) == 2
    assert "no tensor has one name" in capsys.readouterr().err
