"""Reading tensors from files of other programs: every kind, and every way to be bad."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qgate.dumps import expand, read_tensors, tensor_files
from qgate.errors import QgateError

X = torch.arange(12.0).reshape(3, 4).bfloat16()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(spec: str) -> list[tuple[str, str | None, list[int]]]:
    return [(s.name, s.key, list(s.tensor.shape)) for s in read_tensors(spec)]


def test_every_kind_of_file() -> None:
    torch.save(X, "bare.pt")
    torch.save(X, "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"tensor": X, "step": 3}, "wrapped.pt")
    torch.save({"w": X, "b": X[0], "step": 3}, "state.pt")
    torch.save([X, X[0]], "list.pt")
    torch.save(torch.nn.Parameter(X.float()), "parameter.pt")
    save_file({"a.b": X, "c": X[0].clone()}, "several.safetensors")
    np.save("array.npy", X.float().numpy())
    np.savez("arrays.npz", one=X.float().numpy(), two=np.arange(3.0))
    assert names("bare.pt") == [("bare", None, [3, 4])]
    assert names("old.pt") == [("old", None, [3, 4])]
    assert names("wrapped.pt") == [("wrapped", None, [3, 4])]
    assert names("state.pt") == [("state.w", "w", [3, 4]), ("state.b", "b", [4])]
    assert names("state.pt:b") == [("state.b", "b", [4])]
    assert names("list.pt") == [("list.0", "0", [3, 4]), ("list.1", "1", [4])]
    assert names("parameter.pt") == [("parameter", None, [3, 4])]
    assert names("several.safetensors") == [
        ("several.a.b", "a.b", [3, 4]),
        ("several.c", "c", [4]),
    ]
    assert names("several.safetensors:c") == [("several.c", "c", [4])]
    assert names("array.npy") == [("array", None, [3, 4])]
    assert [n for n, _, _ in names("arrays.npz")] == ["arrays.one", "arrays.two"]
    for spec in ("bare.pt", "old.pt", "wrapped.pt"):
        assert torch.equal(next(read_tensors(spec)).tensor, X)


def test_a_colon_in_a_name_is_no_separator_while_the_file_exists() -> None:
    torch.save(X, "a:b.pt")
    assert names("a:b.pt") == [("a:b", None, [3, 4])]
    save_file({"k:v": X}, "s.safetensors")
    assert names("s.safetensors:k:v") == [("s.k:v", "k:v", [3, 4])]


def test_the_hash_is_of_the_bytes_whatever_the_strides() -> None:
    torch.save(X.t(), "t.pt")
    stored = next(read_tensors("t.pt"))
    raw = X.t().contiguous().view(torch.uint8).numpy().tobytes()
    assert stored.sha256() == hashlib.sha256(raw).hexdigest()


class Evil:
    """Would leave a file behind if anything unpickled it."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("betrayed", "w")


def save_torchao(path: Path) -> None:
    """Save a model whose weight torchao quantized."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = torch.nn.Linear(32, 32)
    quantize_(model, Int8WeightOnlyConfig())
    torch.save(model.state_dict(), path)


@pytest.fixture
def no_known_classes() -> Iterator[None]:
    """Let torch forget the classes that packages told it of: a user's process knows none."""
    listed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(listed)


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("missing.pt", lambda _: None, "there is no file"),
        ("folder", lambda path: path.mkdir(), "is a folder"),
        ("notes.txt", lambda path: path.write_text("x"), "cannot read .txt files"),
        ("empty.pt", lambda path: path.touch(), "is an empty file"),
        ("empty.npy", lambda path: path.touch(), "is an empty file"),
        ("text.pt", lambda path: path.write_text("hello"), "cannot be read"),
        ("text.safetensors", lambda path: path.write_text("hello"), "is damaged or no .safetensors file"),
        ("text.npy", lambda path: path.write_text("hello"), "cannot be read"),
        ("text.npz", lambda path: path.write_text("hello"), "cannot be read"),
        ("evil.pt", lambda path: torch.save(Evil(), path), "would have to run code (io.open)"),
        ("torchao.pt", save_torchao, "which `qgate checkpoint torchao.pt` reads"),
        ("evil.npy", lambda path: np.save(path, np.array([Evil()])), "cannot be read"),
        ("number.pt", lambda path: torch.save(3.5, path), "holds a float, not a tensor"),
        ("none.pt", lambda path: torch.save({"step": 3}, path), "holds no tensor; it has step: int"),
        ("texts.npy", lambda path: np.save(path, np.array(["a"])), "not numbers"),
        ("none.safetensors", lambda path: save_file({}, path), "holds no tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_files_get_one_line(
    folder: Path, name: str, make: object, words: str, request: pytest.FixtureRequest
) -> None:
    make(folder / name)
    request.getfixturevalue("no_known_classes")
    with pytest.raises(QgateError) as caught:
        list(read_tensors(name))
    assert words in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert not (folder / "betrayed").exists()


