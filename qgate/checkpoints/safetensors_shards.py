"""Safetensors files of a checkpoint: the heads of all shards, and single tensors of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, TypedDict

import torch
from torch import Tensor

from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.torchao_weights import CONFIGURATION, TorchaoEntry, torchao_entries
from qgate.errors import QgateError, first_line
from qgate.records.validating import Meta, validate
from qgate.storage.folders import Folder
from qgate.storage.ranges import FileRanges
from qgate.storage.safetensors_heads import Head, NoHeadError, read_head
from qgate.text import one_line

FIRST = 1 << 16
POINTER = b"version https://git-lfs"
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
Length = Annotated[int, Meta(ge=0)]
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""Dtypes whose elements can be read, by their names in heads."""


class HeadEntry(TypedDict):
    """A tensor as the head of a safetensors file describes it."""

    dtype: str
    shape: list[Length]
    data_offsets: Annotated[list[Length], Meta(min_length=2, max_length=2)]


def open_shards(label: str, folder: Folder, names: list[str]) -> Checkpoint:
    """Open safetensors files of one folder as one checkpoint."""
    if len(names) > 1:
        _check_shards(label, names)
    entries: dict[str, StoredEntry] = {}
    torchao: dict[str, TorchaoEntry] = {}
    for name in names:
        for entry in _entries(folder, name, torchao):
            if entry.name in entries:
                raise QgateError(
                    f"{label!r}: {entry.name!r} is in {entries[entry.name].file!r} and in "
                    f"{name!r}: shards of two exports lie in one folder. Remove those of one."
                )
            entries[entry.name] = entry
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


def _check_shards(spec: str, names: list[str]) -> None:
    """Refuse folders in which a shard is missing, or shards of two exports lie."""
    counts: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := SHARD.fullmatch(name):
            key = match["stem"], int(match["count"])
            counts.setdefault(key, set()).add(int(match["number"]))
    if len(counts) > 1:
        listed = " and ".join(f"{stem!r} in {count} parts" for stem, count in sorted(counts))
        raise QgateError(
            f"{spec!r} holds shards of two exports: {listed}. Remove those of one, or name a file."
        )
    for (stem, count), numbers in counts.items():
        missing = sorted(set(range(1, count + 1)) - numbers)
        if missing:
            first = f"{stem}-{missing[0]:05}-of-{count:05}.safetensors"
            raise QgateError(
                f"{spec!r} lacks {len(missing)} of {count} shards, first {first!r}. Download it "
                "again."
            )


def _entries(folder: Folder, name: str, torchao: dict[str, TorchaoEntry]) -> Iterator[StoredEntry]:
    """Read the head of one shard, and check that the file is as long as it says."""
    path = str(folder.at(name))
    stamp = folder.stamp(name)
    head = _head(folder, name, path)
    torchao |= torchao_entries(head.metadata, path)
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
        offset = head.start + first
        yield StoredEntry(key, name, entry["dtype"], tuple(entry["shape"]), last - first, offset)
    if stamp is not None and stamp.size < end:
        raise QgateError(
            f"{path!r} is cut off: it has {stamp.size:,} of {end:,} bytes. Download it again."
        )


def _head(folder: Folder, name: str, path: str) -> Head:
    try:
        return read_head(lambda start, stop: folder.read(name, start, stop), FIRST)
    except PermissionError:
        raise QgateError(f"{path!r} cannot be read: permission denied.") from None
    except (NoHeadError, ValueError, AttributeError, RecursionError):
        if folder.read(name, 0, len(POINTER)) == POINTER:
            raise QgateError(
                f"{path!r} is a pointer of Git LFS, not the tensors; run `git lfs pull`."
            ) from None
        raise QgateError(f"{path!r} is damaged or no .safetensors file.") from None
