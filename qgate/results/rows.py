"""Records of a result by the million: the first ones stay in memory, the others in SQLite.

Records on disk are read when they are used, so a pass over all of them needs the memory of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

from qgate.errors import QgateError
from qgate.results.schema import parse
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
    """A temporary database that is removed with its process; others on this machine can read it.

    Each thread and each forked process has its own connection. Rows that are not written yet are in
    memory, which a forked process has too.
    """

    def __init__(self) -> None:
        with _writing():
            self._path, handle = temporary_file("qgate-rows-")
        self._count, self._pending = 0, list[bytes]()
        self._open()
        weakref.finalize(self, _remove, handle, os.getpid(), self._path)
        with _writing():
            self._connection().execute("CREATE TABLE rows (data BLOB)")

    def _open(self) -> None:
        self._block: tuple[int, list[tuple[bytes]]] = (0, [])
        self._local = threading.local()
        self._connections: list[tuple[int, sqlite3.Connection]] = []
        weakref.finalize(self, _close, self._connections)

    def _connection(self) -> sqlite3.Connection:
        if getattr(self._local, "process", None) != os.getpid():
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            self._local.process, self._local.connection = os.getpid(), connection
            self._connections.append((os.getpid(), connection))
        return cast(sqlite3.Connection, self._local.connection)

    def __len__(self) -> int:
        return self._count

    def append(self, data: bytes) -> None:
        self._pending.append(data)
        self._count += 1
        if len(self._pending) >= _AT_ONCE:
            self._write()

    def _write(self) -> None:
        with _writing():
            connection = self._connection()
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO rows VALUES (?)", ((d,) for d in self._pending))
            connection.execute("COMMIT")
        self._pending = []

    def read(self, number: int) -> bytes:
        pending, written = self._pending, self._count - len(self._pending)
        if number >= written:
            return pending[number - written]
        first, rows = self._block
        if not first <= number < first + len(rows):
            query = "SELECT data FROM rows WHERE rowid BETWEEN ? AND ?"
            bounds = (number + 1, number + _READ_AHEAD)
            first, rows = number, self._connection().execute(query, bounds).fetchall()
            self._block = first, rows
        return rows[number - first][0]

    def __getstate__(self) -> tuple[Path, int, list[bytes]]:
        return self._path, self._count, self._pending

    def __setstate__(self, state: tuple[Path, int, list[bytes]]) -> None:
        self._path, self._count, self._pending = state
        if not self._path.exists():
            raise QgateError(
                f"the records in {str(self._path)!r} are not there; they can be read while the "
                "process that made them lives, on its machine."
            )
        self._open()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        folder = os.environ.get("TMPDIR") or "the system's folder for temporary files"
        raise QgateError(
            f"results that do not fit in memory cannot be written to {folder}: "
            f"{getattr(error, 'strerror', None) or error}; make room there, or set TMPDIR to a "
            "folder with more."
        ) from None


def _close(connections: list[tuple[int, sqlite3.Connection]]) -> None:
    for process, connection in connections:
        if process == os.getpid():
            connection.close()


def _remove(handle: int, process: int, path: Path) -> None:
    os.close(handle)
    if os.getpid() == process:
        remove_files(path.parent, path.name)
