"""GGUF files of a checkpoint: single files and splits, read a tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from qgate.checkpoints.gguf.heads import GgufHead, GgufTensor, read_gguf_head
from qgate.checkpoints.gguf.recipes import CONFIGURATION
from qgate.checkpoints.gguf.weights import KINDS, UNKNOWN
from qgate.checkpoints.safetensors_shards import CheckpointShards
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.tensor_types import DTYPES
from qgate.checkpoints.wrong_files import by_name, file_size, reading
from qgate.errors import QgateError
from qgate.formats.vector_books import NEEDS_GGUF
from qgate.storage.folders import Folder, files_in
from qgate.text import one_line

SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PLAIN: Mapping[int, str] = {
    0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16",
}  # fmt: skip
"""Types that are not quantized, by number."""
_BLOCKS = {kind.number: kind for kind in KINDS.values()}


def open_gguf(label: str, folder: Folder, names: list[str]) -> Checkpoint:
    """Open one GGUF file, or all parts of one that is split."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise QgateError(f"{label!r}: {NEEDS_GGUF}") from None
    fields: dict[str, object] = {}

    def listed() -> Iterator[StoredEntry]:
        for name in _parts(label, folder, names):
            head, size = _head(folder, name)
            if not fields:
                fields.update(head.fields)
            yield from _entries(head, folder, name, size)

    entries = by_name(label, listed(), "parts of two files lie in one folder. Remove those of one")
    _check_count(label, fields, len(entries))
    reader = GgufReader(folder)
    return Checkpoint(label, entries, reader, {CONFIGURATION: fields}, span_reader=reader.span)


class GgufReader(CheckpointShards):
    """Reads tensors: of quantized types rows x bytes, to be decoded."""

    def __call__(self, entry: StoredEntry) -> Tensor:
        if entry.dtype.startswith(UNKNOWN):
            return torch.empty(0, dtype=torch.uint8)
        if entry.dtype not in KINDS:
            return super().__call__(entry)
        rows = math.prod(entry.shape[:-1])
        values = self.span(entry, 0, math.prod(entry.shape))
        return values.reshape(rows, entry.size // max(1, rows))

    def extent(self, entry: StoredEntry, first: int, last: int) -> tuple[int, int, torch.dtype]:
        """Return where elements lie; those of quantized types are whole blocks."""
        kind = KINDS.get(entry.dtype)
        if kind is None:
            return super().extent(entry, first, last)
        assert entry.offset is not None
        start, stop = (number // kind.elements * kind.bytes for number in (first, last))
        return entry.offset + start, stop - start, torch.uint8


# Files --------------------------------------------------------------------------------------------


def _parts(label: str, folder: Folder, names: list[str]) -> list[str]:
    """Return the files of one checkpoint: the one file, or all parts of a split."""
    stems = sorted({match["stem"] if (match := SPLIT.fullmatch(n)) else n for n in names})
    if len(stems) > 1:
        listed = ", ".join(repr(stem) for stem in stems[:4]) + (", …" if len(stems) > 4 else "")
        raise QgateError(f"{label!r} holds {len(stems)} GGUF files: {listed}. Name one of them.")
    match = SPLIT.fullmatch(names[0])
    if match is None:
        return names
    present = set(files_in(folder)) if folder.kind() == "folder" else set(names)
    count = int(match["count"])
    if not 1 <= count <= 99_999:
        raise QgateError(f"{label!r} is part {match['number']} of {count}.")
    parts = [f"{match['stem']}-{i:05}-of-{match['count']}.gguf" for i in range(1, count + 1)]
    missing = [part for part in parts if part not in present]
    if missing:
        raise QgateError(
            f"{label!r} lacks {len(missing)} of {count} parts, first {missing[0]!r}. Download it "
            "again."
        )
    return parts


def _head(folder: Folder, name: str) -> tuple[GgufHead, int]:
    path = str(folder.at(name))
    with reading(path):
        size = file_size(folder, name)
        return read_gguf_head(partial(folder.read, name), size, path), size


def _check_count(label: str, fields: Mapping[str, object], count: int) -> None:
    """Compare the number of tensors with that which the first part of a split states."""
    stated = fields.get("split.tensors.count")
    if isinstance(stated, int) and stated != count:
        raise QgateError(
            f"{label!r} holds {count:,} tensors, and its first part states {stated:,}."
        )


def _entries(head: GgufHead, folder: Folder, name: str, size: int) -> Iterator[StoredEntry]:
    """Describe the tensors of a file, and check that they lie in it one after the other."""
    path = str(folder.at(name))
    end = 0
    for tensor in sorted(head.tensors, key=lambda tensor: tensor.offset):
        entry = _entry(tensor, name, path, head.start)
        if tensor.offset < end:
            raise QgateError(
                f"{path!r} is damaged: {one_line(tensor.name)!r} begins within the tensor before "
                "it. Download it again."
            )
        end = tensor.offset + entry.size
        if head.start + end > size:
            raise QgateError(
                f"{path!r} is cut off: it has {size:,} of {head.start + end:,} bytes, which "
                f"{one_line(tensor.name)!r} needs. Download it again."
            )
        yield entry


def _entry(tensor: GgufTensor, name: str, path: str, start: int) -> StoredEntry:
    count = math.prod(tensor.shape)
    block = _BLOCKS.get(tensor.kind)
    if tensor.kind in PLAIN:
        dtype = PLAIN[tensor.kind]
        size = count * DTYPES[dtype].itemsize
    elif block is None:
        dtype, size = f"{UNKNOWN}{tensor.kind}", 0
    else:
        columns = tensor.shape[-1] if tensor.shape else 1
        if columns % block.elements:
            raise QgateError(
                f"{path!r} is damaged: rows of {one_line(tensor.name)!r} have {columns:,} "
                f"elements, and blocks of {block.name} {block.elements}. Download it again."
            )
        dtype, size = block.name, count // block.elements * block.bytes
    return StoredEntry(tensor.name, name, dtype, tensor.shape, size, start + tensor.offset)
