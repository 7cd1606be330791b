"""Records of a result by the million: the first few are kept as they are, the rest on disk.

What is on disk is read when it is asked for, a field at a time where a field is large, so passing
over all of them needs the memory of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

from qgate.errors import QgateError
from qgate.storage.files import temporary

T = TypeVar("T")
_HELD = 1 << 19
_RECENT = 64


class LazySequence(Sequence[T], Generic[T]):
    """A sequence of what is made when it is asked for, by `_one`."""

    def _one(self, place: int) -> T:
        raise NotImplementedError

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        if isinstance(place, slice):
            return [self._one(each) for each in range(len(self))[place]]
        return self._one(range(len(self))[place])


class StoredRows(LazySequence[T]):
    """Like a list of dictionaries that is added to; those on disk are mappings that look them up.

    held   how many numbers and texts are kept in memory, of all records; 100 bytes each
    """

    def __init__(self, records: Iterable[T] = (), *, held: int | None = None) -> None:
        self._room = _HELD if held is None else held
        self._held: list[T] = []
        self._ends = array("Q", [0])
        self._disk: _Disk | None = None
        self._recent: dict[int, _Lazy] = {}
        for record in records:
            self.append(record)

    def append(self, record: T) -> None:
        if self._has_room(record):
            self._held.append(record)
        else:
            self._add(packed(cast(Any, record)))

    def append_packed(self, data: bytes) -> None:
        """What another process has `packed`; lists are there where tuples were."""
        if self._disk is None:
            record = cast(T, unpacked(data))
            if self._has_room(record):
                self._held.append(record)
                return
        self._add(data)

    def _has_room(self, record: T) -> bool:
        if self._disk is None:
            self._room -= _size(record)
        return self._disk is None and self._room >= 0

    def _add(self, data: bytes) -> None:
        if self._disk is None:
            self._disk = _Disk()
        self._ends.append(self._ends[-1] + self._disk.append(data))

    def settled(self) -> Sequence[T]:
        """A plain list, where all of it is in memory."""
        return self if self._disk else self._held

    def ordered(self, places: Iterable[int]) -> Sequence[T]:
        """The same records in another order, or some of them."""
        kept = array("Q", places)
        return _Ordered(self, kept) if self._disk else [self._held[place] for place in kept]

    def __len__(self) -> int:
        return len(self._held) + len(self._ends) - 1

    def _one(self, place: int) -> T:
        return self._held[place] if place < len(self._held) else cast(T, _Row(self, place))

    def __iter__(self) -> Iterator[T]:
        yield from self._held
        for place in range(len(self._held), len(self)):
            yield cast(T, _Row(self, place))

    def unpacked(self, place: int) -> _Lazy:
        """What is on disk of one record."""
        found = self._recent.get(place)
        if found is None:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            number = place - len(self._held)
            start, end = self._ends[number], self._ends[number + 1]
            found = self._recent[place] = _unpacked(cast(_Disk, self._disk).read(start, end))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recent": {}}


class _Ordered(LazySequence[T]):
    def __init__(self, rows: StoredRows[T], places: array[int]) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    def _one(self, place: int) -> T:
        return self._rows[self._places[place]]


def is_on_disk(value: object) -> bool:
    """Whether rows in it are: only processes of this machine can read them then."""
    if isinstance(value, dict):
        return any(map(is_on_disk, value.values()))
    return isinstance(value, StoredRows | _Ordered)


def as_json(value: object) -> Iterator[str]:
    """The text of plain data with rows in it, part by part; no number is NaN or infinite."""
    if isinstance(value, dict) and is_on_disk(value):
        yield "{"
        for number, (name, inner) in enumerate(value.items()):
            yield f"{', ' if number else ''}{json.dumps(name)}: "
            yield from as_json(inner)
        yield "}"
    elif is_on_disk(value):
        yield "["
        for number, row in enumerate(cast(Sequence[Any], value)):
            yield f"{', ' if number else ''}{_row_text(row)}"
        yield "]"
    else:
        yield _text(value)


def _row_text(row: Any) -> str:
    return row.text() if isinstance(row, _Row) else _text(row)


def _size(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1


# One record --------------------------------------------------------------------------------------


class _Row(Mapping[str, Any]):
    """A record on disk."""

    __slots__ = ("_place", "_rows")

    def __init__(self, rows: StoredRows[Any], place: int) -> None:
        self._rows, self._place = rows, place

    def __getitem__(self, name: str) -> Any:
        return self._rows.unpacked(self._place)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.unpacked(self._place))

    def __len__(self) -> int:
        return len(self._rows.unpacked(self._place))

    def get(self, name: str, default: Any = None) -> Any:
        return self._rows.unpacked(self._place).get(name, default)

    def text(self) -> str:
        return self._rows.unpacked(self._place).text()


def packed(record: Mapping[str, Any]) -> bytes:
    """A line of what is short, and one for each field that is not: few readers want all of them.

    Of a field of fields, each has its line.
    """
    short: dict[str, Any] = {}
    names: list[Any] = []
    lines: list[str] = []
    for name, value in record.items():
        if not isinstance(value, dict | list):
            short[name] = value
        elif value and isinstance(value, dict) and all(isinstance(v, dict) for v in value.values()):
            names.append([name, *value])
            lines += map(_text, value.values())
        else:
            names.append(name)
            lines.append(_text(value))
    return "\n".join([_text([short, names]), *lines]).encode()


_text = json.JSONEncoder(allow_nan=False).encode


class _Lazy(Mapping[str, Any]):
    """Fields that are made of their texts when they are asked for."""

    __slots__ = ("found", "texts")

    def __init__(self, found: dict[str, Any], texts: dict[str, str]) -> None:
        self.found, self.texts = found, texts

    def __getitem__(self, name: str) -> Any:
        return self.found[name] if name in self.found else self._made(name)

    def __iter__(self) -> Iterator[str]:
        yield from self.found
        yield from (name for name in self.texts if name not in self.found)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.found:
            return self.found[name]
        return self._made(name) if name in self.texts else default

    def text(self) -> str:
        """As JSON."""
        told = {name: _text(value) for name, value in self.found.items() if not _is_lazy(value)}
        inner = {name: value.text() for name, value in self.found.items() if _is_lazy(value)}
        every = {**told, **inner, **self.texts}
        return f"{{{', '.join(f'{_text(name)}: {text}' for name, text in every.items())}}}"

    def _made(self, name: str) -> Any:
        value = self.found[name] = json.loads(self.texts[name])
        return value


def _is_lazy(value: object) -> bool:
    return isinstance(value, _Lazy)


def unpacked(data: bytes) -> dict[str, Any]:
    """A record as it was packed."""
    found: dict[str, Any] = json.loads(_unpacked(data).text())
    return found


def _unpacked(data: bytes) -> _Lazy:
    first, *texts = data.decode().split("\n")
    (found, names), left = json.loads(first), iter(texts)
    later: dict[str, str] = {}
    for name in names:
        if isinstance(name, str):
            later[name] = next(left)
        else:
            found[name[0]] = _Lazy({}, dict(zip(name[1:], left, strict=False)))
    return _Lazy(found, later)


# On disk -----------------------------------------------------------------------------------------


class _Disk:
    """A temporary file that goes with whoever made it; other processes of the machine read it.

    It is read and written at places that are named, so that threads and forked processes may.
    """

    def __init__(self) -> None:
        with _writing():
            self._path, self._handle = temporary("qgate-rows-")
        self._size = 0
        weakref.finalize(self, _close, self._handle, os.getpid(), self._path)

    def append(self, data: bytes) -> int:
        left = memoryview(data)
        with _writing():
            while left:
                written = os.pwrite(self._handle, left, self._size)
                left, self._size = left[written:], self._size + written
        return len(data)

    def read(self, start: int, end: int) -> bytes:
        return os.pread(self._handle, end - start, start)

    def __getstate__(self) -> Path:
        return self._path

    def __setstate__(self, path: Path) -> None:
        self._path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise QgateError(
                f"the records in {str(path)!r} are not there; they can be read while the process "
                "that made them lives, on its machine."
            ) from None
        weakref.finalize(self, _close, self._handle)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        told = os.environ.get("TMPDIR") or "the system's folder for temporary files"
        raise QgateError(
            f"results that do not fit in memory cannot be written to {told}: "
            f"{error.strerror or error}; make room there, or set TMPDIR to a folder with more."
        ) from None


def _close(handle: int, process: int = 0, path: Path | None = None) -> None:
    os.close(handle)
    if path is not None and os.getpid() == process:
        path.unlink(missing_ok=True)
