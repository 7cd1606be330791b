"""Files of a run: `results.jsonl`, read and written record by record, and its table as CSV.

A killed run leaves its records: a torn end is reported, other damage is an error.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from qgate._version import __version__
from qgate.errors import QgateError
from qgate.records import required_fields, validate
from qgate.results.checks import binding_checks
from qgate.results.schema import GateRecord, Record, RecordedCheck, RunHeader
from qgate.storage.files import replacing
from qgate.storage.foreign import foreign_line, open_foreign
from qgate.text import for_csv

# Lines of results.jsonl ---------------------------------------------------------------------------

SCHEMA = 1
REQUIRED = required_fields(GateRecord)
CHECK_KEYS = required_fields(RecordedCheck)
_REQUIRED, _CHECK_KEYS = frozenset(REQUIRED), frozenset(CHECK_KEYS)
HEADER_KEYS = required_fields(RunHeader)[2:]
# The plugin adds these to what a gate puts into a record.
_ADDED = {"node": "", "seconds": 0.0}


def new_header(**fields: Any) -> Record:
    """Return the header of a run; the fields are those of RunHeader."""
    fixed = {
        "schema": SCHEMA,
        "kind": "header",
        "qgate": __version__,
        "python": platform.python_version(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if lacks := [key for key in HEADER_KEYS if key not in fixed and key not in fields]:
        raise TypeError(f"a header needs {', '.join(lacks)}")
    header = fixed | fields
    return {key: header.pop(key) for key in ("schema", "kind", *HEADER_KEYS)} | header


def check_header(header: object, where: str) -> Record:
    """Return the header, or raise an error that says why this is no results file of qgate."""
    if not isinstance(header, dict) or header.get("kind") != "header":
        raise QgateError(f"{where} is no results file of qgate: its first line is no header.")
    if header.get("schema") != SCHEMA:
        raise QgateError(
            f"{where} has schema {header.get('schema')!r}; qgate {__version__} reads schema "
            f"{SCHEMA}. Read it with qgate {header.get('qgate', 'of its time')}."
        )
    if lacks := [key for key in HEADER_KEYS if key not in header]:
        raise QgateError(f"the header of {where} lacks {', '.join(lacks)}.")
    return header


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse an incomplete record, and one that passed without a check."""
    if not record.keys() >= _REQUIRED:
        lacks = [key for key in REQUIRED if key not in record]
        raise QgateError(f"a record of {record.get('site', '?')!r} lacks {', '.join(lacks)}.")
    for check in record["checks"]:
        if not check.keys() >= _CHECK_KEYS:
            lacks = [key for key in CHECK_KEYS if key not in check]
            raise QgateError(f"a check of {record['site']!r} lacks {', '.join(lacks)}.")
        odd = [key for key in ("value", "bound", "times") if not _is_number(check[key])]
        if odd or not isinstance(check["passed"], bool):
            key = next(iter(odd), "passed")
            raise QgateError(f"a check of {record['site']!r} has {key} {check[key]!r}.")
    if not isinstance(record["passed"], bool):
        raise QgateError(f"the record of {record['site']!r} has passed {record['passed']!r}.")
    if record["passed"] and not record["checks"]:
        raise QgateError(f"the record of {record['site']!r} passed without a check.")


