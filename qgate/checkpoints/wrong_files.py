"""Errors for files that are no checkpoint: pointers, cut off, missing, not to be read."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

from qgate.checkpoints.stored import StoredEntry
from qgate.errors import QgateError
from qgate.storage.folders import Folder

POINTER = b"version https://git-lfs"
NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
"""Files of trainers with an ending of files of weights."""
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.\w+)")


def check_shards(spec: str, names: list[str]) -> None:
    """Refuse folders in which a shard is missing, or shards of two exports lie."""
    counts: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        if match := SHARD.fullmatch(name):
            key = match["stem"], int(match["count"]), match["ending"]
            counts.setdefault(key, set()).add(int(match["number"]))
    if len(counts) > 1:
        listed = " and ".join(f"{stem!r} in {count} parts" for stem, count, _ in sorted(counts))
        raise QgateError(
            f"{spec!r} holds shards of two exports: {listed}. Remove those of one, or name a file."
        )
    for (stem, count, ending), numbers in counts.items():
        missing = sorted(set(range(1, count + 1)) - numbers)
        if missing:
            first = f"{stem}-{missing[0]:05}-of-{count:05}{ending}"
            raise QgateError(
                f"{spec!r} lacks {len(missing)} of {count} shards, first {first!r}. Download it "
                "again."
            )


SHARDS_OF_TWO = "shards of two exports lie in one folder. Remove those of one"


def by_name(label: str, listed: Iterable[StoredEntry], remedy: str) -> dict[str, StoredEntry]:
    """Return entries by name; refuse a tensor that two files have."""
    entries: dict[str, StoredEntry] = {}
    for entry in listed:
        if entry.name in entries:
            raise QgateError(
                f"{label!r}: {entry.name!r} is in {entries[entry.name].file!r} and in "
                f"{entry.file!r}: {remedy}."
            )
        entries[entry.name] = entry
    return entries


def check_not_pointer(folder: Folder, name: str) -> None:
    """Refuse a file that stands for one that Git LFS has not fetched."""
    if folder.read(name, 0, len(POINTER)) == POINTER:
        raise QgateError(
            f"{str(folder.at(name))!r} is a pointer of Git LFS, not the tensors; run `git lfs "
            "pull`."
        )


def cut_off(path: str, size: int, needed: int) -> QgateError:
    return QgateError(
        f"{path!r} is cut off: it has {size:,} of {needed:,} bytes. Download it again."
    )


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
