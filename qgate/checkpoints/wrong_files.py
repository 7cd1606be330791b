"""Errors for files that are no checkpoint: pointers of Git LFS, cut off, not to be read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from qgate.errors import QgateError
from qgate.storage.folders import Folder

POINTER = b"version https://git-lfs"


def check_not_pointer(folder: Folder, name: str) -> None:
    """Refuse a file that stands for one that Git LFS has not fetched."""
    if folder.read(name, 0, len(POINTER)) == POINTER:
        raise QgateError(
            f"{str(folder.at(name))!r} is a pointer of Git LFS, not the tensors; run `git lfs pull`."
        )


def cut_off(path: str, size: int, needed: int) -> QgateError:
    return QgateError(f"{path!r} is cut off: it has {size:,} of {needed:,} bytes. Download it again.")


def file_size(folder: Folder, name: str) -> int:
    """Return the bytes that a file has."""
    stamp = folder.stamp(name)
    if stamp is None:
        raise QgateError(f"there is no file {str(folder.at(name))!r}.")
    return stamp.size


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn errors of the system into those of qgate, which name the file."""
    try:
        yield
    except PermissionError:
        raise QgateError(f"{path!r} cannot be read: permission denied.") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise QgateError(f"{path!r} cannot be read: {reason}.") from None
