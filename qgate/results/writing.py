"""Writes `results.jsonl` record by record, so that a killed run leaves what it knew."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from qgate.errors import QgateError
from qgate.results.schema import check_header, check_record, line
from qgate.storage.files import replacing


def write_whole(
    path: Path | str, header: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> None:
    """A results file of a run that is over: all of it, or what was there before."""
    check_header(dict(header), "the header given")
    listed = list(records)
    with replacing(Path(path)) as fresh, fresh.open("w", encoding="utf-8", newline="") as file:
        file.write(line({**header, "records": len(listed)}))
        for record in listed:
            check_record(record)
            file.write(line(record))


class Writer:
    """A new results file: it appears with its header, whole, and grows by whole lines."""

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
        """All of a line or nothing of it: what a full disk left half written is cut off again."""
        start = os.fstat(self._file.fileno()).st_size
        rest = text.encode("utf-8")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
