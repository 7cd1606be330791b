"""JSON that may be larger than the memory: its long lists become rows as they are read.

The decoder is the standard library's; it is given a part of the text that holds a whole value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, TextIO

from qgate.results.believing import Believe
from qgate.results.rows import StoredRows

_AT_ONCE = 1 << 20
_SPACE = " \t\n\r"
_OF_NUMBERS, _LOOKED_AT = "0123456789.eE+-", 64


class Unfit(ValueError):
    """JSON, and one of many objects is not what it is to be."""


def read_streaming(file: TextIO, kinds: Collection[str], many: Mapping[str, Believe]) -> Any:
    """A record of one of these kinds; a text of another kind is read as it is.

    many   lists of objects by their names, `pairs` in `comparison` as `comparison.pairs`, with what
           each object is to be; `Unfit` says what one is instead
    """
    return _Reader(file, kinds, many).whole()


class _Reader:
    def __init__(self, file: TextIO, kinds: Collection[str], many: Mapping[str, Believe]) -> None:
        self._file, self._kinds, self._many = file, kinds, many
        self._text, self._at, self._ended = "", 0, False
        self._decoder = json.JSONDecoder(parse_constant=_no_number)

    def whole(self) -> Any:
        found = self._fields("") if self._next() == "{" else self._value()
        if self._next():
            raise self._error("Extra data")
        return found

    def _fields(self, inside: str) -> dict[str, Any]:
        """An object; one that is not of the kind, and all in it, is read as it is."""
        found: dict[str, Any] = {}
        self._take("{")
        while self._next() != "}":
            if found:
                self._take(",")
            if self._next() != '"':
                raise self._error("Expecting property name enclosed in double quotes")
            name = self._value()
            self._take(":")
            known = bool(inside) or found.get("kind") in self._kinds
            found[name] = self._field(f"{inside}{name}") if known else self._value()
        self._take("}")
        return found

    def _field(self, path: str) -> Any:
        first = self._next()
        if path in self._many and first == "[":
            return self._rows(path, self._many[path])
        if first == "{" and any(name.startswith(f"{path}.") for name in self._many):
            return self._fields(f"{path}.")
        return self._value()

    def _rows(self, path: str, believe: Believe) -> Any:
        rows: StoredRows[Any] = StoredRows()
        self._take("[")
        while self._next() != "]":
            if len(rows):
                self._take(",")
            value = self._value()
            try:
                believe(value, f"{path}[{len(rows)}]")
            except ValueError as error:
                raise Unfit(str(error)) from None
            rows.append(value)
        self._take("]")
        return rows.settled()

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self._error(error.msg) from None
            else:
                after = self._text[end : end + _LOOKED_AT]
                if self._ended or after.strip(_OF_NUMBERS):  # a number may go on
                    self._at = end
                    return found
            self._more(max(_AT_ONCE, len(self._text) - self._at))

    def _next(self) -> str:
        """The character that comes next, but for space; nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more(_AT_ONCE)

    def _take(self, wanted: str) -> None:
        if self._next() != wanted:
            raise self._error(f"Expecting {wanted!r}")
        self._at += 1

    def _more(self, size: int) -> None:
        read = self._file.read(size)
        self._ended = not read
        self._text, self._at = self._text[self._at :] + read, 0

    def _error(self, what: str) -> ValueError:
        rest = self._text[self._at : self._at + 20]
        return ValueError(f"{what}, {f'at {rest!r}' if rest else 'at its end'}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
