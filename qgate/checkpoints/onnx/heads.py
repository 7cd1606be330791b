"""The head of an ONNX file: all of its protobuf message but large data, which is left in the file.

Fields are told by their numbers alone, so that a model of gigabytes costs as little as its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qgate.errors import CopyableError

KEPT = 4096
"""Bytes of data of a tensor that stay in the head."""
MOST_FIELDS = 4_000_000
_AHEAD = 1 << 16
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Read = Callable[[int, int], bytes]


class NoModelError(ValueError):
    """A file is no protobuf message."""


class ShortFileError(CopyableError, ValueError):
    """A field ends beyond the end of its message; `needed` bytes are the least the file has."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"it ends before byte {needed:,}")
        self.needed = needed


@dataclass(frozen=True)
class OnnxHead:
    """A model without large data, and where that is: first byte and end by initializer number."""

    model: bytes
    spans: dict[int, tuple[int, int]]


@dataclass(frozen=True)
class _Field:
    """One field of a message; `first` is where it begins, `content` where its content does."""

    number: int
    wire: int
    first: int
    content: int
    end: int


def read_onnx_head(read: Read, size: int) -> OnnxHead:
    """Read a model by `read(start, stop)`, leaving out the large data of its initializers."""
    message = _Message(read)
    spans: dict[int, tuple[int, int]] = {}
    model = bytearray()
    count = 0
    for field in message.fields(0, size):
        if (field.number, field.wire) != (_GRAPH, _BYTES):
            model += message.copy(field)
            continue
        graph = bytearray()
        for part in message.fields(field.content, field.end):
            if (part.number, part.wire) != (_INITIALIZER, _BYTES):
                graph += message.copy(part)
                continue
            tensor, span = _tensor(message, part)
            graph += _framed(_INITIALIZER, tensor)
            if span is not None:
                spans[count] = span
            count += 1
        model += _framed(_GRAPH, bytes(graph))
    return OnnxHead(bytes(model), spans)


def _tensor(message: _Message, tensor: _Field) -> tuple[bytes, tuple[int, int] | None]:
    small = bytearray()
    span = None
    for field in message.fields(tensor.content, tensor.end):
        if (field.number, field.wire) != (_RAW_DATA, _BYTES):
            small += message.copy(field)
        elif field.end - field.content > KEPT:
            span = field.content, field.end
        else:
            span = None
            small += message.copy(field)
    return bytes(small), span


class _Message:
    """A message in a file, read ahead a little at a time."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._start, self._ahead = 0, b""
        self._fields = 0

    def fields(self, start: int, stop: int) -> Iterator[_Field]:
        """Yield the fields of a message between two bytes of the file."""
        at = start
        while at < stop:
            self._fields += 1
            if self._fields > MOST_FIELDS:
                raise NoModelError(f"it has more than {MOST_FIELDS:,} fields")
            tag, content = self._varint(at, stop)
            wire = tag & 7
            if wire == _VARINT:
                _, end = self._varint(content, stop)
            elif wire == _BYTES:
                length, content = self._varint(content, stop)
                end = content + length
            elif wire in (_FIXED32, _FIXED64):
                end = content + (4 if wire == _FIXED32 else 8)
            else:
                raise NoModelError(f"it has a field of wire type {wire}")
            if not tag >> 3:
                raise NoModelError("it has a field of number 0")
            if end > stop:
                raise ShortFileError(end)
            yield _Field(tag >> 3, wire, at, content, end)
            at = end

    def copy(self, field: _Field) -> bytes:
        return self._bytes(field.first, field.end)

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        value = 0
        data = self._bytes(at, min(stop, at + 10))
        for number, byte in enumerate(data):
            value |= (byte & 0x7F) << (7 * number)
            if byte < 0x80:
                return value, at + number + 1
        if len(data) == 10:
            raise NoModelError("it has a number of more than ten bytes")
        raise ShortFileError(stop + 1)

    def _bytes(self, start: int, stop: int) -> bytes:
        if not self._start <= start <= stop <= self._start + len(self._ahead):
            self._start, self._ahead = start, self._read(start, max(stop, start + _AHEAD))
        data = self._ahead[start - self._start : stop - self._start]
        if len(data) != stop - start:
            raise ShortFileError(stop)
        return data


def _framed(number: int, content: bytes) -> bytes:
    """Return a field with its tag and length."""
    return _number(number << 3 | _BYTES) + _number(len(content)) + content


def _number(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
