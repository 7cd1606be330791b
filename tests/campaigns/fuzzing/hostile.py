"""Files that somebody made on purpose: what is small and becomes large, what would run, what leads out.

Each entry is the name of a target and what is done to its folder of good files; all of them have to
be refused with an error of the house, unless they are in READ: those are read, within bounds.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.campaigns.fuzzing.text_targets import _zstd

Change = Callable[[Path], object]
DEEP = "[" * 100_000 + "]" * 100_000
SIZE = 1 << 28


class Runs:
    """Leaves a canary where it is unpickled."""

    def __init__(self, function: Any = os.system, *given: object) -> None:
        self.function, self.given = function, given or ("touch canary",)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.given


def text(name: str, content: str | bytes) -> Change:
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def field(name: str, **given: Any) -> Change:
    """Fields of the first line of JSON in a file set to something else."""

    def change(folder: Path) -> None:
        first, _, body = (folder / name).read_text().partition("\n") if name.endswith("l") else (
            (folder / name).read_text(), "", "")  # fmt: skip
        (folder / name).write_text(
            json.dumps(json.loads(first) | given) + ("\n" + body if body else "")
        )

    return change


def _only(folder: Path, name: str) -> Path:
    for path in folder.iterdir():
        path.unlink()
    return folder / name


def saved(name: str, content: Any, **how: Any) -> Change:
    return lambda folder: torch.save(content, _only(folder, name), **how)


def pickled(name: str, content: Any) -> Change:
    return lambda folder: _only(folder, name).write_bytes(pickle.dumps(content))


# What is small and becomes large -----------------------------------------------------------------


def _header(shape: str, descr: str = "<f4") -> bytes:
    text = (
        f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117)
        + b"\n"
    )
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def npz_of_zeros(folder: Path) -> None:
    """A file of zeros, deflated to nearly nothing."""
    with (
        zipfile.ZipFile(
            _only(folder, "t.npz"), "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as archive,
        archive.open("w.npy", "w", force_zip64=True) as part,
    ):
        part.write(_header(f"({SIZE // 4},)"))
        for _ in range(SIZE >> 24):
            part.write(bytes(1 << 24))


def npz_that_lies(folder: Path) -> None:
    with zipfile.ZipFile(_only(folder, "t.npz"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", _header("(1000000000,)") + bytes(64))


def expanded(folder: Path) -> None:
    """Four bytes on disk, a gigabyte once they are laid out."""
    torch.save(torch.zeros(1).expand(1 << 28), _only(folder, "t.pt"))


def overlapping(folder: Path) -> None:
    x = torch.zeros(1 << 16)
    torch.save(torch.as_strided(x, (1 << 14, 1 << 14), (1, 1)), _only(folder, "t.pt"))


def beyond_storage(folder: Path) -> None:
    """A tensor of more elements than its storage has: it would be laid over what the memory holds."""
    buffer = io.BytesIO()
    torch.save(torch.arange(16.0), buffer)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(_only(folder, "t.pt"), "w") as changed:
        for entry in archive.infolist():
            content = archive.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert b"K\x10\x85" in content
                content = content.replace(b"K\x10\x85", b"J\x00\x00\x00\x40\x85")
            changed.writestr(entry.filename, content)


def deflated(folder: Path) -> None:
    """The storage compressed inside of the archive, a thousand times smaller."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(SIZE, dtype=torch.uint8), buffer)
    with (
        zipfile.ZipFile(buffer) as archive,
        zipfile.ZipFile(_only(folder, "t.pt"), "w", zipfile.ZIP_DEFLATED) as changed,
    ):
        for entry in archive.infolist():
            changed.writestr(entry.filename, archive.read(entry))


def many_names(folder: Path) -> None:
    """Lists of one list ten times over, ten deep: ten billion names of one tensor."""
    inner: list[Any] = [torch.zeros(1)]
    for _ in range(10):
        inner = [inner] * 10
    torch.save({"x": inner}, _only(folder, "t.pt"))


def endless(folder: Path) -> None:
    inner: list[Any] = [torch.zeros(1)]
    inner.append(inner)
    torch.save(inner, _only(folder, "t.pt"))


def nested(folder: Path) -> None:
    inner: Any = torch.zeros(1)
    for _ in range(300):
        inner = {"x": inner}
    torch.save(inner, _only(folder, "t.pt"))


