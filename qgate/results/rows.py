"""Records of a result by the million: the first ones stay in memory, the others in a file.

Records on disk are read when they are used, so a pass over all of them needs the memory of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

from qgate.errors import QgateError
from qgate.results.files import parse
from qgate.storage.files import temporary_file
from qgate.storage.removing import remove_files

T = TypeVar("T")
_MOST_VALUES = 1 << 19
_RECENT = 64
_AT_ONCE, _READ_AHEAD = 256, 8


class LazySequence(Sequence[T], Generic[T]):
    """A sequence whose elements `_one` makes when they are used."""

    def _one(self, index: int) -> T:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._one(number) for number in range(len(self))[index]]
        return self._one(range(len(self))[index])


class StoredRows(LazySequence[T]):
    """A growing list of dictionaries, of which those on disk are mappings.

    held   number of values of all records to keep in memory; 100 bytes each
    """

    def __init__(self, records: Iterable[T] = (), *, held: int | None = None) -> None:
        self._room = _MOST_VALUES if held is None else held
        self._in_memory: list[T] = []
        self._disk: _Table | None = None
        self._recent: dict[int, dict[str, object]] = {}
        for record in records:
            self.append(record)

    def append(self, record: T) -> None:
        if self._has_room(record):
            self._in_memory.append(record)
        else:
            self._add(pack_record(cast(Any, record)))

    def append_packed(self, data: bytes) -> None:
        """Add a record packed by another process, in which tuples became lists."""
        if self._disk is None:
            record = cast(T, unpack_record(data))
            if self._has_room(record):
                self._in_memory.append(record)
                return
        self._add(data)

    def _has_room(self, record: T) -> bool:
        if self._disk is None:
            self._room -= _size(record)
        return self._disk is None and self._room >= 0

    def _add(self, data: bytes) -> None:
        if self._disk is None:
            self._disk = _Table()
        self._disk.append(data)

    def plain(self) -> Sequence[T]:
        """Return a plain list if all records are in memory."""
        return self if self._disk else self._in_memory

    def ordered(self, order: Iterable[int]) -> Sequence[T]:
        """Return the records at these indices, in this order."""
        indices = array("Q", order)
        return (
            _Ordered(self, indices) if self._disk else [self._in_memory[index] for index in indices]
        )

    def __len__(self) -> int:
        return len(self._in_memory) + (len(self._disk) if self._disk else 0)

    def _one(self, index: int) -> T:
        return (
            self._in_memory[index] if index < len(self._in_memory) else cast(T, _Row(self, index))
        )

    def packed(self, index: int) -> bytes:
        """Return the packed bytes of a record on disk."""
        return cast(_Table, self._disk).read(index - len(self._in_memory))

    def unpacked(self, index: int) -> dict[str, object]:
        """Return a record on disk."""
        record = self._recent.get(index)
        if record is None:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            record = self._recent[index] = unpack_record(self.packed(index))
        return record

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_recent": {}}


class _Ordered(LazySequence[T]):
    def __init__(self, rows: StoredRows[T], order: array[int]) -> None:
        self._rows, self._order = rows, order

    def __len__(self) -> int:
        return len(self._order)

    def _one(self, index: int) -> T:
        return self._rows[self._order[index]]


class _Row(Mapping[str, Any]):
    """A record on disk."""

    __slots__ = ("_index", "_rows")

    def __init__(self, rows: StoredRows[Any], index: int) -> None:
        self._rows, self._index = rows, index

    def __getitem__(self, name: str) -> Any:
        return self._rows.unpacked(self._index)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.unpacked(self._index))

    def __len__(self) -> int:
        return len(self._rows.unpacked(self._index))

    def text(self) -> str:
        return self._rows.packed(self._index).decode()


def is_on_disk(value: object) -> bool:
    """Tell whether a value has rows on disk, which only processes of this machine can read."""
    if isinstance(value, dict):
        return any(map(is_on_disk, value.values()))
    return isinstance(value, StoredRows | _Ordered)


def as_json(value: object) -> Iterator[str]:
    """Yield the JSON of plain data with rows in parts; NaN and infinity are errors."""
    if isinstance(value, dict) and is_on_disk(value):
        yield "{"
        for number, (name, inner) in enumerate(value.items()):
            yield f"{', ' if number else ''}{json.dumps(name)}: "
            yield from as_json(inner)
        yield "}"
    elif is_on_disk(value):
        yield "["
        for number, row in enumerate(cast(Sequence[Any], value)):
            text = row.text() if isinstance(row, _Row) else _text(row)
            yield f"{', ' if number else ''}{text}"
        yield "]"
    else:
        yield _text(value)


_text = json.JSONEncoder(allow_nan=False).encode


def pack_record(record: Mapping[str, Any]) -> bytes:
    """Return the bytes of a record, for the disk and other processes."""
    return _text(record).encode()


def unpack_record(data: bytes) -> dict[str, object]:
    """Return the record of packed bytes."""
    record: dict[str, object] = parse(data)
    return record


def _size(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1


class _Table:
    """A temporary file of records, removed with its process; others on this machine can read it.

    Records that are not written yet are in memory, which a forked process has too. The file is
    opened for each block that is read, so threads and processes share no position in it.
    """

    def __init__(self) -> None:
        with _writing():
            self._path, handle = temporary_file("qgate-rows-")
        weakref.finalize(self, _remove, handle, os.getpid(), self._path)
        self._ends, self._pending = array("Q", [0]), list[bytes]()
        self._block: tuple[int, list[bytes]] = (0, [])

    def __len__(self) -> int:
        return len(self._ends) - 1 + len(self._pending)

    def append(self, data: bytes) -> None:
        self._pending.append(data)
        if len(self._pending) >= _AT_ONCE:
            self._write()

    def _write(self) -> None:
        with _writing(), self._path.open("r+b") as file:
            file.seek(self._ends[-1])
            file.write(b"".join(self._pending))
        for data in self._pending:
            self._ends.append(self._ends[-1] + len(data))
        self._pending = []

    def read(self, number: int) -> bytes:
        pending, written = self._pending, len(self._ends) - 1
        if number >= written:
            return pending[number - written]
        first, rows = self._block
        if not first <= number < first + len(rows):
            ends = self._ends[number : number + _READ_AHEAD + 1]
            with self._path.open("rb") as file:
                file.seek(ends[0])
                first, rows = number, [file.read(end - start) for start, end in pairwise(ends)]
            self._block = first, rows
        return rows[number - first]

    def __getstate__(self) -> tuple[Path, array[int], list[bytes]]:
        return self._path, self._ends, self._pending

    def __setstate__(self, state: tuple[Path, array[int], list[bytes]]) -> None:
        self._path, self._ends, self._pending = state
        if not self._path.exists():
            raise QgateError(
                f"the records in {str(self._path)!r} are not there; they can be read while the "
                "process that made them lives, on its machine."
            )
        self._block = (0, [])


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        folder = os.environ.get("TMPDIR") or "the system's folder for temporary files"
        raise QgateError(
            f"results that do not fit in memory cannot be written to {folder}: "
            f"{error.strerror or error}; make room there, or set TMPDIR to a folder with more."
        ) from None


def _remove(handle: int, process: int, path: Path) -> None:
    os.close(handle)
    if os.getpid() == process:
        remove_files(path.parent, path.name)
