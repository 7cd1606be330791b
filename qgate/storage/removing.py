"""Remove files that qgate wrote: by their names, and never through a link.

A link in a folder may be its user's way to a larger disk, or may come with a pull request; what it
leads to is not qgate's. A junction of Windows counts as a link where Python tells it (3.12). A
folder that is mounted, or a hard link, looks like any other and cannot be told apart.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from qgate.errors import QgateError


class LinkError(QgateError):
    """A link is in the way to what would be removed or replaced."""


def refuse_links(home: Path, *names: str, doing: str = "removed") -> None:
    """Raise a LinkError for a link on the way from a folder, which may be one, to names in it."""
    for name in names:
        path = home
        for part in PurePath(name).parts:
            path /= part
            if _is_link(path):
                raise LinkError(
                    f"{str(path)!r} is a link, and nothing is {doing} through it: remove the link, "
                    "or put a folder in its place."
                )


def remove_files(home: Path, *names: str) -> None:
    """Remove the files of a folder that exist; one that is a link is removed as a link."""
    for name in names:
        path = home / name
        if os.path.lexists(path):
            refuse_links(home, str(PurePath(name).parent))
            path.unlink(missing_ok=True)


def clear(home: Path, folder: str, patterns: Sequence[str], keep: Collection[str] = ()) -> None:
    """Remove files of a folder by patterns of their paths in it, then its folders that are empty.

    A link in the place of a folder that a pattern names is an error, and no folder for a `*`.
    `keep` names entries of the folder that stay.
    """
    for pattern in patterns:
        for path in [*_fitting(home / folder, PurePath(pattern).parts, keep)]:
            refuse_links(home, str(path.parent.relative_to(home)))
            path.unlink(missing_ok=True)
            for parent in path.relative_to(home / folder).parents[:-1]:
                remove_empty_folder(home / folder / parent)


def _fitting(folder: Path, parts: Sequence[str], keep: Collection[str]) -> Iterator[Path]:
    name, *inside = parts
    entries = sorted(os.listdir(folder)) if folder.is_dir() else []  # noqa: PTH208
    for entry in entries:
        path = folder / entry
        if entry in keep or not fnmatchcase(entry, name):
            continue
        if inside and not ("*" in name and _is_link(path)):
            yield from _fitting(path, inside, ())
        elif not inside and not (path.is_dir() and not _is_link(path)):
            yield path


def remove_empty_folder(path: Path) -> None:
    """Remove a folder if it is empty."""
    with contextlib.suppress(OSError):
        path.rmdir()


def remove_own_folder(path: Path) -> None:
    """Remove a folder that this process made, with all that is in it; a link stays."""
    shutil.rmtree(path, ignore_errors=True)


def _is_link(path: Path) -> bool:
    is_junction = getattr(path, "is_junction", None)
    return path.is_symlink() or (is_junction is not None and bool(is_junction()))
