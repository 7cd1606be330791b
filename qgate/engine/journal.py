"""What a run over many items has finished, so that it can go on after a kill.

The file is there while a run is unfinished: a later one that asks for the same takes over what is
recorded and does the rest; when all is done the file goes. Results are recorded by a key that says
of what they are, such as a path with its size and time, so that what changed is done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from qgate.errors import QgateError

VERSION = 1
_NAME = "qgate journal "
_KIND = f"{_NAME}{VERSION}"


class Journal:
    """Finished items of one request; `request` is plain data, and says what all of them share."""

    def __init__(self, folder: Path, request: Any) -> None:
        text = json.dumps(request, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.path = folder / f".unfinished-{digest[:16]}.jsonl"
        self._known: dict[str, Any] = {}
        whole = self._read()
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink():
            whole = 0
            self.path.unlink()
        self._file = self.path.open("r+b" if whole else "wb")
        if whole:
            # What a kill left half written would spoil the next line.
            self._file.truncate(whole)
            self._file.seek(whole)
        else:
            self._append({"kind": _KIND})

    def _read(self) -> int:
        """Take over what is whole, and return its length in bytes."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        whole = 0
        for number, line in enumerate(data.splitlines(keepends=True)):
            try:
                told = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                told = None
            if not isinstance(told, dict) or (number == 0 and not self._is_ours(told.get("kind"))):
                break
            if number:
                self._known[str(told.get("key"))] = told.get("result")
            whole += len(line)
        return whole

    def _is_ours(self, kind: object) -> bool:
        """Whether it is a journal to go on with; what another qgate has finished is not lost."""
        if isinstance(kind, str) and kind != _KIND and kind.startswith(_NAME):
            raise QgateError(
                f"{str(self.path)!r} is a {kind!r} and this qgate writes {_KIND!r}: let that qgate "
                "finish the run, or delete the file to begin anew."
            )
        return kind == _KIND

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def result(self, key: str) -> Any:
        """What was recorded of an item."""
        return self._known[key]

    def record(self, key: str, result: Any) -> None:
        """An item is finished, and what it wrote is where it belongs; `result` is plain data."""
        self._known[key] = result
        self._append({"key": key, "result": result})

    def _append(self, told: Any) -> None:
        self._file.write(json.dumps(told, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def finish(self) -> None:
        """All is done: nothing is left to go on with."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
