"""Text files written whole or not at all, and folders that do not collide."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.storage.files import replacing
from qgate.storage.places import changing

if TYPE_CHECKING:
    from qgate.storage.places import Place


def write_text(path: Place, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Place, data: bytes) -> None:
    """A store takes an object as a whole; `places.check_writable` refuses those that do not."""
    if not isinstance(path, Path):
        with _putting(path):
            path.write_bytes(data)
        return
    with replacing(path) as neighbor:
        neighbor.write_bytes(data)


def write_parts(path: Place, parts: Iterable[str]) -> None:
    """A text that may be larger than the memory; a store gets it when there is all of it."""
    if isinstance(path, Path):
        with replacing(path) as neighbor:
            _write_all(neighbor, parts)
        return
    with tempfile.TemporaryDirectory(prefix="qgate-") as made:
        whole = Path(made) / "whole"
        _write_all(whole, parts)
        with _putting(path):
            path.fs.put_file(str(whole), path.path)


@contextlib.contextmanager
def _putting(path: Place) -> Iterator[None]:
    """What a store says against it, with the place that was to be written."""
    try:
        with changing():
            yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write_all(path: Path, parts: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(parts)


def safe_name(name: str) -> str:
    """A tensor's name as a file name: nothing that leaves the folder or hides."""
    cleaned = re.sub(r"[^\w.+=,@-]+", "_", name).strip("._") or "tensor"
    return cleaned[:120]


def folder_for(root: Place, name: str, source: str, taken: Iterable[Place]) -> Place:
    """root/name, or root/name-2 … where that belongs to another tensor."""
    used = set(taken)
    number = 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        if folder not in used and _belongs(folder, source):
            return folder
        number += 1


def _belongs(folder: Place, source: str) -> bool:
    """If a folder is new, or holds results of this very source."""
    records: list[Place] = sorted(folder.glob("*scaling_*.json"), key=str)
    for record in records:
        try:
            tensor = json.loads(record.read_text(encoding="utf-8"))["tensor"]
            return bool(tensor["source"] == source)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
    return True
