"""What a failing run proposes, left beside its report until someone accepts it."""

from __future__ import annotations

import contextlib
import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from qgate.baselines._reading import Fields, read_json
from qgate.baselines.manifest import read_origin
from qgate.baselines.names import safe_name
from qgate.baselines.origin import REFERENCE_FIELDS, Key, Origin, differences, kind_of
from qgate.baselines.update import Update
from qgate.errors import QgateError
from qgate.storage.files import forget, replacing

VERSION = 2
_MOST_BYTES, _MOST_TOGETHER = 16 << 20, 128 << 20
_REMEDY = "Delete the file, or run the suites again."


@dataclass(frozen=True)
class Candidate:
    """The errors one test measured in a mode; `barred` says why a value can never be accepted.

    `gone` are entries of sites that there are no more.
    Values may be infinite or NaN: that is what was measured, and what accepting then refuses.
    """

    origin: Origin
    mode: str
    source: str
    values: dict[Key, float | str]
    barred: dict[Key, str] = field(default_factory=dict)
    calibrated: bool = True
    gone: tuple[Key, ...] = ()
    version: int = VERSION
    path: Path | None = field(default=None, compare=False)

    def to_bytes(self) -> bytes:
        """As JSON, one line per value."""
        head = {
            "qgate": "candidate",
            "version": self.version,
            **asdict(self.origin),
            "mode": self.mode,
            "source": self.source,
            "calibrated": self.calibrated,
            **({"gone": [list(key) for key in self.gone]} if self.gone else {}),
        }
        lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        entries = [f"  {json.dumps(self._entry(key, v))}" for key, v in self.values.items()]
        text = "\n".join(["{", *lines, ' "values": [', ",\n".join(entries), " ]", "}", ""])
        return text.encode("utf-8")

    def _entry(self, key: Key, value: float | str) -> dict[str, object]:
        barred = {"barred": self.barred.get(key, "")}
        if isinstance(value, str):
            return {**key._asdict(), "text": value, **barred}
        told = float(value) if math.isfinite(value) else str(float(value))
        return {**key._asdict(), "value": told, **barred}


def write_candidate(folder: Path, candidate: Candidate) -> Path:
    """Leave a candidate; the next run of the same test in the same mode replaces it."""
    path = _path(folder, candidate.origin.model, candidate.mode, candidate.source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(candidate.to_bytes())
    except OSError as error:
        raise QgateError(f"{str(path)!r} could not be written: {error.strerror}.") from None
    return path


def drop_candidate(folder: Path, model: str, mode: str, source: str) -> None:
    """Take back what an earlier run of a test proposed, now that it proposes nothing."""
    with contextlib.suppress(OSError):
        forget(_path(folder, model, mode, source))


def _path(folder: Path, model: str, mode: str, source: str) -> Path:
    return folder / f"{safe_name(chr(10).join((model, mode, source)))}.json"


def read_candidates(folder: Path) -> list[Candidate]:
    """All candidates of a folder, or of a zip file that has one, in the order of their names."""
    if zipfile.is_zipfile(folder):
        return _zipped(folder)
    if not folder.is_dir():
        raise QgateError(
            f"there is no folder {str(folder)!r} with candidates: a failing run of the suites "
            "makes it."
        )
    paths = [path for path in sorted(folder.glob("*.json")) if not path.name.startswith(".")]
    found = []
    for path in paths:
        try:
            found.append(_read(path.read_bytes(), path))
        except OSError as error:
            raise QgateError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    return found


def _zipped(file: Path) -> list[Candidate]:
    """The candidates in an artifact as CI hands it out; nothing of it is written anywhere."""
    found = []
    together = 0
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in sorted(archive.infolist(), key=lambda each: each.filename):
                if not re.search(r"(^|/)candidates/[^/.][^/]*\.json$", entry.filename):
                    continue
                with archive.open(entry) as part:
                    data = part.read(_MOST_BYTES + 1)
                together += len(data)
                if together > _MOST_TOGETHER:
                    raise QgateError(
                        f"{str(file)!r} has candidates of more than {_MOST_TOGETHER >> 20} MB "
                        "together, which no run leaves."
                    )
                if len(data) > _MOST_BYTES:
                    raise QgateError(
                        f"{str(file)!r}: {entry.filename!r} is above {_MOST_BYTES >> 20} MB, which "
                        "no candidate is."
                    )
                found.append(_read(data, file / entry.filename))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError) as error:
        raise QgateError(f"{str(file)!r} cannot be read: {error}.") from None
    return found


