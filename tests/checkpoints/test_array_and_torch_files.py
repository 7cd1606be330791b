from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints import array_files, grids
from qgate.checkpoints.comparison import compare
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.stored import Checkpoint
from qgate.errors import QgateError
from tests.checkpoints.exports import WIDTH, export, parent_tensors, write
from tests.checkpoints.faults import UP


def _child(folder: Path, name: str = "int8") -> dict[str, Tensor]:
    """Write the configuration of an export, and return its tensors."""
    tensors = load_file(export(folder, name) / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return tensors


def _as_array(x: Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _npz(folder: Path, tensors: dict[str, Tensor]) -> None:
    np.savez(folder / "model.npz", **{name: _as_array(x) for name, x in tensors.items()})


def _compressed(folder: Path, tensors: dict[str, Tensor]) -> None:
    np.savez_compressed(folder / "model.npz", **{n: _as_array(x) for n, x in tensors.items()})


def _plain(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, folder / "model.pt")


def _nested(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(
        {"state_dict": tensors, "step": 3, "optimizer": {"m": torch.ones(4)}}, folder / "model.pth"
    )


def _wrapped(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save({"model": {f"module.{n}": x for n, x in tensors.items()}}, folder / "model.pt")


def _old_form(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, folder / "model.pt", _use_new_zipfile_serialization=False)


def _shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    for number in range(3):
        shard = {n: tensors[n] for n in list(tensors)[number::3]}
        torch.save(shard, folder / f"pytorch_model-{number + 1:05}-of-00003.bin")
    torch.save({"lr": torch.ones(1)}, folder / "training_args.bin")


WRITERS = {
    ".npz": _npz,
    ".npz, compressed": _compressed,
    ".pt": _plain,
    ".pt, old form": _old_form,
    ".pt, wrapped": _wrapped,
    ".pth, nested": _nested,
    ".bin, sharded": _shards,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_child_and_a_parent_may_be_of_any_kind(name: str, tmp_path: Path) -> None:
    child = tmp_path / "child"
    tensors = _child(child)
    WRITERS[name](child, tensors)
    write(tmp_path / "parent", parent_tensors(), {})
    other = tmp_path / "other"
    other.mkdir()
    WRITERS[name](other, parent_tensors())
    for parent in (tmp_path / "parent", other):
        record = compare(str(child), str(parent))
        assert record.findings == []
        assert sum(bool(w.packing) for w in record.weights) == 14
    read = open_checkpoint(str(child))
    key = next(n for n in read.entries if n.endswith(f"{UP}.weight"))
    assert torch.equal(read.read(key), tensors[f"{UP}.weight"])
    assert read.entries[key].dtype == "I8"


@pytest.mark.parametrize(
    ("name", "kind", "spans"),
    [(".npz", "npz", 2), (".npz, compressed", "npz", 0), (".pt", "pt", 2)],
)
def test_spans_of_a_file_are_its_elements(
    name: str, kind: str, spans: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_files, "LARGE", 256)
    tensors = {
        "a": torch.randn(40, 24),
        "turned": torch.randn(24, 40).T,
        "b": torch.randint(0, 100, (3, 5, 64), dtype=torch.int8),
        "few": torch.randn(3),
    }
    WRITERS[name](tmp_path, tensors)
    checkpoint = open_checkpoint(str(tmp_path / f"model.{kind}"))
    checkpoint.ahead = 1 << 9
    assert sum(checkpoint.has_spans(n) for n in ("a", "b")) == spans
    assert not checkpoint.has_spans("turned")
    for key, x in tensors.items():
        row = x.reshape(-1)
        assert torch.equal(checkpoint.read(key), x)
        for first in range(0, len(row), 37):
            last = min(first + 37, len(row))
            assert torch.equal(checkpoint.read_span(key, first, last), row[first:last])


@pytest.mark.parametrize("name", WRITERS)
def test_each_array_is_unpacked_a_few_times(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "CHUNK", 8 * WIDTH)
    monkeypatch.setattr(Checkpoint, "ahead", 1 << 9)
    monkeypatch.setattr(array_files, "LARGE", 256)
    write(tmp_path / "parent", parent_tensors(), {})
    child = tmp_path / "child"
    WRITERS[name](child, _child(child))
    reads: Counter[str] = Counter()
    original = Checkpoint.read

    def count(checkpoint: Checkpoint, key: str) -> Tensor:
        reads[key] += 1
        return original(checkpoint, key)

    monkeypatch.setattr(Checkpoint, "read", count)
    assert compare(str(child), str(tmp_path / "parent")).findings == []
    assert max(reads.values(), default=0) <= 1


@pytest.mark.parametrize("name", WRITERS)
def test_a_fault_is_found_in_any_kind(name: str, tmp_path: Path) -> None:
    tensors = _child(tmp_path)
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"] * 2
    WRITERS[name](tmp_path, tensors)
    write(tmp_path / "parent", parent_tensors(), {})
    (finding,) = compare(str(tmp_path), str(tmp_path / "parent")).findings
    assert finding.subject.endswith(f"{UP}.weight")
    assert finding.cause.startswith("all scales are 2 times too high")


def test_big_endian_arrays_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(4, dtype=">f4"), b=np.ones((2, 3), order="F"))
    read = open_checkpoint(str(tmp_path / "x.npz"))
    assert read.read("a").tolist() == [0, 1, 2, 3]
    assert [entry.dtype for entry in read.entries.values()] == ["F32", "F64"]
    assert read.entries["b"].shape == (2, 3)


def _cut(
    name: str, write_file: Callable[[Path, dict[str, Tensor]], None]
) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write_file(folder, {"a": torch.ones(64, 64)})
        path = folder / name
        path.write_bytes(path.read_bytes()[:-900])

    return make


def _bytes(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _lacks_shard(folder: Path) -> None:
    _shards(folder, parent_tensors())
    (folder / "pytorch_model-00002-of-00003.bin").unlink()


def _twice(folder: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2)}, folder / name)


def _twice_in_arrays(folder: Path) -> None:
    for name in ("a.npz", "b.npz"):
        np.savez(folder / name, w=np.ones(2))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
BAD = {
    ".pt cut off": (_cut("model.pt", _plain), "model.pt' is damaged, cut off or no torch file"),
    ".pt of text": (_bytes("model.pt", b"<html>"), "model.pt' is no torch file, or holds more than tensors"),
    ".pt empty": (_bytes("model.pt", b""), "model.pt' is damaged, cut off or no torch file"),
    ".pt pointer": (_bytes("model.pt", POINTER), "model.pt' is a pointer of Git LFS"),
    ".pt of numbers": (lambda f: torch.save({"a": 3}, f / "model.pt"), "model.pt' holds no tensors by name"),
    ".pt, sparse": (lambda f: torch.save({"a": torch.eye(3).to_sparse()}, f / "model.pt"), "'a' is torch.sparse_coo"),
    ".pt twice": (_twice, "'w' is in 'a.pt' and in 'b.pt'"),
    ".bin lacks a shard": (_lacks_shard, "lacks 1 of 3 shards, first 'pytorch_model-00002-of-00003.bin'"),
    ".npz cut off": (_cut("model.npz", _npz), "model.npz' is damaged, cut off or no .npz file"),
    ".npz of text": (_bytes("model.npz", b"<html>"), "model.npz' is damaged, cut off or no .npz file"),
    ".npz pointer": (_bytes("model.npz", POINTER), "model.npz' is a pointer of Git LFS"),
    ".npz of texts": (lambda f: np.savez(f / "model.npz", a=np.array(["x"])), "'a' holds <U1, not numbers"),
    ".npz of nothing": (lambda f: np.savez(f / "model.npz"), "model.npz' holds no arrays"),
    ".npz twice": (_twice_in_arrays, "'w' is in 'a.npz' and in 'b.npz'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_one_clear_error(name: str, tmp_path: Path) -> None:
    make, words = BAD[name]
    make(tmp_path)
    with pytest.raises(QgateError) as caught:
        compare(str(tmp_path))
    assert re.search(words, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.pt", "model.npz", "model.onnx"])
def test_no_permission_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plain(tmp_path, parent_tensors())
    _npz(tmp_path, parent_tensors())
    (tmp_path / "model.onnx").write_bytes(b"any")

    def refuse(*_arguments: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("qgate.storage.folders.LocalFolder.read", refuse)
    with pytest.raises(QgateError, match=rf"{name}' cannot be read: permission denied"):
        compare(str(tmp_path / name))