@pytest.mark.parametrize("ending", ["pt", "safetensors", "npy", "npz"])
def test_truncated_files(folder: Path, ending: str) -> None:
    path = folder / f"whole.{ending}"
    big = torch.randn(5000)
    if ending == "pt":
        torch.save(big, path)
    elif ending == "safetensors":
        save_file({"x": big}, path)
    elif ending == "npy":
        np.save(path, big.numpy())
    else:
        np.savez(path, x=big.numpy())
    content = path.read_bytes()
    for share in (0.1, 0.5, 0.99):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(QgateError, match=r"cannot be read|would have to run code"):
            list(read_tensors(str(path)))


def test_pickles_that_are_no_torch_files() -> None:
    Path("plain.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(QgateError):
        list(read_tensors("plain.pt"))
    assert not Path("betrayed").exists()


def test_a_name_that_is_not_there_lists_what_is() -> None:
    save_file({f"t{i}": X.clone() for i in range(3)}, "s.safetensors")
    torch.save(X, "bare.pt")
    np.savez("z.npz", a=np.zeros(2))
    for spec, words in (
        ("s.safetensors:t9", "no tensor 't9'; it has t0, t1, t2"),
        ("bare.pt:x", "no tensor 'x'; it holds one tensor without a name"),
        ("z.npz:b", "no tensor 'b'; it has a"),
    ):
        with pytest.raises(QgateError, match=words):
            list(read_tensors(spec))


def test_patterns_expand_in_order_without_repeats(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("b.pt", "a.pt", "deep/er/c.npy", "deep/notes.txt"):
        (folder / name).write_bytes(b"x")
    assert expand(["*.pt", "a.pt"]) == ["a.pt", "b.pt"]
    assert expand(["**/*"]) == ["a.pt", "b.pt", "deep/er/c.npy"]
    assert expand(["missing.pt"]) == ["missing.pt"]
    assert expand(["x*.pt", "b.pt"]) == ["x*.pt", "b.pt"]
    with pytest.raises(QgateError, match=r"matches 'x\*\.pt'"):
        list(read_tensors("x*.pt"))
    (folder / "odd[1].pt").write_bytes(b"x")
    assert expand(["odd[1].pt"]) == ["odd[1].pt"]


def test_a_file_is_asked_once_whether_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []
    real = tensor_files._exists

    def exists(path: Path) -> bool:
        paths.append(str(path))
        return real(path)

    monkeypatch.setattr(tensor_files, "_exists", exists)
    torch.save(X, "x.pt")
    assert names("x.pt") == [("x", None, [3, 4])]
    assert paths == ["x.pt"]
    for spec in ("missing.pt", "missing-*.pt"):
        with pytest.raises(QgateError, match=r"there is no file|no \.pt"):
            tensor_files.check_file(spec)
        with pytest.raises(QgateError, match=r"there is no file|no \.pt"):
            names(spec)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_tensor_of_very_many_dimensions_is_refused(ending: str, tmp_path: Path) -> None:
    tensor = torch.ones([1] * 65)
    path = tmp_path / f"t.{ending}"
    save_file({"x": tensor}, path) if ending == "safetensors" else torch.save({"x": tensor}, path)
    with pytest.raises(QgateError, match="'x' has 65 dimensions, and 64 are read"):
        list(read_tensors(str(path)))
