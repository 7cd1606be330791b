"""Numpy archives as checkpoints: arrays by name, read one at a time and without objects.

Large arrays that are not compressed are read some elements at a time.
"""

from __future__ import annotations

import struct
import tokenize
import warnings
import zipfile
import zlib
from dataclasses import replace
from itertools import chain
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from qgate.archives import check_archive
from qgate.checkpoints.safetensors_shards import CheckpointShards
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.tensor_types import DTYPES, WORDS
from qgate.checkpoints.wrong_files import by_name, check_not_pointer, file_size, reading
from qgate.errors import QgateError, first_line
from qgate.storage.folders import Folder, open_whole
from qgate.text import one_line

LARGE = 16 << 20
"""Bytes of an array from which parts of it are read, and its checksum is not looked at."""
_ENDING = ".npy"
_LOCAL = struct.Struct("<26xHH")
"""The head of a member of an archive: the lengths of its name and of what else there is."""
_BFLOAT16 = "|V2"
"""How numpy stores the bfloat16 of ml_dtypes and jax, which it has no name for."""


def open_arrays(label: str, folder: Folder, names: list[str]) -> Checkpoint:
    """Open the arrays of `.npz` files of one folder as one checkpoint."""
    listed = chain.from_iterable(_entries(folder, file) for file in names)
    entries = by_name(label, listed, "name one of the files")
    spans = CheckpointShards(folder).span
    return Checkpoint(label, entries, lambda entry: _read(folder, entry), span_reader=spans)


def _entries(folder: Folder, file: str) -> list[StoredEntry]:
    path = str(folder.at(file))
    with reading(path):
        file_size(folder, file)
        check_not_pointer(folder, file)
    entries = []
    try:
        with reading(path), open_whole(folder, file) as opened:
            check_archive(opened, repr(path))
            with zipfile.ZipFile(opened) as archive:
                for member in archive.infolist():
                    if member.filename.endswith(_ENDING):
                        with archive.open(member) as content:
                            entry, first = _entry(file, member, content)
                        if first is not None:
                            opened.seek(member.header_offset)
                            lengths = _LOCAL.unpack(opened.read(_LOCAL.size))
                            begin = member.header_offset + _LOCAL.size + sum(lengths)
                            entry = replace(entry, offset=begin + first)
                        entries.append(entry)
    except _DAMAGES as error:
        raise _damaged(path, error) from None
    if not entries:
        raise QgateError(f"{path!r} holds no arrays.")
    return entries


def _entry(
    file: str, member: zipfile.ZipInfo, content: IO[bytes]
) -> tuple[StoredEntry, int | None]:
    """Describe an array by its head, and check that its bytes are there.

    The number is that of its first byte where its elements lie in the file as they are.
    """
    version = np.lib.format.read_magic(content)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, is_by_columns, dtype = read(content)
    name = member.filename.removesuffix(_ENDING)
    if dtype.str != _BFLOAT16 and dtype.kind not in "fiub":
        raise ValueError(f"{one_line(name)!r} holds {dtype}, not numbers")
    count = 1
    for length in shape:
        if length < 0:
            raise ValueError(f"{one_line(name)!r} has shape {shape}")
        count *= length
    size = count * dtype.itemsize
    if content.tell() + size != member.file_size:
        raise ValueError(
            f"{one_line(name)!r} has {member.file_size - content.tell():,} of {size:,} bytes"
        )
    entry = StoredEntry(name, file, _word(dtype), tuple(shape), size)
    is_plain = member.compress_type == zipfile.ZIP_STORED and not dtype.str.startswith(">")
    has_spans = is_plain and not is_by_columns and size >= LARGE and entry.dtype in DTYPES
    return entry, content.tell() if has_spans else None


def _word(dtype: np.dtype[Any]) -> str:
    if dtype.str == _BFLOAT16:
        return "BF16"
    try:
        tensor = torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        return dtype.str
    return WORDS[tensor.dtype]


def _read(folder: Folder, entry: StoredEntry) -> Tensor:
    path = str(folder.at(entry.file))
    try:
        with (
            reading(path),
            open_whole(folder, entry.file) as opened,
            zipfile.ZipFile(opened) as archive,
            archive.open(entry.name + _ENDING) as content,
        ):
            array = np.lib.format.read_array(content, allow_pickle=False)
        if array.dtype.str == _BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(native)
    except _DAMAGES as error:
        raise _damaged(path, error) from None


_DAMAGES = (
    ValueError, TypeError, KeyError, EOFError, SyntaxError, RuntimeError, MemoryError,
    NotImplementedError, RecursionError, OverflowError, zipfile.BadZipFile, zlib.error,
    tokenize.TokenError, struct.error,
)  # fmt: skip
"""What numpy and zipfile raise of a damaged archive."""


def _damaged(path: str, error: Exception) -> QgateError:
    return QgateError(
        f"{path!r} is damaged, cut off or no .npz file: {one_line(first_line(error))}."
    )
