"""Safetensors files of a checkpoint: the heads of all shards, and single tensors of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.tensor_types import DTYPES
from qgate.checkpoints.torchao_weights import CONFIGURATION, TorchaoEntry, torchao_entries
from qgate.checkpoints.wrong_files import (
    SHARDS_OF_TWO,
    by_name,
    check_not_pointer,
    check_shards,
    cut_off,
    reading,
)
from qgate.errors import QgateError, first_line
from qgate.records.validating import validate
from qgate.storage.folders import FileRanges, Folder
from qgate.storage.safetensors_heads import Head, NoHeadError, TensorHead, read_head
from qgate.text import one_line

FIRST = 1 << 16


def open_shards(label: str, folder: Folder, names: list[str]) -> Checkpoint:
    """Open safetensors files of one folder as one checkpoint."""
    if len(names) > 1:
        check_shards(label, names)
    torchao: dict[str, TorchaoEntry] = {}
    listed = chain.from_iterable(_entries(folder, name, torchao) for name in names)
    entries = by_name(label, listed, SHARDS_OF_TWO)
    shards = CheckpointShards(folder)
    configuration: dict[str, object] = {CONFIGURATION: torchao} if torchao else {}
    return Checkpoint(label, entries, shards, configuration, span_reader=shards.span)


class CheckpointShards:
    """Reads elements of tensors by their bytes."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._ranges = folder, FileRanges(folder)

    def __call__(self, entry: StoredEntry) -> Tensor:
        return self.span(entry, 0, math.prod(entry.shape)).reshape(entry.shape)

    def span(self, entry: StoredEntry, first: int, last: int) -> Tensor:
        """Read the elements of a tensor from one number to another, as one row."""
        try:
            start, size, dtype = self.extent(entry, first, last)
            data = self._bytes(entry.file, start, size)
        except (ValueError, OSError, RuntimeError) as error:
            raise QgateError(
                f"{str(self._folder.at(entry.file))!r}: tensor {entry.name!r} cannot be read: "
                f"{first_line(error)}."
            ) from None
        return data.view(dtype)

    def extent(self, entry: StoredEntry, first: int, last: int) -> tuple[int, int, torch.dtype]:
        """Return the byte at which elements begin, their bytes, and what they are."""
        assert entry.offset is not None
        dtype = _dtype_of(entry)
        return entry.offset + first * dtype.itemsize, (last - first) * dtype.itemsize, dtype

    def _bytes(self, file: str, start: int, size: int) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        count = self._ranges.read_into(data.numpy().data, file, start)
        if count < size:
            raise ValueError(f"the file ends {size - count:,} bytes too early")
        return data


def _dtype_of(entry: StoredEntry) -> torch.dtype:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"its dtype is {entry.dtype!r}, and {', '.join(DTYPES)} can be read")
    size = math.prod(entry.shape) * dtype.itemsize
    if size != entry.size:
        raise ValueError(
            f"it has {entry.size:,} bytes, and {entry.dtype} of shape {entry.shape} has {size:,}"
        )
    return dtype


def _entries(folder: Folder, name: str, torchao: dict[str, TorchaoEntry]) -> Iterator[StoredEntry]:
    """Read the head of one shard, and check that the file is as long as it says."""
    path = str(folder.at(name))
    stamp = folder.stamp(name)
    head = _head(folder, name, path)
    torchao |= torchao_entries(head.metadata, path)
    end = head.start
    for key in head.entries:
        try:
            entry = head.entries[key]
            validate(entry, TensorHead)
        except ValueError as error:
            raise QgateError(
                f"{path!r} is damaged: its head describes {one_line(key)!r} wrongly ({error})."
            ) from None
        first, last = entry["data_offsets"]
        end = max(end, head.start + last)
        offset = head.start + first
        dtype, shape = sys.intern(entry["dtype"]), tuple(entry["shape"])
        yield StoredEntry(key, name, dtype, shape, last - first, offset)
    if stamp is not None and stamp.size < end:
        raise cut_off(path, stamp.size, end)


def _head(folder: Folder, name: str, path: str) -> Head:
    try:
        with reading(path):
            return read_head(partial(folder.read, name), FIRST)
    except QgateError as error:
        raise QgateError(f"{path!r}: {error}") from None
    except (NoHeadError, ValueError, AttributeError, RecursionError):
        check_not_pointer(folder, name)
        raise QgateError(f"{path!r} is damaged or no .safetensors file.") from None
