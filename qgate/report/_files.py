"""Text files written whole or not at all, and folders that do not collide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from qgate.files import replacing


def write_text(path: Path, text: str) -> None:
    with replacing(path) as neighbor:
        neighbor.write_text(text, encoding="utf-8", newline="\n")


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as neighbor:
        neighbor.write_bytes(data)


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
