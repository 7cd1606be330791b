"""Shards: safetensors files that grow tensor by tensor; their hashes prove what is read.

A file reserves room for its header in front, is written under a temporary name, and gets its own
when it is whole: memory does not grow with it, and a file with that name is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from qgate.dumps.layout import SHARD, unfinished_name
from qgate.dumps.record import Record, StoredValues
from qgate.errors import QgateError, first_line
from qgate.interruptions import raise_interruption
from qgate.storage import locations
from qgate.storage.files import write_all
from qgate.storage.folders import Folder, links_outside
from qgate.storage.locks import open_handle
from qgate.storage.removing import remove_files
from qgate.storage.safetensors_heads import TensorHead
from qgate.storage.tensor_reading import RangedTensors, TensorFile, open_tensors
from qgate.tensor_inputs import plain_tensor

Array = np.ndarray[Any, Any]

CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
HEADER = 1 << 15
"""Least bytes of the head of a file, with its length."""
_ALIGNED = 8
_RAW = "raw."
"""Prefix of a key in a file's metadata, which holds the dtype and shape of its bytes."""
_OPEN_AT_ONCE = 8
_REMEDY = "`qgate dumps verify` lists all that is damaged"


@dataclass(frozen=True)
class Block:
    """The bytes of one tensor, and how to read them."""

    data: memoryview
    dtype: str
    shape: tuple[int, ...]

    def hashed(self) -> str:
        """Hash the bytes.

        128 bits of XXH3 are as fast as reading memory. They prove that nothing went wrong, and not
        who wrote the file, which a hash beside the file cannot prove anyway.
        """
        return str(xxhash.xxh3_128(self.data).hexdigest())

    def entry(self, start: int) -> tuple[TensorHead, str | None]:
        """Return its entry in a header, and its metadata where safetensors lacks the dtype."""
        offsets = [start, start + len(self.data)]
        code = CODES.get(self.dtype)
        if code is not None:
            return TensorHead(dtype=code, shape=list(self.shape), data_offsets=offsets), None
        raw = TensorHead(dtype="U8", shape=[len(self.data)], data_offsets=offsets)
        return raw, json.dumps([self.dtype, list(self.shape)])


def block_of(tensor: Tensor) -> Block:
    """Return the bytes of a tensor's values in order, without the storage behind a view."""
    try:
        tensor = plain_tensor(tensor, "dump", None)
    except TypeError as error:
        raise QgateError(str(error)) from None
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    with torch.no_grad():
        values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = values.reshape(-1).view(torch.uint8)
    return Block(flat.numpy().data, dtype, shape)


def block_of_array(array: Array) -> Block:
    if array.dtype.kind not in "fiub" or array.dtype.name not in CODES:
        raise QgateError(f"a dump takes arrays of numbers, not of {array.dtype}.")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return Block(little.reshape(-1).view(np.uint8).data, array.dtype.name, array.shape)


def digest_of(blocks: Mapping[str, Block]) -> str:
    """Hash arrays with their names, dtypes and shapes."""
    digest = xxhash.xxh3_128()
    for name in sorted(blocks):
        block = blocks[name]
        digest.update(json.dumps([name, block.dtype, list(block.shape)]).encode())
        digest.update(block.data)
    return str(digest.hexdigest())


