"""Read `results.jsonl`: a torn end is reported, other damage is an error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from qgate.errors import QgateError
from qgate.records import validate
from qgate.results.schema import (
    REQUIRED,
    GateRecord,
    Record,
    RunHeader,
    check_header,
    check_record,
    parse,
    without_pictures,
)
from qgate.storage.foreign import foreign_line, open_foreign

_REQUIRED = frozenset(REQUIRED)
_REPEATED = frozenset(
    ("suite", "node", "model", "mode", "layer", "site", "scope", "title", "file", "metric", "kind",
     "quantizer", "source")
)  # fmt: skip


class Records:
    """Records of a file, read line by line at every iteration.

    `torn` is set by an iteration: a text about an incomplete last line, empty for a whole file;
    `position` is where the line of the last record begins, and its length.
    """

    def __init__(
        self,
        path: Path,
        expected: int | None = None,
        *,
        trusted: bool = False,
        shares_texts: bool = True,
        pictures: bool = True,
    ) -> None:
        self.path, self._expected, self._trusted = path, expected, trusted
        self._shares_texts, self._pictures = shares_texts, pictures
        self.torn = ""
        self.position = 0, 0

    def __iter__(self) -> Iterator[Record]:
        self.torn, texts = "", dict[str, str]()
        with open_foreign(self.path, "results", None) as file:
            read_line = partial(foreign_line, file, str(self.path), "results")
            start = len(read_line())
            number = 1
            text = read_line()
            while text:
                number += 1
                following = read_line()
                try:
                    record = parse(text if self._pictures else without_pictures(text))
                except ValueError as error:
                    if following:
                        raise QgateError(f"{self.path}:{number} is damaged: {error}.") from None
                    self.torn = f"{self.path}:{number}: the last record is torn and left out."
                    return
                if not self._trusted:
                    _check_line(record, f"{self.path}:{number}")
                if self._shares_texts:
                    _share_texts(record, texts)
                self.position = start, len(text)
                yield record
                start += len(text)
                text = following
        if self._expected is not None and number - 1 < self._expected:
            self.torn = (
                f"{self.path}: {number - 1} of {self._expected} records are there: it was cut off."
            )


def _share_texts(record: Record, texts: dict[str, str]) -> None:
    """Let names that many records have be one object in memory."""
    for fields in (record, *record["checks"]):
        for name in _REPEATED:
            if text := fields.get(name):
                fields[name] = texts.setdefault(text, text)


def _check_line(record: object, where: str) -> None:
    if not isinstance(record, dict):
        raise QgateError(f"{where} is no record: {record!r}.")
    try:
        if record.keys() >= _REQUIRED:
            validate(record, GateRecord)
            if record["passed"] and record["checks"]:
                return  # its type says the rest
        check_record(record)
    except ValueError as error:
        raise QgateError(f"{where} is damaged: {error}.") from None
    except QgateError as error:
        raise QgateError(f"{where}: {error}") from None


def read(
    path: Path | str, *, trusted: bool = False, shares_texts: bool = True, pictures: bool = True
) -> tuple[Record, Records]:
    """Return header and records of a results file.

    trusted       its lines were checked as it was made
    shares_texts  texts that many records have are one object in memory
    pictures      False leaves them out unread, which are most of a file
    """
    path = Path(path)
    try:
        with open_foreign(path, "results", None) as file:
            first = foreign_line(file, str(path), "results")
    except FileNotFoundError:
        raise QgateError(f"there are no results at {path}: run `pytest suites` first.") from None
    try:
        header = parse(first)
    except ValueError:
        raise QgateError(f"{path} is no results file of qgate: its header is not whole.") from None
    checked = check_header(header, str(path))
    try:
        validate(checked, RunHeader)
    except ValueError as error:
        raise QgateError(f"the header of {path} is damaged: {error}.") from None
    return checked, Records(
        path,
        checked.get("records"),
        trusted=trusted,
        shares_texts=shares_texts,
        pictures=pictures,
    )


def effective_header(header: Record, records: Records) -> Record:
    """Return the header without exit status if reading the records found a torn file."""
    return {**header, "exit": None, "complete": False} if records.torn else header
