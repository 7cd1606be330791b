"""Rows of text from files: plain, JSON, JSON lines, CSV and Parquet, compressed or not."""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qgate.errors import QgateError, first_line
from qgate.storage.archives import unpacked_limit
from qgate.storage.foreign import MOST_TENSORS, foreign_size, open_foreign, read_foreign

# A row is a text, or None where the file has no value.
Rows = Sequence[str | None]

ENDINGS = {
    ".txt": "text",
    ".text": "text",
    ".raw": "text",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_MOST_ROWS = 1_000_000
_NEEDS_DATA = "pip install 'pytest-qgate[data]'"

_PART = 1 << 24
_MISSING = b"\xff"
"""A row without a value; no text has this byte."""


def format_of(path: Path, requested: str | None = None) -> str:
    """Return the requested format, else the one of the file's ending."""
    if requested is not None:
        return requested
    ending = _ending(path)
    if ending not in ENDINGS:
        raise QgateError(
            f"the ending of {str(path)!r} does not say what is in it; {', '.join(ENDINGS)} do. Say "
            "it with --data.custom.format text, document, json, jsonl, csv or parquet."
        )
    return ENDINGS[ending]


def has_known_ending(path: Path) -> bool:
    return _ending(path) in ENDINGS


def read_rows(path: Path, format: str, column: str) -> Rows:
    """Read the rows of a file; a `document` is one row with the whole text."""
    if format == "parquet":
        return _parquet(path, column)
    content = read_text(path)
    if not content or content.isspace():
        raise QgateError(f"{str(path)!r} is empty: there is no text in it.")
    if format == "document":
        return [content]
    if format == "text":
        lines = content.encode()
        del content  # of a large file, one of the two is enough
        return PackedRows.of_lines(lines)
    if format == "csv":
        return _csv(path, content, column)
    return _json(path, content, column, lines=format == "jsonl")


def read_text(path: Path) -> str:
    """Read text in UTF-8, with or without byte order mark; its lines end with a newline."""
    data = _bytes(path)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise QgateError(f"{str(path)!r} is text in UTF-16; save it in UTF-8.")
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise QgateError(
            f"{str(path)!r} is not text in UTF-8: byte 0x{data[error.start]:02x} at position "
            f"{error.start}, in line {line}. Save it in UTF-8; it may be in latin-1 now."
        ) from None
    zero = content.find("\0")
    if zero >= 0:
        raise QgateError(
            f"{str(path)!r} is not text: it has a zero at position {zero}, in line "
            f"{content.count(chr(10), 0, zero) + 1}."
        )
    return content.replace("\r\n", "\n").replace("\r", "\n")


def _ending(path: Path) -> str:
    inner = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return inner.suffix.lower()


def _bytes(path: Path) -> bytes:
    check_file(path)
    unpack: dict[str, Callable[[io.BytesIO], Any]] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".xz": lzma.open,
        ".zst": _open_zst,
    }
    kind = path.suffix.lower()
    try:
        data = read_foreign(path, "samples", MOST_TENSORS)
        if kind not in unpack or not data:
            return data
        most = unpacked_limit(len(data))
        with unpack[kind](io.BytesIO(data)) as stream:
            unpacked = bytes(stream.read(most + 1))
    except (zlib.error, lzma.LZMAError, EOFError, ValueError) as error:
        raise QgateError(f"{str(path)!r} is damaged or no {kind} file: {error}.") from None
    except OSError as error:
        raise QgateError(
            f"{str(path)!r} cannot be read: {error.strerror or str(error).rstrip('.')}."
        ) from None
    if len(unpacked) > most:
        raise QgateError(
            f"{str(path)!r} unpacks from {len(data)} to more than {most} bytes, which is refused. "
            "If that is what it is, unpack it first."
        )
    return unpacked


def check_file(path: Path) -> None:
    """Refuse a path that is no file, with the way out."""
    try:
        kind = "folder" if path.is_dir() else "file" if path.exists() else ""
    except OSError as error:
        raise QgateError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    if not kind:
        raise QgateError(f"there is no file {str(path)!r}.")
    if kind == "folder":
        raise QgateError(
            f"{str(path)!r} is a folder; name one of its files, or give the folder as a data set: "
            f"--data.source 'hf:{path}'."
        )


def _open_zst(file: io.BytesIO) -> Any:
    arrow = _pyarrow("pyarrow", "a .zst file")
    return arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd")


