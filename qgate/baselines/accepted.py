"""Accepted errors of a mode as text, for pull requests: one changed value is one changed line.

Columns have fixed widths that longer names overflow, so that no line depends on another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from qgate.baselines._reading import check_version
from qgate.baselines.names import quoted, safe_name, unquoted
from qgate.baselines.origin import Key, Origin, is_device
from qgate.errors import QgateError
from qgate.metrics import METRICS

VERSION = 2
MIXED = "mixed"
FOLDER = "accepted"
REMEDY = (
    "Restore the file from version control, or delete it and record it again with "
    "--update-baselines."
)
_TITLE = "# qgate accepted errors, version "
_HEADER = ("model", "mode", "weights", "inputs", "calibration", "device")
_ADVICE = "# written by --update-baselines and by qgate baselines accept; not to be edited"
_WIDTHS = (20, 44, 9, 32)
_COLUMNS = ("suite", "site", "scope", "metric")
_DIGITS = re.compile(r"(\d+)", re.ASCII)


@dataclass(frozen=True)
class Accepted:
    """The accepted errors of a mode and what they were measured with.

    Without a calibration they do not depend on one. Values from two device profiles are `mixed`.
    """

    model: str
    mode: str
    weights: str
    inputs: str
    calibration: str | None
    device: str
    values: dict[Key, float | str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def is_outdated(self) -> bool:
        """Whether some values meant something else in the version of the file.

        In version 1 a quantizer was the hash of its text, and the worst channel was measured
        against the mean energy of all channels.
        """
        known = (METRICS.find(key.metric) for key in self.values)
        return self.version < 2 and any(m.textual or m.part == "worst_channel" for m in known)

    def stale(self, origin: Origin) -> list[str]:
        """Why these are not the accepted errors of a baseline, one sentence per cause."""
        pairs = {
            "weights": (self.weights, origin.weights),
            "inputs": (self.inputs, origin.inputs),
            "calibration": (self.calibration, self.calibration and origin.calibration),
        }
        old_file = [
            f"the file is of version {self.version}, which has quantizers as numbers and other "
            "errors of the worst channel"
        ]
        return (old_file if self.is_outdated else []) + [
            f"the accepted errors of mode {self.mode} were measured with other {what} "
            f"({(old or 'none')[:12]}) than those of the baseline ({(new or 'none')[:12]})"
            for what, (old, new) in pairs.items()
            if old != new
        ]

    def to_bytes(self) -> bytes:
        """The file, in an order that depends on nothing but the keys."""
        header = [f"# {name:<12} {_field(getattr(self, name))}" for name in _HEADER]
        title = f"# {_aligned([*_COLUMNS, 'value'])}"
        lines = [_line(key, self.values[key]) for key in sorted(self.values, key=order)]
        text = "\n".join([f"{_TITLE}{self.version}", *header, _ADVICE, title, *lines, ""])
        return text.encode("utf-8")


def accepted_file(mode: str) -> str:
    """The file of a mode, under the folder of the model."""
    return f"{FOLDER}/{safe_name(mode)}.txt"


def order(key: Key) -> tuple[object, ...]:
    """By suite, site, scope, metric; `layers.2` before `layers.10`."""
    return (*(_natural(part) for part in key), tuple(key))


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    """Numbers by their digits, as one in a name can be longer than Python reads."""
    parts = _DIGITS.split(text)
    parts[1::2] = [digits.lstrip("0") for digits in parts[1::2]]
    return tuple((len(p) if i % 2 else 0, p) for i, p in enumerate(parts))


def _field(value: str | None) -> str:
    return "%none" if value is None else quoted(value)


def _aligned(words: list[str]) -> str:
    padded = [f"{word:<{width}}" for word, width in zip(words, _WIDTHS, strict=False)]
    return " ".join([*padded, words[-1]])


def _line(key: Key, value: float | str) -> str:
    """Write an entry; a text as value has an equals sign before it."""
    told = f"={quoted(value)}" if isinstance(value, str) else repr(value)
    return _aligned([*(quoted(part) for part in key), told])


def read_accepted(data: bytes, file: str) -> Accepted:
    """The accepted errors in a file; the first thing wrong with it is the error."""
    found, problems = inspect_accepted(data, file)
    if found is None or problems:
        raise QgateError(f"{problems[0]}. {REMEDY}")
    return found


def inspect_accepted(data: bytes, file: str) -> tuple[Accepted | None, list[str]]:
    """What can be read of a file, and everything that is wrong with it, with its line."""
    try:
        lines = data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        return None, [f"{file}:{data[: error.start].count(10) + 1}: it is no UTF-8 text"]
    problems: list[str] = []
    found = _read_header(lines, file, problems)
    if found is None:
        return None, problems
    if lines[-1]:
        problems.append(f"{file}:{len(lines)}: the last line has no end, it may be cut off")
    seen: dict[Key, int] = {}
    for number, line in list(enumerate(lines, 1))[len(_HEADER) + 3 : -1]:
        try:
            key, value = _read_line(line)
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
            continue
        if key in seen:
            problems.append(f"{file}:{number}: {key} is there twice, first in line {seen[key]}")
        seen.setdefault(key, number)
        found.values.setdefault(key, value)
    if not seen and not problems:
        problems.append(f"{file}: it has no accepted error")
    return found, problems


def _read_header(lines: list[str], file: str, problems: list[str]) -> Accepted | None:
    version = lines[0].removeprefix(_TITLE)
    if version == lines[0] or not re.fullmatch(r"[0-9]{1,9}", version):
        problems.append(f"{file}:1: it is no list of accepted errors of qgate")
        return None
    check_version(file, int(version), VERSION)
    try:
        values = dict(_header_values(lines))
    except ValueError as error:
        problems.append(f"{file}:{error.args[0]}: {error.args[1]}")
        return None
    for name, value in values.items():
        if not value and (name != "calibration" or value is not None):
            problems.append(f"{file}:{2 + _HEADER.index(name)}: {name} is empty")
    if values["device"] != MIXED and not is_device(values["device"]):
        problems.append(f"{file}:{1 + len(_HEADER)}: there is no device {values['device']!r}")
    if problems:
        return None
    return Accepted(**values, version=int(version))  # type: ignore[arg-type]


def _header_values(lines: list[str]) -> Iterator[tuple[str, str | None]]:
    for number, name in enumerate(_HEADER, 2):
        words = lines[number - 1].split(" ") if number <= len(lines) else []
        words = [word for word in words if word]
        if len(words) != 3 or words[:2] != ["#", name]:
            raise ValueError(number, f"the header has no {name} here")
        try:
            yield name, None if words[2] == "%none" else unquoted(words[2])
        except ValueError as error:
            raise ValueError(number, str(error)) from None
    for number in (len(_HEADER) + 2, len(_HEADER) + 3):
        if number > len(lines) or not lines[number - 1].startswith("#"):
            raise ValueError(number, "the header has to go on here")


def _read_line(line: str) -> tuple[Key, float | str]:
    """The entry of a line, as it is written and in no other form, or a ValueError."""
    words = [word for word in line.split(" ") if word]
    if len(words) != 5:
        raise ValueError(f"{line[:60]!r} is not suite, site, scope, metric and value")
    key = Key(*(unquoted(word) for word in words[:4]))
    value = _read_value(key, words[4])
    if _line(key, value) != line:
        raise ValueError(f"the line is not as qgate writes it, which is {_line(key, value)!r}")
    return key, value


def _read_value(key: Key, word: str) -> float | str:
    if word.startswith("=") and METRICS.find(key.metric).textual:
        return unquoted(word[1:])
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is no number") from None
    if not math.isfinite(value):
        raise ValueError(f"{key} is {word}, which is never accepted")
    return value
