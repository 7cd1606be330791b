"""Files beside the weights of a checkpoint: which there are, and what JSON files state."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping

from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.wrong_files import reading
from qgate.errors import first_line
from qgate.storage.folders import Folder
from qgate.text import one_line, shortened

NONE = "nothing"
_LONGEST = 80


class ShippedFiles:
    """The files of a checkpoint's folder; none of a checkpoint that was given as one file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder: Folder | None = checkpoint.folder
        self.names = {} if self._folder is None else self._folder.names()
        self.settings = functools.cache(self._settings)

    def has(self, *names: str) -> bool:
        return any(name in self.names for name in names)

    def data(self, name: str) -> bytes:
        """Return the bytes of a file; none where there is no such file."""
        if self._folder is None or name not in self.names or self.names[name]:
            return b""
        with reading(str(self._folder.at(name))):
            return self._folder.read(name)

    def text(self, name: str) -> str:
        return self.data(name).decode("utf-8", "replace")

    def document(self, name: str) -> object:
        """Return what a JSON file holds; None where it is missing or broken."""
        try:
            return json.loads(self.data(name)) if self.has(name) else None
        except (ValueError, RecursionError):
            return None

    def _settings(self, name: str) -> Mapping[str, object]:
        document = self.document(name)
        return document if isinstance(document, dict) else {}

    def broken(self) -> Iterator[CheckpointFinding]:
        """Find JSON files that cannot be read."""
        for name in self.names:
            if not name.endswith(".json") or self.names[name]:
                continue
            try:
                json.loads(self.data(name))
            except (ValueError, RecursionError) as error:
                cause = f"it is no JSON ({first_line(error)}): write it again"
                yield CheckpointFinding(one_line(name), cause)


def differs(
    file: str, key: str, own: object, parents: object, advice: str = ""
) -> CheckpointFinding:
    """Return the finding that a file states something else than the parent's."""
    advice = advice or f"copy it from the parent's {file}"
    one, other = value_texts(own, parents)
    cause = f"it is {one} here and {other} in the parent: {advice}"
    return CheckpointFinding(f"{file} {one_line(key)}".rstrip(), cause)


def is_missing(file: str, advice: str = "copy it from the parent") -> CheckpointFinding:
    """Return the finding that the child lacks a file of the parent."""
    return CheckpointFinding(file, f"it is missing here, and the parent has it: {advice}")


def value_text(value: object) -> str:
    """Write a value on one line, short enough to read."""
    return NONE if value is None else shortened(one_line(repr(value)), _LONGEST)


def value_texts(own: object, parents: object) -> tuple[str, str]:
    """Write two values; of long texts, the part in which they begin to differ."""
    if isinstance(own, str) and isinstance(parents, str) and max(len(own), len(parents)) > _LONGEST:
        pairs = enumerate(zip(own, parents, strict=False))
        start = next((at for at, (x, y) in pairs if x != y), min(len(own), len(parents)))
        first = max(0, start - _LONGEST // 4)
        own, parents = (text[first : first + _LONGEST // 2] for text in (own, parents))
        return f"…{value_text(own)}…", f"…{value_text(parents)}…"
    return value_text(own), value_text(parents)


def same_value(own: object, parents: object) -> bool:
    """Compare values of two JSON files; numbers by value, whatever they are written as."""
    if isinstance(own, bool) or isinstance(parents, bool):
        return own is parents
    if isinstance(own, int | float) and isinstance(parents, int | float):
        return float(own) == float(parents)
    return own == parents


def first_difference(own: object, parents: object, path: str = "") -> tuple[str, object, object]:
    """Return the place of the first difference of two documents, and both values there."""
    if isinstance(own, Mapping) and isinstance(parents, Mapping):
        for key in [*parents, *(key for key in own if key not in parents)]:
            if not same_value(own.get(key), parents.get(key)):
                inner = f"{path}.{key}" if path else str(key)
                return first_difference(own.get(key), parents.get(key), inner)
    if isinstance(own, list) and isinstance(parents, list) and len(own) == len(parents):
        for number, (one, other) in enumerate(zip(own, parents, strict=True)):
            if not same_value(one, other):
                return first_difference(one, other, f"{path}[{number}]")
    return path, own, parents
