"""Several files of a folder changed as one, whatever happens in between.

New files are written beside the old ones, under hidden names. Then the journal, which lists them
with their hashes, appears in one step: from there on the update has happened. Files are moved into
place, and the journal goes. Whoever reads while a journal is there reads the new files wherever
they lie; the next writer moves what is left. Without a journal, leftovers mean nothing.

The layout is the same on this machine and in a store, so that one can be copied to the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime

from qgate.errors import QgateError

JOURNAL, LOCK = ".journal.json", ".lock"
VERSION = 1
EVERYTHING = ("/",)
_LEFTOVER = re.compile(r"\..*\.new")

Contents = Mapping[str, bytes | None]


@dataclass(frozen=True)
class FileRules:
    """The names that files of one kind have, and the words for them: `what` is `baselines`."""

    what: str
    one: str
    files: re.Pattern[str]
    """The names that a journal may have."""
    first: str
    """The name that is there if anything is."""
    check_version: Callable[[str, int, int], None]
    verify: str
    """The command that looks for damage."""
    unlock: str
    """The command that removes a lock; a folder and a name are put into it."""


@dataclass(frozen=True)
class ListedFile:
    """A file as it is listed; with another content, or written again, it differs."""

    size: int
    tag: tuple[str, ...]
    times: tuple[str, ...]
    modified: datetime | None


Listing = Mapping[str, ListedFile]


class FileGroup(ABC):
    """The files of one folder, by their names below it, which are changed by one writer at a time.

    A failure to write is an OSError, a failure to read a QgateError.
    """

    remedy: str
    """The advice for an update that could not be written."""
    cut_off: tuple[str, ...]
    """Names that say that an update did not end."""
    moved: type[OSError]
    """The error of reading while files are moved."""
    tries: int
    pause_s: float

    def __init__(self, shown: str, rules: FileRules) -> None:
        self.shown, self.rules = shown, rules

    # What the place can do ------------------------------------------------------------------------

    @abstractmethod
    def listing(self, wanted: Collection[str] = ()) -> Listing:
        """List what moves when an update happens; `wanted` are names that will be asked for."""

    @abstractmethod
    def names(self, listing: Listing | None = None) -> Iterable[str]:
        """List all files, also those that updates have left; a listing of now may tell."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Read one file, or raise a FileNotFoundError."""

    @abstractmethod
    def contents(self, listing: Listing, names: list[str]) -> tuple[dict[str, bytes], bool]:
        """Read files, and tell whether any was read anew."""

    @abstractmethod
    def staged(self, name: str, sha256: str) -> str:
        """Return the name of a file before it takes its place."""

    @abstractmethod
    def check(self, name: str) -> None:
        """Refuse a name that nothing may be written to."""

    @abstractmethod
    def stage(self, name: str, sha256: str, content: bytes) -> None:
        """Write a file under its name before it takes its place."""

    @abstractmethod
    def promise(self, journal: bytes) -> None:
        """Let the journal appear: the moment of the update."""

    @abstractmethod
    def move(self, staged: str, name: str) -> None:
        """Let a file take its place."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they are there."""

    @abstractmethod
    def locked(self, timeout_s: float) -> AbstractContextManager[None]:
        """Hold the lock of the only writer."""

    @abstractmethod
    def unlock(self) -> str:
        """Remove the lock of a writer that is gone, and say whose it was."""

    def reading(self) -> AbstractContextManager[None]:
        """Turn failures into a QgateError."""
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        """Turn failures into an OSError."""
        return nullcontext()

    @abstractmethod
    def sync(self, folders: Collection[str]) -> None:
        """Wait until the entries of folders are on the disk."""

    def may_have(self, listing: Listing, name: str) -> bool:  # noqa: ARG002
        """Tell whether it is worth asking for a file."""
        return True

    # Reading --------------------------------------------------------------------------------------

    def read(self, wanted: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
        """Return the contents of the wanted files and the names of all, from one moment.

        A name that ends in `/` means all that is below it. A reader takes no lock, since it may not
        be allowed to write: it looks again when something moved.
        """
        for _ in range(self.tries):
            problem: Exception | None = None
            with self.reading():
                before = self.listing(wanted)
                try:
                    found, fresh = self._read_once(before, wanted)
                except (QgateError, self.moved) as error:
                    problem, fresh = error, True
                if not fresh or self.listing(wanted) == before:
                    if problem is None:
                        return found
                    raise problem
            time.sleep(self.pause_s)
        raise QgateError(
            f"the {self.rules.what} in {self.shown!r} change all the time: run this again."
        )

    def _read_once(
        self, listing: Listing, wanted: Collection[str]
    ) -> tuple[tuple[dict[str, bytes], list[str]], bool]:
        """Return what is read, and whether anything of it was read anew."""
        journal = self._journal(listing) or {}
        names = [name for name in listing if is_visible(name) and name not in journal]
        found, fresh = self.contents(listing, [n for n in names if _is_wanted(n, wanted)])
        for name, sha256 in journal.items():
            if sha256 is not None:
                names.append(name)
                if _is_wanted(name, wanted):
                    found[name] = self._held(listing, name, sha256)[1]
        return (dict(sorted(found.items())), sorted(names)), fresh or JOURNAL in listing

    def _journal(self, listing: Listing) -> dict[str, str | None] | None:
        """Read the hashes of new contents by name, None for files that go; None without any."""
        if JOURNAL not in listing:
            return None
        return parsed(self.get(JOURNAL), f"{self.shown}/{JOURNAL}", self.rules)

    def _held(self, listing: Listing, name: str, sha256: str) -> tuple[str, bytes]:
        """Return where the content is that a journal promises, and the content."""
        for place in (self.staged(name, sha256), name):
            if self.may_have(listing, place):
                with contextlib.suppress(FileNotFoundError):
                    data = self.get(place)
                    if sha256_of(data) == sha256:
                        return place, data
        journal = f"{self.shown}/{JOURNAL}"
        raise QgateError(
            f"{journal!r} is the rest of an update that was cut off, and {name!r} has been changed "
            f"since. Delete that file to keep the {self.rules.one} that is there, and check it "
            f"with `{self.rules.verify}`."
        )

    def stats(self) -> Listing:
        """Return sizes and times of all files but machinery."""
        with self.reading():
            return {name: of for name, of in self.listing().items() if is_visible(name)}

    def leftovers(self) -> list[str]:
        """List what updates that were cut off have left, and which counts for nothing."""
        with self.reading():
            return self._leftovers(set(self.names()))

    def _leftovers(self, names: Collection[str]) -> list[str]:
        found = [name for name in names if _LEFTOVER.fullmatch(name.rpartition("/")[2])]
        if JOURNAL in names:
            with contextlib.suppress(FileNotFoundError):
                if parsed(self.get(JOURNAL), f"{self.shown}/{JOURNAL}", self.rules) is None:
                    found.append(JOURNAL)
        return sorted(found)

    def is_promised(self) -> bool:
        """Tell whether there is an update that counts and is not all in its place."""
        return JOURNAL in self.names()

    def is_unfinished(self) -> bool:
        """Tell whether an update that was cut off has left anything, or one is being made now."""
        with self.reading():
            names = set(self.names())
            return not names.isdisjoint(self.cut_off) or bool(self._leftovers(names))

    # Writing --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock, with all updates before finished and their leftovers removed."""
        with contextlib.ExitStack() as stack:
            with self.writing():
                stack.enter_context(self.locked(timeout_s))
                self._recover()
            yield

    def _recover(self) -> None:
        """Finish what an interrupted update has promised, and remove what it left."""
        listing = self.listing()
        journal = self._journal(listing)
        if journal is not None:
            self._finish({n: sha and self._held(listing, n, sha)[0] for n, sha in journal.items()})
        self.remove(self._leftovers(set(self.names(listing if journal is None else None))))

    def replace(self, contents: Contents) -> None:
        """Write and remove files inside `changing`: all, or none where the journal is not there."""
        with self.writing():
            hashes = hashes_of(contents)
            try:
                for name, content in contents.items():
                    self.check(name)
                    if content is not None:
                        self.stage(name, hashes[name] or "", content)
                self.sync(_parents(contents))
                self.promise(written(hashes))
            except BaseException:
                with contextlib.suppress(Exception):
                    if not self.is_promised():
                        self.remove(self._leftovers(set(self.names())))
                raise
            self._finish({name: sha and self.staged(name, sha) for name, sha in hashes.items()})
            self.remove(self._leftovers(set(self.names())))

    def _finish(self, places: Mapping[str, str | None]) -> None:
        """Move files from where they are, or remove those that are nowhere."""
        self.sync([""])
        for name, place in places.items():
            if place is None:
                self.remove([name])
            elif place != name:
                self.move(place, name)
        self.sync(_parents(places))
        self.remove([JOURNAL])
        with contextlib.suppress(OSError):  # a journal that comes back asks for what is there
            self.sync([""])


def _parents(names: Iterable[str]) -> set[str]:
    return {name.rpartition("/")[0] for name in names}


def is_visible(name: str) -> bool:
    """Tell whether a file is no machinery."""
    return not name.rpartition("/")[2].startswith(".")


def _is_wanted(name: str, wanted: Collection[str]) -> bool:
    """Tell whether a name is one of these, or below one of them."""
    return "/" in wanted or any(
        name == each or (each.endswith("/") and name.startswith(each)) for each in wanted
    )


# The journal -------------------------------------------------------------------------------------


def parsed(data: bytes, shown: str, rules: FileRules) -> dict[str, str | None] | None:
    """Return the hashes in a journal; None for one that was not written to its end."""
    try:
        record = json.loads(data)
        version, files = record["version"], dict(record["files"])
        if record["sha256"] != seal(version, files):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    rules.check_version(shown, version, VERSION)
    if all(rules.files.fullmatch(name) for name in files):
        return files
    raise QgateError(f"{shown!r} names files that are none of a {rules.one}: delete it.")


def written(hashes: Mapping[str, str | None]) -> bytes:
    """Return the file of a journal."""
    record = {"version": VERSION, "files": dict(hashes), "sha256": seal(VERSION, dict(hashes))}
    return json.dumps(record, indent=1).encode("utf-8")


def hashes_of(contents: Contents) -> dict[str, str | None]:
    """Return what a journal says of the contents to come."""
    return {name: None if data is None else sha256_of(data) for name, data in contents.items()}


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(version: object, files: object) -> str:
    """Return the hash by which a journal is known to be whole."""
    return sha256_of(json.dumps([version, files], sort_keys=True).encode("utf-8"))
