"""Folders for the results of single tensors, which do not collide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qgate.storage.places import Place


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
