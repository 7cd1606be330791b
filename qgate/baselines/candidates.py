"""Candidates: values that a failing run leaves beside its report until someone accepts them."""

from __future__ import annotations

import contextlib
import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

from qgate.baselines._reading import naming, read_json, read_origin
from qgate.baselines.kinds import Files, values_for
from qgate.baselines.names import safe_name
from qgate.baselines.origin import REFERENCE_FIELDS, Key, Origin, differences, kind_of
from qgate.baselines.update import Update
from qgate.errors import QgateError
from qgate.metrics.plan_changes import plan_changes
from qgate.records import Meta
from qgate.storage.files import remove_with_leftovers, replacing
from qgate.storage.foreign import open_foreign, read_foreign
from qgate.storage.removing import refuse_links

VERSION = 2
_CANDIDATES = "candidates"
_MOST_BYTES, _MOST_TOGETHER = 16 << 20, 128 << 20
_REMEDY = "Delete the file, or run the suites again."


_Text = Annotated[str, Meta(min_length=1)]


class ValueRecord(TypedDict):
    """Measured value; one that JSON does not have is a text."""

    suite: str
    site: str
    scope: str
    metric: str
    barred: str
    text: NotRequired[_Text]
    value: NotRequired[float | Literal["nan", "inf", "-inf"]]


class CandidateRecord(TypedDict):
    """Candidate as its file has it, beside the fields of its origin."""

    qgate: str
    version: int
    mode: _Text
    source: _Text
    calibrated: bool
    gone: NotRequired[list[tuple[str, str, str, str]]]
    values: list[ValueRecord]


@dataclass(frozen=True)
class Candidate:
    """Errors that one test measured in a mode; `barred` says why a value is never accepted.

    `gone` are entries of sites that no longer exist. Values may be infinite or NaN: they were
    measured so, and are refused when they are accepted.
    """

    origin: Origin
    mode: str
    source: str
    values: dict[Key, float | str]
    barred: dict[Key, str] = field(default_factory=dict)
    calibrated: bool = True
    gone: tuple[Key, ...] = ()
    path: Path | None = field(default=None, compare=False)

    def to_bytes(self) -> bytes:
        """Write it as JSON, one line per value."""
        head = {
            "qgate": "candidate",
            "version": VERSION,
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
        number = float(value) if math.isfinite(value) else str(float(value))
        return {**key._asdict(), "value": number, **barred}


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
    path = _path(folder, model, mode, source)
    if path.exists():
        refuse_links(folder.parent.parent, f"{folder.parent.name}/{folder.name}")
        with contextlib.suppress(OSError):
            remove_with_leftovers(path)


def _path(folder: Path, model: str, mode: str, source: str) -> Path:
    return folder / f"{safe_name(chr(10).join((model, mode, source)))}.json"


def read_candidates(folder: Path) -> list[Candidate]:
    """Read the candidates of a folder, or of a zip file that has one, in the order of names."""
    if folder.is_file() and _is_zip(folder):
        return _read_zip(folder)
    if not folder.is_dir():
        raise QgateError(
            f"there is no folder {str(folder)!r} with candidates: a failing run of the suites "
            "makes it."
        )
    candidates = []
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            candidates.append(_read(read_foreign(path, _CANDIDATES, _MOST_BYTES), path))
        except OSError as error:
            raise QgateError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    return candidates


def _is_zip(path: Path) -> bool:
    with open_foreign(path, _CANDIDATES, None) as file:
        return zipfile.is_zipfile(file)


def _read_zip(file: Path) -> list[Candidate]:
    """Read the candidates in an artifact as CI hands it out; nothing of it is unpacked."""
    candidates = []
    together = 0
    try:
        with open_foreign(file, _CANDIDATES, None) as packed, zipfile.ZipFile(packed) as archive:
            for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
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
                candidates.append(_read(data, file / entry.filename))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError) as error:
        raise QgateError(f"{str(file)!r} cannot be read: {error}.") from None
    return candidates


def _read(data: bytes, path: Path) -> Candidate:
    record = read_json(data, str(path), _REMEDY, "candidate", VERSION, CandidateRecord)
    values: dict[Key, float | str] = {}
    barred: dict[Key, str] = {}
    with naming(str(path), _REMEDY):
        for number, entry in enumerate(record["values"]):
            key = Key(entry["suite"], entry["site"], entry["scope"], entry["metric"])
            if key in values:
                raise ValueError(f"values[{number}]: {key} is there twice")
            if ("text" in entry) == ("value" in entry):
                raise ValueError(f"values[{number}] has to have either a value or a text")
            values[key] = entry["text"] if "text" in entry else float(entry["value"])
            if entry["barred"]:
                barred[key] = entry["barred"]
        gone = tuple(Key(*names) for names in record.get("gone", ()))
        if not (values or gone):
            raise ValueError("values is empty")
        origin = read_origin(record)
    mode, source, calibrated = record["mode"], record["source"], record["calibrated"]
    return Candidate(origin, mode, source, values, barred, calibrated, gone, path)


def update_of(
    recorded: Origin,
    candidates: Iterable[Candidate],
    accepted: Mapping[str, Files] | None = None,
) -> tuple[Update, list[str]]:
    """Make the update that accepts candidates, and a sentence for each one that is refused.

    Refused is also one with another plan than `accepted` has by mode: without it plans are free.
    """
    update = Update(recorded)
    refused: list[str] = []
    devices: set[str] = set()
    for candidate in candidates:
        name = candidate.source if candidate.path is None else candidate.path.name
        problem = _problem(candidate, recorded, update)
        if not problem and accepted is not None and candidate.mode in accepted:
            files = accepted[candidate.mode]
            own = kind_of(candidate.origin.device)
            accepted_values = values_for(files[kind] for kind in (own, "") if kind in files)
            problem = _other_plan(
                candidate, {key: value for key, (value, _) in accepted_values.items()}
            )
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


def _other_plan(candidate: Candidate, accepted: Mapping[Key, float | str]) -> str:
    """Say which quantizers are others than accepted; those of new sites are not."""
    known = {key[:3] for key in accepted}
    checks = [
        {
            "site": key.site,
            "text": value,
            "accepted_text": accepted.get(key, "nothing"),
            "passed": accepted.get(key) == value,
        }
        for key, value in candidate.values.items()
        if isinstance(value, str) and key[:3] in known
    ]
    changes = [change.text() for change in plan_changes(checks)]
    return (
        f"the plan changed: {'; '.join(changes)}: accept it with --accept-plan" if changes else ""
    )


def _problem(candidate: Candidate, recorded: Origin, update: Update) -> str:
    matter = (*REFERENCE_FIELDS, *(["calibration"] if candidate.calibrated else []))
    if other := differences(recorded, candidate.origin, matter):
        return "; ".join(other)
    so_far = update.values.get(candidate.mode, {})
    for key, value in candidate.values.items():
        if not isinstance(value, str) and not math.isfinite(value):
            return f"{key} is {value}, which is never accepted"
        if key in candidate.barred:
            return f"{key} {candidate.barred[key]}"
        if so_far.get(key, value) != value:
            return f"{key} is {value!r}, and {so_far[key]!r} in another candidate"
    return ""