def room(folder: Path) -> None:
    """A pickle that asks for eight gigabytes of zeros and nothing else."""
    _only(folder, "t.pt").write_bytes(b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R.")


def sparse(folder: Path) -> None:
    torch.save(
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (1 << 40,)),
        _only(folder, "t.pt"),
    )


def not_there(folder: Path) -> None:
    torch.save(torch.empty(1 << 40, device="meta"), _only(folder, "t.pt"))


def compressed(name: str, pack: Callable[[bytes], bytes], size: int = SIZE) -> Change:
    def change(folder: Path) -> None:
        _only(folder, name).write_bytes(pack(b"x" * (size >> 3)) * 8)

    return change


def many_cells(folder: Path) -> None:
    """One text of a megabyte, four thousand times, as a dictionary writes it."""
    import pyarrow
    import pyarrow.parquet

    cells = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 4000, pyarrow.int32()), ["x" * (1 << 20)]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": cells}), _only(folder, "d.parquet"))


def many_rows(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    cells = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(100_000_000, np.int8)), ["x"]
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": cells}), _only(folder, "d.parquet"), row_group_size=1 << 28
    )


def candidates_of_spaces(folder: Path) -> None:
    (zip_path,) = (folder / "c.zip",)
    with zipfile.ZipFile(zip_path) as archive:
        (entry,) = archive.infolist()
        content = archive.read(entry)
    with zipfile.ZipFile(zip_path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(12):
            archive.writestr(f"candidates/{number}.json", content + b" " * (15 << 20))


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new}\n  <<: [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
BLOW_UPS: dict[str, tuple[str, Change]] = {
    "npz of zeros": ("tensors .npz", npz_of_zeros),
    "npz of zeros by a url": ("url .npz", npz_of_zeros),
    "npz of zeros as counts": ("counts", lambda f: (npz_of_zeros(f), (f / "t.npz").rename(f / "c.npz"))),
    "npz that lies": ("tensors .npz", npz_that_lies),
    "npy that lies": ("tensors .npy", text("t.npy", _header("(1000000000000,)") + bytes(64))),
    "npy that lies by a url": ("url .npy", text("t.npy", _header("(1000000000000,)") + bytes(64))),
    "npy of rows that lies": ("token rows .npy", text("i.npy", _header("(1000000000,)", "<i8") + bytes(64))),
    "npy of endless text": ("tensors .npy", text("t.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + b"{" * 9999)),
    "expanded tensor": ("tensors .pt", expanded),
    "expanded rows of ids": ("token rows .pt", saved("i.pt", torch.zeros(1, dtype=torch.int64).expand(1 << 27))),
    "expanded weight": ("mamba checkpoint .bin", lambda f: torch.save(
        {"backbone.embeddings.weight": torch.zeros(1).expand(1 << 30)}, f / "pytorch_model.bin")),
    "overlapping tensor": ("tensors .pt", overlapping),
    "beyond its storage": ("tensors .pt", beyond_storage),
    "deflated storage": ("tensors .pt", deflated),
    "many names": ("tensors .pt", many_names),
    "endless list": ("tensors .pt", endless),
    "many rows of ids": ("token rows .pt", lambda f: (many_names(f), (f / "t.pt").rename(f / "i.pt"))),
    "endless rows of ids": ("token rows .pt", lambda f: (endless(f), (f / "t.pt").rename(f / "i.pt"))),
    "room for zeros": ("tensors .pt", room),
    "sparse tensor": ("tensors .pt", sparse),
    "tensor without values": ("tensors .pt", not_there),
    "gz": ("samples .jsonl.gz", compressed("d.jsonl.gz", gzip.compress)),
    "bz2": ("samples .jsonl.bz2", compressed("d.jsonl.bz2", bz2.compress)),
    "xz": ("samples .csv.xz", compressed("d.csv.xz", lzma.compress)),
    "zst": ("samples .txt.zst", compressed("d.txt.zst", _zstd)),
    "parquet of many rows": ("samples .parquet", many_rows),
    "candidates of spaces": ("candidates, zipped", candidates_of_spaces),
    "yaml of aliases": ("settings .yaml", text("c.yaml", LAUGHS)),
    "yaml of aliases as a value": ("settings .yaml", text("c.yaml", LAUGHS + "model:\n  name: *l\n")),
    "yaml of merges": ("settings .yaml", text("c.yaml", MERGES + "model: *i\n")),
    "yaml of itself": ("settings .yaml", text("c.yaml", "model: &a\n  name: *a\n")),
    "yaml, deep": ("settings .yaml", text("c.yaml", "model: " + DEEP)),
    "toml, deep": ("settings .toml", text("c.toml", f"x = {DEEP}")),
    "toml of dots": ("settings .toml", text("c.toml", ".".join("a" * 50_000) + " = 1")),
    "qgate.toml, deep": ("qgate.toml", text("qgate.toml", f"x = {DEEP}")),
    "qgate.toml of dots": ("qgate.toml", text("qgate.toml", ".".join("a" * 50_000) + " = 1")),
    "pyproject.toml, deep": ("repository to start in", text("pyproject.toml", f"x = {DEEP}")),
    "calibration, deep": ("calibration", text("c.json", DEEP)),
    "captured, deep": ("captured layers", text("mode_fp32_stats.json", DEEP)),
    "results, deep": ("results", text("results.jsonl", DEEP + "\n")),
    "analysis, deep": ("analysis of a dump", text("analysis.json", DEEP)),
    "activations, deep": ("record of activations", text("activations.json", DEEP)),
    "dump, deep": ("dump", text("dump.json", DEEP)),
    "config, deep": ("mamba checkpoint", text("config.json", DEEP)),
    "config for transformers, deep": ("transformers checkpoint", text("config.json", DEEP)),
    "samples, deep": ("samples .json", text("d.json", DEEP)),
    "sample, deep": ("samples .jsonl", text("d.jsonl", '{"text": ' + DEEP + "}")),
    "dump of all ranks": ("dump", field("dump.json", world_size=10**12)),
    "shards of all jobs": ("results merged", field("a/results.jsonl", shard={"number": 1, "of": 10**12, "complete": True})),
    "checkpoint of many layers": ("mamba checkpoint", field("config.json", n_layer=10**9)),
    "checkpoint of wide layers": ("mamba checkpoint", field("config.json", d_model=10**9)),
    "transformers, many layers": ("transformers checkpoint", field("config.json", num_hidden_layers=10**9)),
    "transformers, wide layers": ("transformers checkpoint", field("config.json", hidden_size=2**16)),
    "transformers, many words": ("transformers checkpoint", field("config.json", vocab_size=2**28)),
    "safetensors, long head": ("tensors .safetensors", text("t.safetensors", struct.pack("<Q", 2**40) + b"{}")),
    "safetensors, long head by a url": ("url .safetensors", text("t.safetensors", struct.pack("<Q", 2**26) + b"{}")),
}  # fmt: skip

# What would run ----------------------------------------------------------------------------------

AUTO = {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.Config",
        "AutoModelForCausalLM": "own.Model", "AutoModel": "own.Model"}}  # fmt: skip
CODE = "from pathlib import Path\nPath('canary').touch()\nclass Config: pass\nclass Model: pass\n"


def own_code(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(AUTO))
    for name in ("own.py", "conftest.py", "qgate_model.py", "setup.py", "__init__.py"):
        (folder / name).write_text(CODE)


def own_tokenizer(folder: Path) -> None:
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE.replace("Model", "Own"))
    (folder / "tokenizer.json").unlink()


def own_script(folder: Path) -> None:
    """A data set that is loaded by a script of the name of its folder."""
    for path in sorted((folder / "set").iterdir()):
        path.unlink()
    (folder / "set" / "set.py").write_text(CODE)


_EVAL = Runs(eval, "__import__('os').system('touch canary')")
RUNS: dict[str, tuple[str, Change]] = {
    "pt": ("tensors .pt", saved("t.pt", {"w": torch.zeros(2), "x": Runs()})),
    "pt, old form": ("tensors .pt", saved("t.pt", Runs(), _use_new_zipfile_serialization=False)),
    "pt, eval": ("tensors .pt", saved("t.pt", _EVAL)),
    "pickle called pt": ("tensors .pt", pickled("t.pt", Runs())),
    "pickle called npy": ("tensors .npy", pickled("t.npy", Runs())),
    "objects in npy": ("tensors .npy", lambda f: np.save(f / "t.npy", np.array([Runs()], dtype=object))),
    "objects in npz": ("tensors .npz", lambda f: np.savez(f / "t.npz", w=np.array([Runs()], dtype=object))),
    "objects in counts": ("counts", lambda f: np.savez(f / "c.npz", qgate=np.array([Runs()], dtype=object))),
    "pt by a url": ("url .pt", saved("t.pt", Runs())),
    "objects in npy by a url": ("url .npy", lambda f: np.save(f / "t.npy", np.array([Runs()], dtype=object))),
    "rows of ids": ("token rows .pt", saved("i.pt", [Runs()])),
    "ids in npy": ("token rows .npy", lambda f: np.save(f / "i.npy", np.array([Runs()], dtype=object))),
    "weights": ("mamba checkpoint .bin", lambda f: torch.save({"w": Runs()}, f / "pytorch_model.bin")),
    "weights for transformers": ("transformers checkpoint", lambda f: (
        (f / "model.safetensors").unlink(), torch.save({"w": Runs()}, f / "pytorch_model.bin"))),
    "code of a checkpoint": ("transformers checkpoint", own_code),
    "code of a tokenizer": ("tokenizer", own_tokenizer),
    "script of a data set": ("samples of datasets", own_script),
    "yaml tag": ("settings .yaml", text("c.yaml", "model: !!python/object/apply:os.system ['touch canary']\n")),
    "yaml tag in a list": ("list", text("0.txt", "[!!python/object/apply:os.system ['touch canary']]")),
    "npy header": ("tensors .npy", text("t.npy", _header("(__import__('os').system('touch canary'),)") + bytes(64))),
}  # fmt: skip
# Names in which nothing is refused: what would run is only text there, or is passed over with a note.
READ = {"yaml tag in a list"}

# What leads out ----------------------------------------------------------------------------------


def _secret(folder: Path) -> Path:
    """A good shard that is not of this dump, beside its folder."""
    outside = folder.parent / "outside" / "tensors-000000.safetensors"
    outside.write_bytes((folder / "rank00000" / "tensors-000000.safetensors").read_bytes())
    return outside


def placed(place: str) -> Change:
    """The index names a file somewhere else."""

    def change(folder: Path) -> None:
        _secret(folder)
        index = folder / "rank00000" / "index.jsonl"
        target = place.replace("OUTSIDE", str(folder.parent / "outside"))
        index.write_text(index.read_text().replace("tensors-000000.safetensors", target))

    return change


def linked(name: str, *, whole: bool = False) -> Change:
    """A file, or a folder, that is a link out of the dump."""

    def change(folder: Path) -> None:
        path, outside = folder / name, folder.parent / "outside"
        if whole:
            path.rename(outside / path.name)
        else:
            (outside / path.name).write_bytes(path.read_bytes())
            path.unlink()
        path.symlink_to(outside / path.name)

    return change


OUT: dict[str, tuple[str, Change]] = {
    "index with dots": ("dump", placed("../../outside/tensors-000000.safetensors")),
    "index with a root": ("dump", placed("OUTSIDE/tensors-000000.safetensors")),
    "linked shard": ("dump", linked("rank00000/tensors-000000.safetensors")),
    "weights with dots": ("mamba checkpoint", lambda f: (f / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"backbone.embeddings.weight": "../outside/model.safetensors"}}))),
    "weights with dots for transformers": ("transformers checkpoint", lambda f: (
        (f / "model.safetensors").rename(f.parent / "outside" / "m.safetensors"),
        (f / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {
            "model.norm.weight": "../outside/m.safetensors"}})))),
    "reference with dots": ("baseline", field("tiny/manifest.json", references={"plain": {
        "file": "../../outside/reference-plain.safetensors", "tensors": []}})),
    "update with dots": ("baseline, update cut off", lambda f: (f / "tiny" / ".update").write_bytes(
        _sealed({"../../outside/secret": "0" * 64}))),
    "captured with dots": ("captured layers", lambda f: (f / "mode_fp32_stats.json").write_text(
        (f / "mode_fp32_stats.json").read_text().replace("mode_fp32_layer_0.npy", "../outside/x.npy"))),
    }  # fmt: skip


def _sealed(files: dict[str, str | None]) -> bytes:
    from qgate.storage.updates import VERSION, seal

    entries = {name: sha256 and [6, sha256] for name, sha256 in files.items()}
    record = {"version": VERSION, "files": entries, "sha256": seal(VERSION, entries)}
    return json.dumps(record).encode() + b"\nsecret"
