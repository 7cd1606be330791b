"""Tensors by URL: the same as from files, and no more is read than is asked for."""

import io

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from qgate.cli import main
from qgate.dumps.tensor_files import expand, read_tensors, split_spec
from qgate.errors import QgateError
from qgate.storage.locations import location_of

ROOT = "memory://bucket"
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
]


@pytest.fixture(autouse=True)
def _empty():
    fsspec.filesystem("memory").store.clear()


def put(name, data):
    location_of(f"{ROOT}/{name}").write_bytes(data)
    return f"{ROOT}/{name}"


def tensors():
    return {
        f"t{i}": (torch.arange(6.0).reshape(2, 3) - 2).to(dtype) for i, dtype in enumerate(DTYPES)
    }


def numpy_bytes(save_to, *arrays, **named):
    file = io.BytesIO()
    save_to(file, *arrays, **named)
    return file.getvalue()


def test_every_kind_of_file_by_url():
    x = torch.arange(6.0).reshape(2, 3)
    put("a.safetensors", save(tensors()))
    file = io.BytesIO()
    torch.save({"x": x, "deep": {"y": x + 1}}, file)
    put("b.pt", file.getvalue())
    put("c.npy", numpy_bytes(np.save, x.numpy()))
    put("d.npz", numpy_bytes(np.savez, first=x.numpy(), second=x.numpy() + 1))
    by_key = {stored.key: stored for stored in read_tensors(f"{ROOT}/a.safetensors")}
    for name, tensor in tensors().items():
        assert by_key[name].tensor.dtype == tensor.dtype
        assert torch.equal(by_key[name].tensor.float(), tensor.float())
    assert by_key["t0"].name == "a.t0"
    assert [s.key for s in read_tensors(f"{ROOT}/b.pt")] == ["x", "deep.y"]
    assert torch.equal(next(read_tensors(f"{ROOT}/c.npy")).tensor, x)
    (second,) = read_tensors(f"{ROOT}/d.npz:second")
    assert torch.equal(second.tensor, x + 1)
    *urls, local = expand([f"{ROOT}/*.np?", f"{ROOT}/*.txt", "local.pt"])
    assert [url.replace("///", "//") for url in urls] == [
        f"{ROOT}/{n}" for n in ("c.npy", "d.npz", "*.txt")
    ]
    assert local == "local.pt"


def test_a_head_that_lists_too_many_tensors_is_refused_before_it_is_parsed(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("qgate.storage.safetensors_heads.MOST_NAMES", len(DTYPES) - 1)
    url = put("many.safetensors", save(tensors()))
    path = tmp_path / "many.safetensors"
    path.write_bytes(save(tensors()))
    sentence = f"it lists {len(DTYPES)} tensors, and {len(DTYPES) - 1} are read; save fewer in it"
    for source in (url, str(path)):
        with pytest.raises(QgateError, match=f"many.safetensors': {sentence}"):
            list(read_tensors(source))
    assert main(["checkpoint", str(path)]) == 2
    assert sentence in capsys.readouterr().err


def test_one_tensor_of_a_shard_is_read_and_not_the_shard(monkeypatch):
    many = {f"layer.{i}": torch.full((1000,), float(i)) for i in range(50)}
    url = put("shard.safetensors", save(many))
    read = []
    memory = fsspec.implementations.memory.MemoryFile
    real = memory.read
    monkeypatch.setattr(memory, "read", lambda self, *n: read.append(real(self, *n)) or read[-1])
    (layer_tensor,) = read_tensors(f"{url}:layer.7")
    assert torch.equal(layer_tensor.tensor, many["layer.7"])
    assert sum(map(len, read)) < 4000 + 6000


@pytest.mark.parametrize(
    ("spec", "key"),
    [("s.safetensors:layer.0", "layer.0"), ("s.safetensors", None), ("s.pt:a:b", "a:b"),
     ("S.NPZ:x.npy", "x.npy"), ("s.other:x", None)],
)  # fmt: skip
def test_names_in_urls(spec, key):
    assert split_spec(f"{ROOT}/{spec}")[1] == key


def test_bad_files_say_so():
    good = save({"x": torch.ones(100)})
    put("cut.safetensors", good[:-10])
    put("head.safetensors", b"\xff" * 64)
    put("list.safetensors", (2).to_bytes(8, "little") + b"[]")
    put("evil.npy", numpy_bytes(np.save, np.array([{"a": 1}], dtype=object)))
    put("empty.pt", b"")
    put("good.safetensors", good)
    for spec, words in {
        "cut.safetensors": "cut off",
        "head.safetensors": "damaged or no .safetensors file",
        "list.safetensors": "damaged or no .safetensors file",
        "evil.npy": "cannot be read",
        "empty.pt": "empty file",
        "none.pt": "there is no file",
        "*.pth": "matches",
        "good.safetensors:y": "has no tensor 'y'; it has x",
        "x.txt": "there is no file",
    }.items():
        with pytest.raises(QgateError, match=words):
            list(read_tensors(f"{ROOT}/{spec}"))


def test_what_an_archive_hides_is_not_run():
    file = io.BytesIO()
    torch.save({"x": _Evil()}, file)
    put("evil.pt", file.getvalue())
    with pytest.raises(QgateError, match="would have to run code"):
        list(read_tensors(f"{ROOT}/evil.pt"))
    assert not _ran


_ran: list[int] = []


class _Evil:
    def __reduce__(self):
        return _ran.append, (1,)
