"""Torch files as checkpoints: state dicts in one file or in shards, read weights-only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from qgate.archives import flatten, load_torch
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.tensor_types import WORDS
from qgate.checkpoints.wrong_files import (
    SHARDS_OF_TWO,
    by_name,
    check_not_pointer,
    check_shards,
    file_size,
    reading,
)
from qgate.errors import QgateError, first_line
from qgate.interruptions import raise_interruption
from qgate.storage.tensor_reading import torch_source
from qgate.text import one_line

if TYPE_CHECKING:
    from qgate.storage.folders import Folder

STATES = ("state_dict", "model_state_dict", "model", "module", "state")
"""Keys under which training programs put the weights."""
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""How files begin that lie beside weights and are none."""


def open_torch(label: str, folder: Folder, names: list[str]) -> Checkpoint:
    """Open torch files of one folder as one checkpoint."""
    if len(names) > 1:
        names = [name for name in names if not name.startswith(NO_WEIGHTS)] or names
        check_shards(label, names)
    shards = TorchShards(folder)
    listed = (
        _entry(file, name, tensor)
        for file in names
        for name, tensor in shards.tensors(file).items()
    )
    entries = by_name(label, listed, SHARDS_OF_TWO)
    return Checkpoint(label, entries, shards, span_reader=shards.span)


def _entry(file: str, name: str, tensor: Tensor) -> StoredEntry:
    size = tensor.numel() * tensor.element_size()
    stored = WORDS.get(tensor.dtype, str(tensor.dtype))
    offset = int(tensor.storage_offset()) * tensor.element_size()
    begin = offset if tensor.is_contiguous() else None
    return StoredEntry(name, file, stored, tuple(tensor.shape), size, begin)


class TorchShards:
    """Reads tensors of torch files; the file that was read last stays open."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._open: tuple[str, dict[str, Tensor]] | None = None

    def __call__(self, entry: StoredEntry) -> Tensor:
        return self.tensors(entry.file)[entry.name]

    def span(self, entry: StoredEntry, first: int, last: int) -> Tensor:
        """Return the elements of a tensor from one number to another, as one row."""
        return self(entry).reshape(-1)[first:last]

    def tensors(self, file: str) -> dict[str, Tensor]:
        """Return the tensors of a file by name; those of a file on this machine are mapped."""
        if self._open is None or self._open[0] != file:
            self._open = file, _tensors(self._folder, file)
        return self._open[1]


def _tensors(folder: Folder, file: str) -> dict[str, Tensor]:
    path = str(folder.at(file))
    with reading(path):
        file_size(folder, file)
        check_not_pointer(folder, file)
        try:
            loaded = load_torch(torch_source(folder, file), repr(path), dense=True)
        except (QgateError, PermissionError):
            raise
        except Exception as error:
            raise_interruption()
            raise _unreadable(path, error) from None
    listed = flatten(_state(loaded), repr(path))
    tensors = {str(name): value for name, value in listed if isinstance(value, Tensor)}
    if not tensors:
        raise QgateError(f"{path!r} holds no tensors by name; save the model's state_dict().")
    return tensors


def _state(loaded: object) -> object:
    """Return the state dict in what was saved."""
    if not isinstance(loaded, Mapping):
        return loaded
    states = (loaded[key] for key in STATES if isinstance(loaded.get(key), Mapping))
    return next(states, loaded)


def _unreadable(path: str, error: Exception) -> QgateError:
    if type(error).__name__ == "UnpicklingError":
        return QgateError(
            f"{path!r} is no torch file, or holds more than tensors and would have to run code to "
            "be read; that is refused. Save the model's state_dict()."
        )
    return QgateError(
        f"{path!r} is damaged, cut off or no torch file: {one_line(first_line(error))}."
    )
