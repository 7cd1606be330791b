"""A journal of finished items, so that a run can continue after a kill.

The file exists while a run is unfinished: a later run with the same request takes over its results
and computes the others; a finished run removes it. The key of a result identifies its input, such
as a path with size and time, so that a changed input is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from qgate.errors import QgateError
from qgate.storage.foreign import read_foreign
from qgate.storage.removing import remove_files

VERSION = 1
_NAME = "qgate journal "
_KIND = f"{_NAME}{VERSION}"


class Journal:
    """Finished items of one request, which is plain data that all items share."""

    def __init__(self, folder: Path, request: Any) -> None:
        text = json.dumps(request, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.path = folder / f".unfinished-{digest[:16]}.jsonl"
        self._results: dict[str, object] = {}
        length = self._read()
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink():
            length = 0
            remove_files(folder, self.path.name)
        self._file = self.path.open("r+b" if length else "wb")
        if length:
            # A line that a kill left half written would spoil the next one.
            self._file.truncate(length)
            self._file.seek(length)
        else:
            self._append({"kind": _KIND})

    def _read(self) -> int:
        """Read the complete lines, and return their length in bytes."""
        try:
            data = read_foreign(self.path, "journals")
        except FileNotFoundError:
            return 0
        length = 0
        for number, line in enumerate(data.splitlines(keepends=True)):
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict) or (
                number == 0 and not self._is_ours(entry.get("kind"))
            ):
                break
            if number:
                self._results[str(entry.get("key"))] = entry.get("result")
            length += len(line)
        return length

    def _is_ours(self, kind: object) -> bool:
        """Tell whether a journal can be continued; refuse one of another version."""
        if isinstance(kind, str) and kind != _KIND and kind.startswith(_NAME):
            raise QgateError(
                f"{str(self.path)!r} is a {kind!r} and this qgate writes {_KIND!r}: let that qgate "
                "finish the run, or delete the file to begin anew."
            )
        return kind == _KIND

    def __contains__(self, key: str) -> bool:
        return key in self._results

    def __len__(self) -> int:
        return len(self._results)

    def result(self, key: str) -> Any:
        """Return the recorded result of an item."""
        return self._results[key]

    def record(self, key: str, result: Any) -> None:
        """Record a finished item, whose files are written; `result` is plain data."""
        self._results[key] = result
        self._append({"key": key, "result": result})

    def _append(self, entry: Any) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def finish(self) -> None:
        """Remove the journal at the end of the run."""
        self._file.close()
        remove_files(self.path.parent, self.path.name)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
