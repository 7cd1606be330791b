"""Read JSON that may be larger than memory: its long lists become rows on the way.

The decoder of the standard library decodes one value at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TextIO

from qgate.records import validate
from qgate.results.rows import StoredRows

_AT_ONCE = 1 << 20
_SPACE = " \t\n\r"
_NUMBER_CHARS, _LOOKAHEAD = "0123456789.eE+-", 64


class UnfitRecordError(ValueError):
    """An object in a long list is not of its type."""


def read_streaming(file: TextIO, kind: str, many: Mapping[str, Any]) -> Any:
    """Read a record of a kind; a text of another kind is read without rows.

    many   types of the objects in long lists, by path such as `comparison.pairs`; an object of
           another type raises `UnfitRecordError`
    """
    return _Reader(file, kind, many).whole()


class _Reader:
    def __init__(self, file: TextIO, kind: str, many: Mapping[str, Any]) -> None:
        self._file, self._kind, self._many = file, kind, many
        self._text, self._at, self._ended = "", 0, False
        self._decoder = json.JSONDecoder(parse_constant=_no_number)

    def whole(self) -> Any:
        value = self._fields("") if self._next() == "{" else self._value()
        if self._next():
            raise self._error("Extra data")
        return value

    def _fields(self, inside: str) -> dict[str, object]:
        """Read an object, with rows if it is of the kind."""
        fields: dict[str, object] = {}
        self._take("{")
        while self._next() != "}":
            if fields:
                self._take(",")
            if self._next() != '"':
                raise self._error("Expecting property name enclosed in double quotes")
            name = self._value()
            self._take(":")
            is_record = bool(inside) or fields.get("kind") == self._kind
            fields[name] = self._field(f"{inside}{name}") if is_record else self._value()
        self._take("}")
        return fields

    def _field(self, path: str) -> Any:
        first = self._next()
        if path in self._many and first == "[":
            return self._rows(path, self._many[path])
        if first == "{" and any(name.startswith(f"{path}.") for name in self._many):
            return self._fields(f"{path}.")
        return self._value()

    def _rows(self, path: str, record: Any) -> Any:
        rows: StoredRows[Any] = StoredRows()
        self._take("[")
        while self._next() != "]":
            if len(rows):
                self._take(",")
            value = self._value()
            try:
                validate(value, record, f"{path}[{len(rows)}]")
            except ValueError as error:
                raise UnfitRecordError(str(error)) from None
            rows.append(value)
        self._take("]")
        return rows.plain()

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self._error(error.msg) from None
            else:
                after = self._text[end : end + _LOOKAHEAD]
                if self._ended or after.strip(_NUMBER_CHARS):  # a number may continue
                    self._at = end
                    return value
            self._more(max(_AT_ONCE, len(self._text) - self._at))

    def _next(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more(_AT_ONCE)

    def _take(self, char: str) -> None:
        if self._next() != char:
            raise self._error(f"Expecting {char!r}")
        self._at += 1

    def _more(self, size: int) -> None:
        read = self._file.read(size)
        self._ended = not read
        self._text, self._at = self._text[self._at :] + read, 0

    def _error(self, problem: str) -> ValueError:
        context = self._text[self._at : self._at + 20]
        return ValueError(f"{problem}, {f'at {context!r}' if context else 'at its end'}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
