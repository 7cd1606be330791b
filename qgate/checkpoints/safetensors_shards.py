"""Safetensors files of a checkpoint: the heads of all shards, and single tensors of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypedDict

from safetensors import SafetensorError

from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.wrong_files import check_not_pointer, check_shards, cut_off, reading
from qgate.errors import QgateError, first_line
from qgate.records.validating import Meta, validate
from qgate.storage.folders import Folder
from qgate.storage.safetensors_heads import Head, NoHeadError, read_head
from qgate.storage.tensor_reading import TensorFile, open_tensors
from qgate.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

FIRST = 1 << 16
Length = Annotated[int, Meta(ge=0)]


class HeadEntry(TypedDict):
    """A tensor as the head of a safetensors file describes it."""

    dtype: str
    shape: list[Length]
    data_offsets: Annotated[list[Length], Meta(min_length=2, max_length=2)]


def open_shards(label: str, folder: Folder, names: list[str]) -> Checkpoint:
    """Open safetensors files of one folder as one checkpoint."""
    if len(names) > 1:
        check_shards(label, names)
    entries: dict[str, StoredEntry] = {}
    for name in names:
        for entry in _entries(folder, name):
            if entry.name in entries:
                raise QgateError(
                    f"{label!r}: {entry.name!r} is in {entries[entry.name].file!r} and in "
                    f"{name!r}: shards of two exports lie in one folder. Remove those of one."
                )
            entries[entry.name] = entry
    return Checkpoint(label, entries, CheckpointShards(folder))


class CheckpointShards:
    """Reads tensors of shards; the file that was read last stays open."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._open: tuple[str, TensorFile] | None = None

    def __call__(self, entry: StoredEntry) -> Tensor:
        try:
            if self._open is None or self._open[0] != entry.file:
                self._open = (entry.file, open_tensors(self._folder, entry.file, FIRST))
            return self._open[1].get_tensor(entry.name)
        except (SafetensorError, ValueError, OSError, RuntimeError) as error:
            raise QgateError(
                f"{str(self._folder.at(entry.file))!r}: tensor {entry.name!r} cannot be read: "
                f"{first_line(error)}."
            ) from None


def _entries(folder: Folder, name: str) -> Iterator[StoredEntry]:
    """Read the head of one shard, and check that the file is as long as it says."""
    path = str(folder.at(name))
    stamp = folder.stamp(name)
    head = _head(folder, name, path)
    end = head.start
    for key, entry in head.entries.items():
        try:
            validate(entry, HeadEntry)
        except ValueError as error:
            raise QgateError(
                f"{path!r} is damaged: its head describes {one_line(key)!r} wrongly ({error})."
            ) from None
        first, last = entry["data_offsets"]
        end = max(end, head.start + last)
        yield StoredEntry(key, name, entry["dtype"], tuple(entry["shape"]), last - first)
    if stamp is not None and stamp.size < end:
        raise cut_off(path, stamp.size, end)


def _head(folder: Folder, name: str, path: str) -> Head:
    try:
        with reading(path):
            return read_head(lambda start, stop: folder.read(name, start, stop), FIRST)
    except (NoHeadError, ValueError, AttributeError, RecursionError):
        check_not_pointer(folder, name)
        raise QgateError(f"{path!r} is damaged or no .safetensors file.") from None
