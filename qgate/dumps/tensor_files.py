"""Tensors from `.pt`, `.safetensors`, `.npy` and `.npz` files, memory-mapped where they can be.

Nothing is unpickled: torch files are read weights-only, numpy files without objects.
"""

from __future__ import annotations

import glob
import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError, first_line
from qgate.interruptions import raise_interruption
from qgate.storage import locations
from qgate.storage.archives import (
    check_archive,
    check_dimensions,
    flatten,
    is_dense,
    not_dense,
)
from qgate.storage.foreign import MOST_NAMES, foreign_size, open_foreign
from qgate.storage.tensor_reading import (
    open_safetensors,
    read_npy,
    read_torch,
    safetensors_entries,
    safetensors_head,
)

if TYPE_CHECKING:
    from qgate.storage.locations import Location

_HASHED_AT_ONCE = 2**24


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its file; `name` is short, and `key` its name inside the file."""

    path: Location
    key: str | None
    tensor: Tensor

    @property
    def name(self) -> str:
        """The file's name without its ending, and the key in files of several tensors."""
        return self.path.stem if self.key is None else f"{self.path.stem}.{self.key}"

    def sha256(self) -> str:
        """Hash the tensor's bytes, independent of the file format."""
        if not is_dense(self.tensor):
            raise not_dense(self.tensor, f"{str(self.path)!r}: {self.name!r}")
        digest = hashlib.sha256()
        row = self.tensor.detach().contiguous().reshape(-1)
        # Of a single element any stride is contiguous, also one that no bytes can be seen through.
        data = row.as_strided((row.numel(),), (1,)).view(torch.uint8)
        for start in range(0, len(data), _HASHED_AT_ONCE):
            digest.update(data[start : start + _HASHED_AT_ONCE].numpy().tobytes())
        return digest.hexdigest()


def expand(specs: list[str]) -> list[str]:
    """Expand names with wildcards into files, in order, each once.

    A pattern without a match stays as it is, and is an error when it is read.
    """
    names: list[str] = []
    for spec in specs:
        if not locations.is_pattern(spec):
            names.append(spec)
            continue
        try:
            matches = locations.matching_names(spec)
        except (PermissionError, QgateError):
            raise
        except Exception as error:
            raise QgateError(f"{spec!r} cannot be searched: {first_line(error)}.") from None
        names += [name for name in matches if Path(name).suffix.lower() in READERS] or [spec]
    return list(dict.fromkeys(names))


def check_file(spec: str) -> None:
    """Refuse a name that no file has, and one that is not of a file of tensors."""
    _reader_of(spec)


def _reader_of(spec: str) -> Callable[[Location, str | None], Iterator[StoredTensor]]:
    """Return the reader of a file that exists by the end of its name; a folder has none."""
    path, _ = split_spec(spec)
    if not _exists(path):
        if glob.has_magic(spec):
            raise QgateError(f"no {_endings()} file matches {spec!r}.")
        raise QgateError(f"there is no file {spec!r}; check the spelling.")
    with locations.read_errors(path, PermissionError):
        is_folder = path.is_dir()
    if is_folder:
        raise QgateError(f"{spec!r} is a folder; name its files, as in '{path}/**/*.safetensors'.")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise QgateError(
            f"{spec!r}: cannot read {path.suffix or 'this'} files; {_endings()} can be."
        )
    return reader


def read_tensors(spec: str) -> Iterator[StoredTensor]:
    """Read the tensors of a file; `FILE:NAME` reads the one of that name."""
    path, key = split_spec(spec)
    reader = _reader_of(spec)
    if foreign_size(path, "tensors") == 0:
        raise QgateError(f"{spec!r} is an empty file.")
    try:
        yield from reader(path, key)
    except (QgateError, GeneratorExit, PermissionError):
        raise
    except Exception as error:
        raise_interruption()
        if type(error).__name__ == "UnpicklingError":
            raise _refused(spec, path, str(error)) from None
        text = first_line(error)
        detail = f" ({text})" if len(text) > 8 else ""
        raise QgateError(
            f"{spec!r} cannot be read; it is damaged or no {path.suffix} file{detail}."
        ) from None


def _refused(spec: str, path: Location, error: str) -> QgateError:
    """Return the error for a torch file that holds a class, of which torch names the first."""
    named = re.search(r"Unsupported global: GLOBAL ([\w.]{1,80})", error)
    if named and named[1].startswith("torchao."):
        return QgateError(
            f"{spec!r} holds weights that torchao quantized ({named[1]}), which `qgate checkpoint "
            f"{path}` reads. Give the tensors that they were made from."
        )
    return QgateError(
        f"{spec!r} holds more than tensors, or is no .pt file, and would have to run code"
        f"{f' ({named[1]})' if named else ''} to be read; that is refused. Save the tensor alone."
    )


