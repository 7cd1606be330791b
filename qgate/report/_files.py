"""Text files written whole or not at all, and folders that do not collide."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """To a neighbor first, so that a full disk leaves what was there before."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def safe_name(name: str) -> str:
    """A tensor's name as a file name: nothing that leaves the folder or hides."""
    cleaned = re.sub(r"[^\w.+=,@-]+", "_", name).strip("._") or "tensor"
    return cleaned[:120]


def folder_for(root: Path, name: str, source: str, taken: Iterable[Path]) -> Path:
    """root/name, or root/name-2 … where that belongs to another tensor."""
    used = set(taken)
    number = 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        if folder not in used and _belongs(folder, source):
            return folder
        number += 1


def _belongs(folder: Path, source: str) -> bool:
    """If a folder is new, or holds results of this very source."""
    for record in sorted(folder.glob("mxfp_*scaling_*.json")):
        try:
            tensor = json.loads(record.read_text(encoding="utf-8"))["tensor"]
            return bool(tensor["source"] == source)
        except (OSError, ValueError, KeyError, TypeError):
            return False
    return True