def _pyarrow(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise QgateError(f"{purpose} needs pyarrow ({error}): {_NEEDS_DATA}.") from None


# JSON ---------------------------------------------------------------------------------------------


def _json(path: Path, content: str, column: str, lines: bool) -> Rows:
    """Read an array, an object of columns, or lines; the content tells which."""
    start = content.lstrip()[:1]
    if start == "[" or not lines:
        try:
            whole = json.loads(content)
        except json.JSONDecodeError as error:
            # Lines often go under the name of .json; a first line that can be read alone is a sign.
            if start == "[" or error.msg != "Extra data":
                raise QgateError(
                    f"{str(path)!r} is broken JSON: {error.msg} in line {error.lineno}, column "
                    f"{error.colno}."
                ) from None
        except (ValueError, RecursionError) as error:
            raise QgateError(f"{str(path)!r} cannot be read as JSON: {error}.") from None
        else:
            return _whole_json(path, whole, column)
    return PackedRows.of(_json_lines(path, content, column))


def _whole_json(path: Path, whole: Any, column: str) -> Rows:
    if isinstance(whole, dict):
        cell = _cell(path, whole, column, "its object")
        rows = cell if isinstance(cell, list) else [cell]
    elif isinstance(whole, list):
        rows = [
            _cell(path, row, column, f"item {k}") if isinstance(row, dict) else row
            for k, row in enumerate(whole, 1)
        ]
    else:
        rows = [whole]
    if not rows:
        raise QgateError(f"{str(path)!r} has 0 rows: its JSON array is empty.")
    return [_text(path, row, column, f"item {k}") for k, row in enumerate(rows, 1)]


def _lines(content: str) -> Iterator[str]:
    """Yield the lines of a text one by one, each with its newline."""
    start = 0
    while start < len(content):
        end = content.find("\n", start) + 1 or len(content)
        yield content[start:end]
        start = end


def _json_lines(path: Path, content: str, column: str) -> Iterator[str | None]:
    for number, line in enumerate(_lines(content), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            row = json.loads(line.removesuffix("\n"))
        except json.JSONDecodeError as error:
            raise QgateError(
                f"{str(path)!r} has broken JSON in {where}: {error.msg} at column {error.colno}."
            ) from None
        except (ValueError, RecursionError) as error:
            raise QgateError(f"{str(path)!r} has unreadable JSON in {where}: {error}.") from None
        cell = _cell(path, row, column, where) if isinstance(row, dict) else row
        yield _text(path, cell, column, where)


def _cell(path: Path, row: dict[str, object], column: str, where: str) -> Any:
    if column not in row:
        raise no_column(path, column, list(row), where)
    return row[column]


def _text(path: Path, value: Any, column: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise QgateError(
        f"{str(path)!r} has no text in {column!r} of {where}, but "
        f"{type(value).__name__} {str(value)[:40]!r}."
    )


def no_column(path: object, column: str, columns: Sequence[str], where: str = "") -> QgateError:
    """Return the error for a missing column, which lists those that exist."""
    listed = ", ".join(columns[:20]) + (" …" if len(columns) > 20 else "")
    return QgateError(
        f"{str(path)!r} has no column {column!r}{f' in {where}' if where else ''}; it has "
        f"{listed or 'none'}. Name the one with the text: --data.custom.text_column NAME."
    )


# Tables -------------------------------------------------------------------------------------------


def _csv(path: Path, content: str, column: str) -> Rows:
    """Read a table; every row must be as long as the header, since commas may lack quotes."""
    split = "\t" if _ending(path) == ".tsv" else ","
    # The limit on the length of a field is one for the whole process.
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(_lines(content), delimiter=split, strict=True)
    try:
        header = next((row for row in reader if row), [])
        if column not in header:
            raise no_column(path, column, header, "its header")
        rows = PackedRows.of(_cells(path, reader, header, column))
    except csv.Error as error:
        raise QgateError(
            f"{str(path)!r} is broken CSV in line {reader.line_num}: {error}."
        ) from None
    finally:
        csv.field_size_limit(limit)
    if not rows:
        raise QgateError(f"{str(path)!r} has 0 rows under its header.")
    return rows


def _cells(path: Path, reader: Any, header: list[str], column: str) -> Iterator[str]:
    position = header.index(column)
    for row in reader:
        if row and len(row) != len(header):
            raise QgateError(
                f"{str(path)!r} has {len(row)} fields in the row that ends in line "
                f"{reader.line_num}, but {len(header)} in its header; put quotes around a text "
                "that has a comma."
            )
        if row:
            yield row[position]


class _Column(Sequence[str | None]):
    """A column of a table that stays as compact as it was read."""

    def __init__(self, cells: Any) -> None:
        self._cells = cells

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, at: Any) -> Any:
        return self._cells[at].as_py()


def _parquet(path: Path, column: str) -> Rows:
    check_file(path)
    parquet = _pyarrow("pyarrow.parquet", f"{str(path)!r}")
    try:
        if foreign_size(path, "samples") == 0:
            raise QgateError(f"{str(path)!r} is empty: there is no text in it.")
        with open_foreign(path, "samples", None) as file:
            names = list(parquet.read_schema(file).names)
            if column not in names:
                raise no_column(path, column, names)
            file.seek(0)
            table = parquet.ParquetFile(file, read_dictionary=[column])
            kind = str(table.schema_arrow.field(column).type)
            if "string" not in kind or "list" in kind or "struct" in kind:
                raise QgateError(f"column {column!r} of {str(path)!r} is of {kind}, not text.")
            rows = int(table.metadata.num_rows)
            if rows > max(_MOST_ROWS, 64 * path.stat().st_size):
                raise QgateError(f"{str(path)!r} claims {rows} rows, more than its size can hold.")
            cells = table.read(columns=[column]).column(0)
    except QgateError:
        raise
    except Exception as error:
        raise QgateError(
            f"{str(path)!r} cannot be read; it is damaged or no Parquet file ({first_line(error)})."
        ) from None
    if not len(cells):
        raise QgateError(f"{str(path)!r} has 0 rows.")
    return _Column(cells)


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