def floats_in(spec: str) -> dict[str, int]:
    """Return names and bytes of a file's floating point tensors, if its head has them.

    A damaged file has none here; reading it raises the error.
    """
    try:
        path, key = split_spec(spec)
        if key is not None or path.suffix.lower() != ".safetensors":
            return {}
        sizes: dict[str, int] = {}
        for name, entry in safetensors_entries(path).items():
            start, end = entry["data_offsets"]
            if entry["dtype"].startswith(("F", "BF")):
                sizes[name] = end - start
        return sizes
    except Exception:
        return {}


def _exists(path: Location) -> bool:
    """Tell whether a file exists; a store that refuses access raises its own error."""
    with locations.read_errors(path, PermissionError):
        return path.exists()


def split_spec(spec: str) -> tuple[Location, str | None]:
    """Split `FILE:NAME` into the file and the name of one tensor; the name may be missing."""
    return locations.split_spec(spec, READERS)


def _read_torch(path: Location, key: str | None) -> Iterator[StoredTensor]:
    loaded = read_torch(path)
    if isinstance(loaded, Tensor):
        yield from _pick(path, None, {"": loaded}, key)
    elif isinstance(loaded, Mapping) and isinstance(loaded.get("tensor"), Tensor) and key is None:
        yield StoredTensor(path, None, loaded["tensor"])
    elif isinstance(loaded, Mapping | list | tuple):
        yield from _pick(path, str(path), dict(flatten(loaded, repr(str(path)))), key)
    else:
        raise QgateError(f"{str(path)!r} holds a {type(loaded).__name__}, not a tensor.")


def _read_safetensors(path: Location, key: str | None) -> Iterator[StoredTensor]:
    head = safetensors_head(path)  # first: it may list more tensors than are opened
    with open_safetensors(path, head) as file:
        for name in _chosen(path, key, list(file.keys())):
            check_dimensions(len(head.entries[name]["shape"]), f"{str(path)!r}: {name[:80]!r}")
            yield StoredTensor(path, name, file.get_tensor(name))


def _chosen(path: Location, key: str | None, names: list[str]) -> list[str]:
    if key is not None and key not in names:
        raise _no_such(path, key, names)
    if not names:
        raise QgateError(f"{str(path)!r} holds no tensor.")
    if len(names) > MOST_NAMES:
        raise QgateError(f"{str(path)!r} holds {len(names)} tensors, and {MOST_NAMES} are read.")
    return names if key is None else [key]


def _read_npy(path: Location, key: str | None) -> Iterator[StoredTensor]:
    yield from _pick(path, None, {"": _from_numpy(path, read_npy(path))}, key)


def _read_npz(path: Location, key: str | None) -> Iterator[StoredTensor]:
    with open_foreign(path, "tensors", None) as file:
        check_archive(file, repr(str(path)))
        archive = np.load(file, allow_pickle=False)
        for name in _chosen(path, key, list(archive.keys())):
            yield StoredTensor(path, name, _from_numpy(path, archive[name]))


def _from_numpy(path: Location, array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise QgateError(f"{str(path)!r} holds a numpy array of {array.dtype}, not numbers.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _pick(
    path: Location, several: str | None, entries: Mapping[str, object], key: str | None
) -> Iterator[StoredTensor]:
    """Return all tensors among the entries, or the one of a key; never silently the first."""
    if key is not None and key not in entries:
        raise _no_such(path, key, list(entries) if several else [])
    tensors = {k: v for k, v in entries.items() if isinstance(v, Tensor)}
    if key is not None:
        if key not in tensors:
            kind = type(entries[key]).__name__
            raise QgateError(f"{key!r} in {str(path)!r} is no tensor but of type {kind}.")
        tensors = {key: tensors[key]}
    if not tensors:
        kinds = ", ".join(f"{k}: {type(v).__name__}" for k, v in list(entries.items())[:8])
        raise QgateError(f"{str(path)!r} holds no tensor; it has {kinds or 'nothing'}.")
    for name, tensor in tensors.items():
        yield StoredTensor(path, name or None, tensor)


def _no_such(path: Location, key: str, names: list[str]) -> QgateError:
    listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    content = f"it has {listed}" if names else "it holds one tensor without a name"
    return QgateError(f"{str(path)!r} has no tensor {key!r}; {content}.")


def _endings() -> str:
    return ", ".join(READERS)


READERS: dict[str, Callable[[Location, str | None], Iterator[StoredTensor]]] = {
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".safetensors": _read_safetensors,
    ".npy": _read_npy,
    ".npz": _read_npz,
}
