"""Rows of text in little memory: one buffer instead of an object for each of a million lines."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

_PART = 1 << 24
_MISSING = b"\xff"
"""A row without a value; no text has this byte."""


class PackedRows(Sequence[str | None]):
    """Rows of text, each followed by a newline in one buffer of UTF-8."""

    def __init__(self, buffer: bytes | bytearray, ends: Sequence[int]) -> None:
        self._buffer, self._ends = buffer, ends

    @classmethod
    def of_lines(cls, text: bytes) -> PackedRows:
        """Split a text in UTF-8 into its lines."""
        buffer, ends = text if text.endswith(b"\n") else text + b"\n", array("q")
        for start in range(0, len(buffer), _PART):
            part = np.frombuffer(buffer, np.uint8, min(_PART, len(buffer) - start), start)
            ends.frombytes((np.flatnonzero(part == ord("\n")) + start).tobytes())
        return cls(buffer, ends)

    @classmethod
    def of(cls, rows: Iterable[str | None]) -> PackedRows:
        """Pack rows, which may have newlines of their own."""
        buffer, ends = bytearray(), array("q")
        for row in rows:
            # A text of JSON may have half a character, which a tokenizer refuses by its place.
            buffer += _MISSING if row is None else row.encode("utf-8", "surrogatepass")
            ends.append(len(buffer))
            buffer += b"\n"
        return cls(buffer, ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: int) -> str | None:  # type: ignore[override]
        place = range(len(self._ends))[at]
        start = int(self._ends[place - 1]) + 1 if place else 0
        row = bytes(self._buffer[start : int(self._ends[place])])
        return None if row == _MISSING else row.decode("utf-8", "surrogatepass")
