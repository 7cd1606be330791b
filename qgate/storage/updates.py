"""Files of a folder of this machine that change as one, even if a process is killed.

An update is first written as one file, `.update`, which appears in one step: from then on it
counts. Then each of its files is replaced, the manifest last, and `.update` is removed. Readers
take the new files from it while it exists; the next writer finishes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qgate.errors import QgateError
from qgate.records import validate
from qgate.storage.files import lock, write_all
from qgate.storage.folders import Stamp
from qgate.storage.foreign import MOST_RECORD, MOST_TENSORS, read_foreign
from qgate.storage.locks import open_handle, sync_folder
from qgate.storage.removing import refuse_links, remove_files

UPDATE, LOCK = ".update", ".lock"
VERSION = 1
EVERYTHING = ("/",)
_LEFTOVER = re.compile(r"\..*\.new")
_TRIES, _PAUSE_S = 200, 0.01

T = TypeVar("T")
Contents = Mapping[str, bytes | None]
Entry = tuple[int, str]
"""Size and SHA-256 of a file."""
Read = Callable[[Collection[str]], tuple[dict[str, bytes], list[str]]]
"""Return the contents of the selected files, and the names of all; `a/` selects all below it."""
Plan = Callable[[Read], tuple[Contents, T]]
"""Read the current files and return new contents (None: remove the file), and a result."""


@dataclass(frozen=True)
class FileRules:
    """The names of files of one kind, and words for them: `plural` is `baselines`."""

    plural: str
    singular: str
    files: re.Pattern[str]
    """The names that an update may write."""
    first: str
    """The file that exists if any does; it is replaced last."""
    verify: str
    """The command that finds damage."""


class LocalFiles:
    """The files of one folder of this machine, changed by one writer at a time.

    A failure to write is an OSError, a failure to read a QgateError. A reader takes no lock, as it
    may not be allowed to write: it reads again when a file changed meanwhile.
    """

    def __init__(self, folder: Path, rules: FileRules) -> None:
        self._folder, self._rules, self._label = folder, rules, str(folder)

    # Reading --------------------------------------------------------------------------------------

    def read(self, selection: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
        """Return the contents of the selected files and the names of all, from one state."""
        for _ in range(_TRIES):
            problem: Exception | None = None
            with self._reading():
                before = self._listing()
                try:
                    snapshot = self._read_once(before, selection)
                except (QgateError, OSError) as error:
                    problem = error
                if self._listing() == before:
                    if problem is None:
                        return snapshot
                    raise problem
            time.sleep(_PAUSE_S)
        raise QgateError(
            f"the {self._rules.plural} in {self._label!r} change all the time: run this again."
        )

    def _read_once(
        self, listing: Mapping[str, Stamp], selection: Collection[str]
    ) -> tuple[dict[str, bytes], list[str]]:
        update = self._update(listing) or {}
        names = sorted(name for name in {*listing, *update} if is_visible(name))
        names = [name for name in names if update.get(name, b"") is not None]
        contents = {
            name: data if (data := update.get(name)) is not None else self._get(name)
            for name in names
            if is_selected(name, selection)
        }
        return contents, names

    def _get(self, name: str) -> bytes:
        has_tensors = name == UPDATE or name.endswith(".safetensors")
        limit = MOST_TENSORS if has_tensors else MOST_RECORD
        return read_foreign(self._folder / name, self._rules.plural, limit)

    def _update(self, names: Collection[str]) -> dict[str, bytes | None] | None:
        """Read an update that counts and is not finished; None where there is none."""
        if UPDATE not in names:
            return None
        return read_update(self._get(UPDATE), f"{self._label}/{UPDATE}", self._rules)

    def _names(self) -> list[str]:
        return [path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*")]

    def _listing(self) -> dict[str, Stamp]:
        """List files with stamps, which change with every update."""
        return {
            name: _stamp(self._folder / name)
            for name in sorted(self._names())
            if is_visible(name) or name == UPDATE
            if not (self._folder / name).is_dir()
        }

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self._label
            raise QgateError(f"{str(where)!r} cannot be read: {error.strerror}.") from None

    def stats(self) -> dict[str, Stamp]:
        """Return sizes and times of all visible files."""
        with self._reading():
            return {name: of for name, of in self._listing().items() if is_visible(name)}

    def leftovers(self) -> list[str]:
        """List files that interrupted updates have left and that do not count."""
        with self._reading():
            names = self._names()
            leftovers = [name for name in names if _LEFTOVER.fullmatch(name.rpartition("/")[2])]
            if UPDATE in names:
                with contextlib.suppress(FileNotFoundError):
                    leftovers += [UPDATE] if self._update(names) is None else []
            return sorted(leftovers)

    def is_promised(self) -> bool:
        """Tell whether an update counts and is not finished."""
        return (self._folder / UPDATE).exists()

    # Writing --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock, after earlier updates are finished and their leftovers removed."""
        _make_folder(self._folder)
        subject = f"the {self._rules.plural} in {self._label!r} are"
        with lock(self._folder / LOCK, timeout_s, subject):
            update = self._update(self._names())
            if update is not None:
                self._finish(update)
            self._remove(self.leftovers())
            yield

    def change(self, plan: Plan[T], timeout_s: float) -> T:
        """Write the contents of a plan, all or nothing."""
        with self.changing(timeout_s):
            contents, result = plan(self.read)
            if contents:
                self._replace(contents)
            return result

    def finish(self) -> None:
        """Finish an interrupted update, if no other process is writing."""
        self.settle(0)

    def settle(self, timeout_s: float) -> list[str]:
        """Finish an interrupted update; remove its leftovers and return them."""
        leftovers = self.leftovers()
        with self._reading():
            names = self._names()
        if leftovers or not {UPDATE, LOCK}.isdisjoint(names):
            with self.changing(timeout_s):
                pass
        return leftovers

    def _replace(self, contents: Contents) -> None:
        try:
            for name in contents:
                _check_folder((self._folder / name).parent)
            self._stage(UPDATE, write_update(contents))
            sync_folder(self._folder)
            self._move(UPDATE)
        except BaseException:
            with contextlib.suppress(Exception):
                if not self.is_promised():
                    self._remove(self.leftovers())
            raise
        self._finish(contents)

    def _finish(self, contents: Contents) -> None:
        """Replace the files of an update, the manifest last."""
        sync_folder(self._folder)
        for name in sorted(contents, key=lambda name: (name == self._rules.first, name)):
            content = contents[name]
            if content is None:
                self._remove([name])
            else:
                self._stage(name, content)
                self._move(name)
        for parent in {(self._folder / name).parent for name in contents}:
            if parent.is_dir():
                sync_folder(parent)
        self._remove([UPDATE])
        with contextlib.suppress(
            OSError
        ):  # without it the update may come back, and is finished again
            sync_folder(self._folder)

    def _stage(self, name: str, content: bytes) -> None:
        """Write a file beside its target, and wait until it is on the disk."""
        path = _staged(self._folder / name)
        _check_folder(path.parent)
        path.unlink(missing_ok=True)  # a link would lead the write elsewhere
        handle = open_handle(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _move(self, name: str) -> None:
        os.replace(_staged(self._folder / name), self._folder / name)  # noqa: PTH105

    def _remove(self, names: Iterable[str]) -> None:
        remove_files(self._folder, *names)


def _staged(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _stamp(path: Path) -> Stamp:
    """Return the stamp of a file; that of a broken link is zero."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return Stamp(0, 0)
    return Stamp(stat.st_size, stat.st_mtime_ns, str(stat.st_ino))


def _check_folder(folder: Path) -> None:
    """Make a folder to write to; refuse a link."""
    refuse_links(folder.parent, folder.name, doing="written")
    _make_folder(folder)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, and wait until they are on the disk."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)  # noqa: PTH102
        sync_folder(folder.parent)


def is_visible(name: str) -> bool:
    """Tell whether a file is not hidden, as locks and updates are."""
    return not name.rpartition("/")[2].startswith(".")


def is_selected(name: str, selection: Collection[str]) -> bool:
    """Tell whether a name is in a selection, or below a folder in it."""
    return "/" in selection or any(
        name == chosen or (chosen.endswith("/") and name.startswith(chosen)) for chosen in selection
    )


# An update as one file ---------------------------------------------------------------------------


def write_update(contents: Contents) -> bytes:
    """Return a line that lists files with sizes and hashes, followed by their contents."""
    files = {name: None if data is None else entry_of(data) for name, data in contents.items()}
    record = {"version": VERSION, "files": files, "sha256": seal(VERSION, files)}
    return b"".join([json.dumps(record).encode(), b"\n", *filter(None, contents.values())])


def read_update(data: bytes, label: str, rules: FileRules) -> dict[str, bytes | None] | None:
    """Return the contents in an update; None for one that is incomplete."""
    head, _, remaining = data.partition(b"\n")
    files = sealed_files(head, label, rules)
    if files is None:
        return None
    contents: dict[str, bytes | None] = {}
    for name, entry in files.items():
        size, sha256 = entry or (0, None)
        contents[name], remaining = (remaining[:size] if entry else None), remaining[size:]
        if sha256 not in (None, sha256_of(contents[name] or b"")):
            raise QgateError(
                f"{label!r} is the rest of an update that was cut off, and {name!r} in it has been "
                f"changed since. Delete that file to keep the {rules.singular} that is there, and "
                f"check it with `{rules.verify}`."
            )
    return contents


def sealed_files(text: bytes, label: str, rules: FileRules) -> dict[str, Entry | None] | None:
    """Return the files that a JSON text lists; None for an incomplete text."""
    try:
        record = json.loads(text)
        version, files = record["version"], dict(record["files"])
        if record["sha256"] != seal(version, files):
            return None
        if version != VERSION:
            raise QgateError(
                f"{label!r} is the rest of an update of version {version}, and this qgate reads "
                f"version {VERSION}: finish it with the qgate that wrote it, or delete it to keep "
                f"the {rules.singular} that is there."
            )
        validate(files, dict[str, Entry | None])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if all(rules.files.fullmatch(name) for name in files):
        return files
    raise QgateError(f"{label!r} names files that are none of a {rules.singular}: delete it.")


def entry_of(data: bytes) -> Entry:
    return len(data), sha256_of(data)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(version: object, files: object) -> str:
    """Return the hash that proves a list of files complete."""
    return sha256_of(json.dumps([version, files], sort_keys=True).encode("utf-8"))