def _is_number(value: object) -> bool:
    """Tell whether a value is a number or None, for a number that is missing or not finite."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def check_storable(record: Mapping[str, Any]) -> None:
    """Refuse a record that cannot be written or read; its test may be missing."""
    lacks = [key for key in REQUIRED if key not in _ADDED and key not in record]
    if lacks or not isinstance(record["checks"], list):
        raise QgateError(f"{', '.join(lacks) or 'checks'} is missing")
    validate(_ADDED | parse(line(record).encode()), GateRecord)


def line(record: Mapping[str, Any]) -> str:
    """Return one line of JSON; numbers that are not finite are null, with a reason."""
    # Few records have such numbers, and walking through one takes longer than writing it.
    with contextlib.suppress(TypeError, ValueError):
        return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
    reasons: dict[str, str] = {}
    clean = _finite(record, "", reasons)
    if reasons:
        clean["reason"] = {**(record.get("reason") or {}), **reasons}
    return json.dumps(clean, allow_nan=False, separators=(",", ":")) + "\n"


def _finite(value: Any, pointer: str, reasons: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item, f"{pointer}/{key}", reasons) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{pointer}/{index}", reasons) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        reasons[pointer] = str(value)
        return None
    return value


def parse(text: bytes) -> Any:
    """Return the object on a line; NaN and Infinity, which are not JSON, raise a ValueError."""
    import msgspec

    try:
        # Three times as fast, and one name of a field serves all lines.
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text)
        return json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def without_pictures(text: bytes) -> bytes:
    """Return a line without its pictures, whose text is skipped; what is no object stays."""
    import msgspec

    if b'"pictures"' not in text:
        return text
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return text
    fields.pop("pictures", None)
    return msgspec.json.encode(fields)


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


# results.jsonl, read record by record -------------------------------------------------------------

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


# results.jsonl, written record by record ----------------------------------------------------------


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


# results.csv, one row per site and metric ---------------------------------------------------------


COLUMNS = (
    "suite", "node", "model", "mode", "layer", "site", "scope", "metric", "value", "ideal",
    "accepted", "side", "bound", "times", "kind", "improved", "metric_passed", "passed", "seconds",
)  # fmt: skip
_PLACE, _NODE = COLUMNS[: COLUMNS.index("metric")], COLUMNS.index("node")
_LIMIT = ("side", "bound", "times", "kind", "improved")
_BOUND, _NO_LIMIT = _LIMIT.index("bound"), ("",) * (len(_LIMIT) + 1)


def to_csv(records: Iterable[Mapping[str, Any]], path: Path | str) -> int:
    """Write the table and return its number of rows."""
    with csv_table(path) as add:
        return sum(map(add, records))


@contextlib.contextmanager
def csv_table(path: Path | str) -> Iterator[Callable[[Mapping[str, Any]], int]]:
    """Write a table whose rows a function adds, record by record; it returns how many.

    A metric with several limits shows the binding one; a number that is not finite is shown by its
    name, a missing one is empty. Names that a spreadsheet would take for a formula get an
    apostrophe. The node and the seconds of a test are in its first row only.
    """
    last_test = None

    def add(record: Mapping[str, Any]) -> int:
        nonlocal last_test
        test = record["node"], record.get("attempt", 0)
        rows = list(_rows(record, is_first=test != last_test))
        writer.writerows(rows)
        last_test = test
        return len(rows)

    with (
        replacing(Path(path)) as fresh,
        fresh.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        yield add


def _rows(record: Mapping[str, Any], *, is_first: bool) -> Iterator[list[object]]:
    """Yield the rows of a comparison, in the order of the columns."""
    place = [_cell(record[name]) if is_first or name != "node" else "" for name in _PLACE]
    seconds = _cell(record["seconds"]) if is_first else ""
    if isinstance(seconds, float):
        seconds = float(f"{seconds:.3g}")
    passed = _cell(record["passed"])
    checks = binding_checks(record)
    values, ideal, accepted = record["values"], record["ideal"] or {}, record["accepted"] or {}
    reason = record.get("reason") or {}
    for metric in dict.fromkeys([*values, *checks]):
        check = checks.get(metric, {})
        value = values.get(metric, check.get("text") or check.get("value"))
        yield [
            *place,
            _cell(metric),
            _cell(value if value is not None else reason.get(f"/values/{metric}")),
            _cell(ideal.get(metric)),
            _cell(accepted.get(metric)),
            *(_limit_cells(check) if check else _NO_LIMIT),
            passed,
            seconds,
        ]
        place[_NODE] = seconds = ""


def _limit_cells(check: Mapping[str, Any]) -> list[object]:
    cells = [_cell(check.get(name)) for name in (*_LIMIT, "passed")]
    cells[_BOUND] = _cell(check.get("accepted_text") or check["bound"])
    return cells


_NAMES = ("nan", "inf", "-inf")


def _cell(value: object) -> object:
    """Return the value of a cell, with names for numbers that are not finite."""
    if value is None:
        return ""
    if isinstance(value, float):
        # As many digits as tell one float32 from the next.
        return float(f"{value:.9g}")  # which the writer calls nan, inf or -inf
    return _text_cell(value) if isinstance(value, str) else for_csv(value)


@functools.lru_cache(maxsize=2**14)
def _text_cell(text: str) -> object:
    """Return the cell of a text; most stand in many rows."""
    return text if text in _NAMES else for_csv(text)
