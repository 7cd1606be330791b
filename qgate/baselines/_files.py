"""The files of a baseline, wherever they lie.

Every place keeps one layout and one promise: readers see the files of one moment, and an update
happens whole or not at all, by one writer at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from qgate.baselines._journal import Contents

EVERYTHING = ("/",)


@dataclass(frozen=True)
class Stat:
    """What a listing says of a file."""

    size: int
    modified: datetime | None


class Files(Protocol):
    """The files of one baseline, by their names below its folder.

    `remedy` is what lets an update be written that could not be. A failure to write is an OSError,
    a failure to read a QgateError.
    """

    remedy: str

    def read(self, wanted: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
        """The contents of the wanted files and the names of all, from one moment.

        A name that ends in `/` means all that is below it.
        """

    def stats(self) -> Mapping[str, Stat]:
        """Sizes and times of all files."""

    def leftovers(self) -> list[str]:
        """What updates that were cut off have left, and which counts for nothing."""

    def changing(self, timeout_s: float) -> AbstractContextManager[None]:
        """Be the only writer, with all updates before finished and their leftovers removed."""

    def replace(self, contents: Contents) -> None:
        """Write and remove files, all or none; inside `changing`."""

    def is_promised(self) -> bool:
        """Whether there is an update that counts and is not all in its place."""

    def is_unfinished(self) -> bool:
        """Whether an update that was cut off has left anything, or one is being made now."""

    def unlock(self) -> str:
        """Remove the lock of a writer that is gone, and say whose it was."""


def is_wanted(name: str, wanted: Collection[str]) -> bool:
    """Whether a name is one of these, or below one of them."""
    return "/" in wanted or any(
        name == each or (each.endswith("/") and name.startswith(each)) for each in wanted
    )