def _read(data: bytes, path: Path) -> Candidate:
    read = read_json(data, str(path), _REMEDY)
    version = read.check_header("candidate", VERSION)
    names = [each.name for each in fields(Origin)]
    read.only("qgate", "version", *names, "mode", "source", "calibrated", "gone", "values")
    values: dict[Key, float | str] = {}
    barred: dict[Key, str] = {}
    for entry in read.many("values"):
        key = _read_key(entry)
        if key in values:
            raise entry.wrong(f"{entry.place}: {key} is there twice")
        values[key] = entry.text("text") if entry.has("text") else entry.number("value")
        if reason := entry.text("barred", empty=True):
            barred[key] = reason
    gone = _gone(read)
    if not (values or gone):
        raise read.wrong("values is empty")
    origin, mode, source = read_origin(read), read.text("mode"), read.text("source")
    return Candidate(
        origin, mode, source, values, barred, read.flag("calibrated"), gone, version, path
    )


def _gone(read: Fields) -> tuple[Key, ...]:
    listed = read.lists_of_texts("gone")
    if any(len(each) != len(Key._fields) for each in listed):
        raise read.wrong("gone is no list of suite, site, scope and metric")
    return tuple(Key(*each) for each in listed)


def _read_key(entry: Fields) -> Key:
    entry.only(*Key._fields, "text" if entry.has("text") else "value", "barred")
    return Key(*(entry.text(name, empty=True) for name in Key._fields))


def update_of(recorded: Origin, candidates: Iterable[Candidate]) -> tuple[Update, list[str]]:
    """The update that accepts candidates, and a sentence for each one it refuses, as a whole."""
    update = Update(recorded)
    refused: list[str] = []
    devices: set[str] = set()
    for candidate in candidates:
        name = candidate.source if candidate.path is None else candidate.path.name
        problem = _problem(candidate, recorded, update)
        if problem:
            refused.append(f"{name} (mode {candidate.mode}): {problem}")
            continue
        devices.add(candidate.origin.device)
        if not candidate.calibrated:
            update.without_calibration(candidate.mode)
        for key in candidate.gone:
            update.drop(candidate.mode, key)
        for key, value in candidate.values.items():
            update.set_accepted(candidate.mode, key, value)
    if len(devices) > 1 and len(kinds := set(map(kind_of, devices))) == 1:
        devices = kinds  # machines of CI differ in their arithmetic
    if len(devices) > 1:
        raise QgateError(
            f"the candidates were measured on {' and on '.join(sorted(devices))}: accept those of "
            "one device, then those of the other."
        )
    update.origin = replace(recorded, device=devices.pop() if devices else recorded.device)
    return update, refused


def _problem(candidate: Candidate, recorded: Origin, update: Update) -> str:
    matter = (*REFERENCE_FIELDS, *(["calibration"] if candidate.calibrated else []))
    if other := differences(recorded, candidate.origin, matter):
        return "; ".join(other)
    if candidate.version < VERSION:
        return (
            f"it is of version {candidate.version}, whose errors of the worst channel and "
            "quantizers are others: run the suites again"
        )
    there = update.values.get(candidate.mode, {})
    for key, value in candidate.values.items():
        if not isinstance(value, str) and not math.isfinite(value):
            return f"{key} is {value}, which is never accepted"
        if key in candidate.barred:
            return f"{key} {candidate.barred[key]}"
        if there.get(key, value) != value:
            return f"{key} is {value!r}, and {there[key]!r} in another candidate"
    return ""
