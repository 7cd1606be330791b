from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.opening import open_checkpoint
from qgate.cli import main
from qgate.errors import QgateError
from tests.checkpoints.exports import export, parent_tensors, write
from tests.shares import proof


def _shards(folder: Path, count: int, stem: str = "model") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(1, count + 1):
        path = folder / f"{stem}-{number:05}-of-{count:05}.safetensors"
        save_file({f"layers.{number}.weight": torch.ones(4, 4) * number}, path)
        paths.append(path)
    return paths


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    _shards(tmp_path, 3)
    checkpoint = open_checkpoint(str(tmp_path))
    assert list(checkpoint.entries) == ["layers.1.weight", "layers.2.weight", "layers.3.weight"]
    assert sum(entry.size for entry in checkpoint.entries.values()) == 3 * 64
    assert float(checkpoint.read("layers.2.weight")[0, 0]) == 2
    assert float(checkpoint.read("layers.1.weight")[0, 0]) == 1


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    path = _shards(tmp_path, 2)[1]
    assert list(open_checkpoint(str(path)).entries) == ["layers.2.weight"]


def _is_cut(folder: Path) -> None:
    path = _shards(folder, 1)[0]
    path.write_bytes(path.read_bytes()[:-7])


def _is_pointer(folder: Path) -> None:
    path = _shards(folder, 1)[0]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")


def _is_damaged(folder: Path) -> None:
    _shards(folder, 1)[0].write_bytes(b"\x00" * 40)


def _lacks_shard(folder: Path) -> None:
    _shards(folder, 3)[1].unlink()


def _has_two_exports(folder: Path) -> None:
    _shards(folder, 2)
    _shards(folder, 3)


def _has_a_name_twice(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("a", "b"):
        save_file({"x.weight": torch.ones(2)}, folder / f"{name}.safetensors")


def _has_wrong_json(folder: Path) -> None:
    _shards(folder, 1)
    (folder / "config.json").write_text("{")


def _has_unknown_method(folder: Path) -> None:
    _shards(folder, 1)
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "eetq"}})
    )


def _has_odd_recipe(folder: Path) -> None:
    _shards(folder, 1)
    settings = {"quant_method": "gptq", "bits": "four"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


def _has_a_list(folder: Path) -> None:
    _shards(folder, 1)
    (folder / "config.json").write_text("[1]")


def _has_odd_tiles(folder: Path) -> None:
    _shards(folder, 1)
    settings = {"quant_method": "fp8", "weight_block_size": [128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


def _is_outside(folder: Path) -> None:
    _shards(folder / "snapshots" / "abc", 1)


def _is_not_quantized(folder: Path) -> None:
    _shards(folder, 1)


def _has_arrays(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.npz").write_bytes(b"")


def _has_a_damaged_torch_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _is_empty(folder: Path) -> None:
    folder.mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_is_cut, r"is cut off: it has \d+ of \d+ bytes"),
        (_is_pointer, "is a pointer of Git LFS.*git lfs pull"),
        (_is_damaged, r"is damaged or no \.safetensors file"),
        (_lacks_shard, "lacks 1 of 3 shards, first 'model-00002-of-00003.safetensors'"),
        (_has_two_exports, "shards of two exports: 'model' in 2 parts and 'model' in 3 parts"),
        (_has_a_name_twice, "'x.weight' is in 'a.safetensors' and in 'b.safetensors'"),
        (_has_wrong_json, r"config.json' is no JSON"),
        (_has_unknown_method, "quant_method 'eetq', which qgate does not know; it knows compressed-tensors, gptq"),
        (_has_odd_recipe, "declares what gptq does not have: bits is 'four'"),
        (_has_a_list, "config.json' is a list, and not settings by name"),
        (_has_odd_tiles, r"weight_block_size is \[128\], and not two sides such as \[128, 128\]"),
        (_is_outside, "Its folder 'snapshots/abc' has: give that one"),
        (_is_not_quantized, "holds no quantized weight and declares none"),
        (_is_empty, r"has no \.safetensors, .* file"),
        (Path.exists, "is not there; give a folder with .safetensors, .gguf, .onnx, .pt, .pth, .bin files"),
        (_has_arrays, r"has no \.safetensors, .* file. Write the weights of numpy as \.safetens"),
        (_has_a_damaged_torch_file, r"cannot be read as tensors by name: .* Save the model's state_dict"),
        (lambda folder: folder.write_text("x"), "is a file that is not .safetensors"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    make: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "child"
    make(folder)  # type: ignore[operator]
    assert main(["checkpoint", str(folder)]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(words, error), error
    assert len(error.splitlines()) == 1
    assert str(folder) in error


@proof
def test_a_parent_that_is_no_parent_is_refused(tmp_path: Path) -> None:
    export(tmp_path / "child", "int8")
    write(tmp_path / "other weights", parent_tensors(seed=1), {})
    renamed = {f"encoder.{name}x": x[:7] for name, x in parent_tensors().items()}
    write(tmp_path / "other names", renamed, {})
    with pytest.raises(QgateError, match="0 of 14 quantized weights are like"):
        compare(str(tmp_path / "child"), str(tmp_path / "other weights"))
    with pytest.raises(QgateError, match="0 of 14 quantized weights have a counterpart"):
        compare(str(tmp_path / "child"), str(tmp_path / "other names"))
    with pytest.raises(QgateError, match=r"is quantized itself: 'model\.layers\.0"):
        compare(str(tmp_path / "child"), str(tmp_path / "child"))


def test_the_command_prints_findings_and_returns_their_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, parent = str(export(tmp_path / "child", "int8")), str(tmp_path / "parent")
    write(tmp_path / "parent", parent_tensors(), {})
    assert main(["checkpoint", child, "--parent", parent]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{child} is as declared: 14 quantized and 7 other tensors agree")
    assert "int8 per row" in output
    tensors = parent_tensors()
    tensors["model.norm.weight"] *= 1.1
    write(tmp_path / "parent", tensors, {})
    assert main(["checkpoint", child, "--parent", parent]) == 1
    assert capsys.readouterr().out.startswith("model.norm.weight: it is not quantized and not the")
    assert main(["checkpoint", child, "--parent", parent, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [finding["subject"] for finding in record["findings"]] == ["model.norm.weight"]


def test_what_a_child_alone_tells(tmp_path: Path) -> None:
    record = compare(str(export(tmp_path / "child", "nvfp4")))
    assert record.findings == []
    assert {weight.outcome for weight in record.weights} == {"quantized", "unmatched"}
    assert all(w.figures.error is None for w in record.weights if w.figures is not None)