class ShardWriter:
    """Writer of one file under a temporary name; `finish` gives it its own."""

    def __init__(self, path: Path, first: Mapping[str, Block]) -> None:
        self.path = path
        self._part = path.with_name(unfinished_name(path.name))
        self._entries: dict[str, TensorHead] = {}
        self._raw: dict[str, str] = {}
        self._header = max(HEADER, -(-2 * self._length(first) // HEADER) * HEADER) - 8
        self._header_used = 64
        self.size = 0
        self._handle = open_handle(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.lseek(self._handle, 8 + self._header, os.SEEK_SET)

    @staticmethod
    def _length(blocks: Mapping[str, Block]) -> int:
        """Return the most bytes that blocks take in a header."""
        return sum(400 + 2 * len(key) + 44 * len(block.shape) for key, block in blocks.items())

    def fits(self, blocks: Mapping[str, Block]) -> bool:
        return self._header_used + self._length(blocks) <= self._header

    def add(self, blocks: Mapping[str, Block]) -> None:
        for key, block in blocks.items():
            gap = -self.size % _ALIGNED
            if gap:
                self._put(f"pad.{key}", Block(memoryview(bytes(gap)), "uint8", (gap,)))
            self._put(key, block)
        self._header_used += self._length(blocks)

    def _put(self, key: str, block: Block) -> None:
        entry, raw = block.entry(self.size)
        write_all(self._handle, block.data)
        self.size += len(block.data)
        self._entries[key] = entry
        if raw is not None:
            self._raw[_RAW + key] = raw

    def finish(self) -> None:
        """Complete the header and give the file its name."""
        entries = {"__metadata__": self._raw, **self._entries} if self._raw else self._entries
        text = json.dumps(entries, separators=(",", ":")).encode().ljust(self._header)
        os.lseek(self._handle, 0, os.SEEK_SET)
        write_all(self._handle, self._header.to_bytes(8, "little") + text)
        handle, self._handle = self._handle, -1
        os.close(handle)
        self._part.replace(self.path)

    def discard(self) -> None:
        """Remove the file, so that the disk has its room back."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = -1
        for path in (self._part, self.path):
            with contextlib.suppress(OSError):
                remove_files(path.parent, path.name)


# Reading ---------------------------------------------------------------------------------------


class ShardReader:
    """Reader of the shards of one rank; some of them stay open.

    Files on this machine are mapped and not copied; from a store only a tensor's bytes are read.
    """

    def __init__(self, files: Folder, home: Folder) -> None:
        self._files, self._home = files, home
        self._lock = threading.Lock()
        self._open: OrderedDict[str, TensorFile] = OrderedDict()
        self._most = max(_OPEN_AT_ONCE, home.parallel_reads)

    def path(self, stored: StoredValues) -> locations.Location:
        """Return the path of a shard; a name that leads out of the dump is refused."""
        path = self._home.at(stored.file)
        if not SHARD.fullmatch(stored.file):
            raise QgateError(
                f"an index in {str(self._home.location)!r} names the file {stored.file[:80]!r}, "
                "which is none of a dump: it is refused."
            )
        if links_outside(self._files, self._home, stored.file):
            raise QgateError(f"{str(path)!r} leads out of the dump: it is refused.")
        if self._home.stamp(stored.file) is None:
            raise QgateError(f"{str(path)!r} is missing, and the index names it; {_REMEDY}.")
        return path

    def tensor(self, record: Record, *, check: bool) -> Tensor:
        stored = _values_of(record)
        path, file = self._file(stored)
        with _reading(path, record):
            raw = (file.metadata() or {}).get(_RAW + stored.key)
            values = file.get_tensor(stored.key)
            if raw is not None:  # bytes of a dtype that safetensors lacks
                name, sizes = json.loads(raw)
                values = values.view(_dtype(name)).reshape(sizes)
        shape, dtype = tuple(values.shape), str(values.dtype).removeprefix("torch.")
        if (shape, dtype) != (record.shape, record.dtype):
            raise QgateError(
                f"{str(path)!r} holds {dtype} {list(shape)} for {record.title}, and the index says "
                f"{record.dtype} {list(record.shape)}; {_REMEDY}."
            )
        if check and block_of(values).hashed() != stored.digest:
            raise _changed(path, record)
        return values

    def beginning(self, record: Record, elements: int) -> Tensor:
        """Read the first elements, flat; from a store only their bytes are read."""
        stored = _values_of(record)
        path, file = self._file(stored)
        if not isinstance(file, RangedTensors):
            return self.tensor(record, check=False).reshape(-1)[:elements]
        with _reading(path, record):
            dtype = _dtype(record.dtype)
            return file.first_bytes(stored.key, elements * dtype.itemsize).view(dtype)

    def counts(self, record: Record, *, check: bool) -> dict[str, Array]:
        stored = record.counts
        if stored is None:
            raise QgateError(f"of {record.title} no counts were kept.")
        path, file = self._file(stored)
        prefix = f"{stored.key}."
        with _reading(path, record):
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
            counts = {key.removeprefix(prefix): file.get_tensor(key).numpy() for key in names}
        blocks = {name: block_of_array(array) for name, array in counts.items()}
        if not counts or (check and digest_of(blocks) != stored.digest):
            raise _changed(path, record)
        return counts

    def _file(self, stored: StoredValues) -> tuple[locations.Location, TensorFile]:
        path = self.path(stored)
        with self._lock:
            if stored.file not in self._open:
                try:
                    self._open[stored.file] = open_tensors(self._home, stored.file, HEADER)
                except QgateError:  # of a store that cannot be reached
                    raise
                except Exception as error:
                    raise_interruption()
                    raise QgateError(
                        f"{str(path)!r} is truncated or damaged ({error}); {_REMEDY}."
                    ) from None
            self._open.move_to_end(stored.file)
            while len(self._open) > self._most:
                self._open.popitem(last=False)
            return path, self._open[stored.file]


def _values_of(record: Record) -> StoredValues:
    if record.tensor is None:
        raise QgateError(f"of {record.title} only a summary was kept, not the values.")
    return record.tensor


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


@contextlib.contextmanager
def _reading(path: locations.Location, record: Record) -> Iterator[None]:
    """Name the record that cannot be read; errors of a store stay as they are."""
    try:
        yield
    except QgateError:
        raise
    except Exception as error:
        raise_interruption()
        why = first_line(error, 120)
        raise QgateError(
            f"{str(path)!r}: {record.title} cannot be read ({why}); {_REMEDY}."
        ) from None


def _changed(path: locations.Location, record: Record) -> QgateError:
    return QgateError(
        f"{str(path)!r}: the values of {record.title} are not those that were written; {_REMEDY}."
    )
