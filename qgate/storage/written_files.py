"""Lists of the files that a command wrote: the next run replaces and removes these and no others.

A list is written before its files are, so that it holds them also after a kill.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple


def list_text(kind: str, files: Iterable[str], **about: object) -> str:
    """Write a list as JSON."""
    return json.dumps({"kind": kind, **about, "files": sorted(files)}, indent=0) + "\n"


class WrittenList(NamedTuple):
    """The files of a list, and the model that they are of, where it names one."""

    files: list[str]
    model: str


def list_of(text: str, kind: str, folders: int = 0) -> WrittenList | None:
    """Read a list; None if it is no list of this kind.

    Names that leave the folder of the list, or are in more `folders` below it, do not count.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") != kind:
        return None
    files = record["files"] if isinstance(record.get("files"), list) else []
    names = [name for name in files if isinstance(name, str) and _is_inside(name, folders)]
    return WrittenList(names, str(record.get("model")))


def _is_inside(name: str, folders: int) -> bool:
    parts = name.split("/")
    return len(parts) <= 1 + folders and "\\" not in name and not {"", ".", ".."} & {*parts}
