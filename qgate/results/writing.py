"""Write `results.jsonl` record by record, so that a killed run leaves its records."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qgate.errors import QgateError
from qgate.results.schema import check_header, check_record, line
from qgate.storage.files import replacing


def write_results(
    path: Path | str, header: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> None:
    """Write the results file of a finished run, as a whole or not at all."""
    lines = []
    for record in records:
        check_record(record)
        lines.append(line(record).encode())
    write_lines(path, header, len(lines), lines)


def write_lines(
    path: Path | str, header: Mapping[str, Any], count: int, lines: Iterable[bytes]
) -> None:
    """Write a results file of records that are lines already, as a whole or not at all."""
    check_header(dict(header), "the header given")
    with replacing(Path(path)) as fresh, fresh.open("wb") as file:
        file.write(line({**header, "records": count}).encode())
        file.writelines(lines)


class Writer:
    """A new results file, which appears with its header and grows by whole lines."""

    def __init__(self, path: Path | str, header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        check_header(dict(header), "the header given")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as fresh:
            self._file = fresh.open("ab", buffering=0)
            try:
                self._write(line(header))
            except BaseException:
                self._file.close()
                raise

    def append(self, record: Mapping[str, Any]) -> None:
        if self._file.closed:
            raise QgateError(f"{self.path} is closed: no record can be added.")
        check_record(record)
        self._write(line(record))

    def _write(self, text: str) -> None:
        """Write all of a line or nothing; a line that a full disk cut off is removed."""
        start = os.fstat(self._file.fileno()).st_size
        remaining = text.encode("utf-8")
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
