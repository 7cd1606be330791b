"""Files of a bucket that change as one: objects by content, and one manifest per generation.

`objects/SHA256` has the content of a file; `generations/NUMBER.json` lists the files of one state
with their hashes. The highest number is the current state. An update writes its objects and then
creates the next generation, which only one writer can: the second one plans again on top of it.
qgate never removes a generation, so that no number is used twice.

Files under their own names, as a copied folder has them, are read and not written.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import secrets
import shlex
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.storage.folders import Stamp
from qgate.storage.locations import check_writable, read_errors, store_and_path, write_errors
from qgate.storage.object_listing import (
    BUSY,
    REMEDY,
    UNLISTABLE,
    cannot_list,
    create_new,
    list_objects,
    probe_exclusive,
    scheme,
    stamp_of,
)
from qgate.storage.updates import (
    EVERYTHING,
    LOCK,
    OLD_UPDATE,
    VERSION,
    Contents,
    Entry,
    FileRules,
    Plan,
    T,
    entry_of,
    is_selected,
    is_visible,
    refuse_old_update,
    seal,
    sealed_files,
    sha256_of,
)

if TYPE_CHECKING:
    from upath import UPath

OBJECTS, GENERATIONS = "objects", "generations"
_AT_ONCE = 8
_CACHE_BYTES = 1 << 20
_TRIES, _PAUSE_S = 20, 0.05
_CACHE: dict[str, bytes] = {}
"""Small contents that this process has read, by hash."""


@dataclass(frozen=True)
class Generation:
    """One state: its files by name, with size and hash; number 0 has no files."""

    number: int
    files: Mapping[str, Entry]
    written: int = 0
    """Time in nanoseconds."""


class BucketFiles:
    """The files below a URL; every call lists the bucket anew."""

    remedy, tidied_by = REMEDY, "`qgate baselines prune`"

    def __init__(self, location: UPath, rules: FileRules, name: str) -> None:
        self._location, self._rules, self._url = location, rules, str(location)
        self._fs, self._root = store_and_path(location)
        root = shlex.quote(str(location.parent).rstrip("/"))
        self._migrate = f"`{rules.migrate.format(root, shlex.quote(name))}`"
        self._attempted: tuple[str, bytes] | None = None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _get(self, name: str, size: int = 0) -> bytes:
        """Read a small object by its range, as s3fs asks for the size of one without a range."""
        ranged = {"start": 0, "end": size} if 0 < size <= _CACHE_BYTES else {}
        return bytes(self._fs.cat_file(self._path(name), **ranged))

    # Generations ----------------------------------------------------------------------------------

    def _numbers(self) -> dict[int, Stamp]:
        """List generations by number, the lowest first."""
        if scheme(self._location) not in UNLISTABLE:
            stamps = list_objects(self._fs, self._path(GENERATIONS))
            names = sorted(name for name in stamps if re.fullmatch(r"\d{6,}\.json", name))
            return {int(name[:-5]): stamps[name] for name in sorted(names, key=len)}
        number, step = 0, 1  # numbers have no gaps
        while step:
            try:
                self._fs.info(self._path(_generation_name(number + step)))
                number, step = number + step, 2 * step
            except FileNotFoundError:
                step //= 2
        return {number: Stamp(0, 0)} if number else {}

    def _current(self) -> Generation:
        numbers = self._numbers()
        if not numbers:
            return Generation(0, {})
        *earlier, (number, stamp) = numbers.items()
        return self._generation(number, stamp, earlier[-1][0] if earlier else 0)

    def _generation(self, number: int, stamp: Stamp, previous: int = 0) -> Generation:
        name = _generation_name(number)
        url = f"{self._url}/{name}"
        key = f"{url} {stamp}"
        data = _CACHE.get(key) or self._get(name, stamp.size)
        if stamp.tag:
            _CACHE[key] = data
        files = sealed_files(data, url, self._rules)
        if files is None:
            earlier = f"the one before it is {_generation_name(previous)}" if previous else ""
            raise QgateError(
                f"{url!r} is damaged, and nothing of it is believed; "
                f"{earlier or 'there is none before it'}. Delete the damaged object to go back to "
                "that, and run the last update again."
            )
        present = {file: entry for file, entry in files.items() if entry is not None}
        return Generation(number, present, stamp.moment)

    # Reading --------------------------------------------------------------------------------------

    def read(
        self, selection: Collection[str], problems: list[str] | None = None
    ) -> tuple[dict[str, bytes], list[str]]:
        """Return the contents of the selected files and the names of all, from one state.

        Without a list for problems the first damaged or missing object is an error.
        """
        for _ in range(_TRIES):
            with read_errors(self._url):
                current = self._current()
                if not current.number:
                    return self._read_plain(selection)
                try:
                    return self._read(current, selection, problems)
                except FileNotFoundError as error:
                    if max(self._numbers(), default=0) == current.number:
                        raise QgateError(
                            f"{self._url}/{error.args[-1]} is missing. Restore it, or record it "
                            "again."
                        ) from None
            time.sleep(_PAUSE_S)
        raise QgateError(
            f"the {self._rules.plural} in {self._url!r} change all the time: run this again."
        )

    def _read(
        self, current: Generation, selection: Collection[str], problems: list[str] | None = None
    ) -> tuple[dict[str, bytes], list[str]]:
        names = [name for name in current.files if is_selected(name, selection)]
        cache = {} if selection == EVERYTHING else _CACHE
        missing = [name for name in names if current.files[name][1] not in cache]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            downloads = list(pool.map(partial(self._content, current, problems), missing))
        contents = {name: cache[current.files[name][1]] for name in names if name not in missing}
        contents |= {
            n: data for n, data in zip(missing, downloads, strict=True) if data is not None
        }
        return dict(sorted(contents.items())), sorted(current.files)

    def _content(self, current: Generation, problems: list[str] | None, name: str) -> bytes | None:
        """Read the content of a file; a damaged or missing object is a problem, or an error."""
        size, sha256 = current.files[name]
        path = f"{OBJECTS}/{sha256}"
        try:
            data = self._get(path, size)
        except FileNotFoundError:
            if problems is None:
                raise FileNotFoundError(2, f"{path} of {name}") from None
            problems.append(f"{self._url}/{path} of {name} is missing")
            return None
        if sha256_of(data) != sha256:
            problem = (
                f"{self._url}/{path} of {name} is damaged: its SHA-256 is {sha256_of(data)[:12]}…"
            )
            if problems is None:
                raise QgateError(f"{problem}. Restore it, or record {name} again.")
            problems.append(problem)
            return None
        if size <= _CACHE_BYTES:
            _CACHE[sha256] = data
        return data

    def stats(self) -> dict[str, Stamp]:
        """Return sizes and times of all files."""
        with read_errors(self._url):
            current = self._current()
            if not current.number:
                plain = self._plain(EVERYTHING)
                return {name: of for name, of in plain.items() if is_visible(name)}
        return {
            name: Stamp(size, current.written, sha256)
            for name, (size, sha256) in current.files.items()
        }

    def leftovers(self) -> list[str]:
        """List objects of no generation, left by interrupted updates."""
        if scheme(self._location) in UNLISTABLE:
            return []
        with read_errors(self._url):
            numbers = self._numbers()
            return sorted(self._unused(numbers)) if numbers else []

    def _unused(self, numbers: Mapping[int, Stamp]) -> set[str]:
        """Return objects of none of these generations, and files of the old layout."""
        names = set(list_objects(self._fs, self._root)) - self._used(numbers)
        return {name for name in names if not name.startswith(f"{GENERATIONS}/")}

    def _used(self, numbers: Mapping[int, Stamp]) -> set[str]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            generations = list(pool.map(self._generation, numbers, numbers.values()))
        return {f"{OBJECTS}/{entry[1]}" for one in generations for entry in one.files.values()}

    # Writing --------------------------------------------------------------------------------------

    def change(self, plan: Plan[T], timeout_s: float) -> T:
        """Write the contents of a plan, all or nothing; plan again after an update by others."""
        check_writable(self._location)
        self._attempted = None
        end = time.monotonic() + timeout_s
        while True:
            with read_errors(self._url):
                current = self._current()
                if not current.number and self._plain(()):
                    raise QgateError(
                        f"the {self._rules.plural} in {self._url!r} have the layout of a folder, "
                        f"which is read in a bucket and not written: run {self._migrate} once."
                    )
                contents, result = plan(partial(self._read, current))
            if not contents:
                return result
            with write_errors():
                probe_exclusive(self._fs, self._root, self._rules.plural)
                if self._advance(current, contents):
                    return result
            if time.monotonic() >= end:
                raise QgateError(
                    f"the {self._rules.plural} in {self._url!r} were updated by somebody else all "
                    f"the time, and this update did not come in between within {timeout_s:g} s. "
                    "Run this again."
                )
            time.sleep(_PAUSE_S * (1 + random.random()))

    def _advance(self, current: Generation, contents: Contents) -> bool:
        """Write the next generation; False where another writer was first."""
        entries = {n: entry_of(data) for n, data in contents.items() if data is not None}
        objects = {f"{OBJECTS}/{entry[1]}": contents[name] for name, entry in entries.items()}
        self._put(objects)
        files = {n: entry for n, entry in current.files.items() if n not in contents} | entries
        if not self._create(current.number + 1, files):
            for name in objects.keys() - self._used(_last_two(self._numbers())):
                self._remove(name)
            return False
        present = list_objects(self._fs, self._root)  # another process may have pruned meanwhile
        self._put({name: data for name, data in objects.items() if name not in present})
        return True

    def _put(self, contents: Contents) -> None:
        for name, data in contents.items():
            self._fs.pipe_file(self._path(name), data)

    def _create(self, number: int, files: Mapping[str, Entry]) -> bool:
        """Create a generation, and look whether it exists where the answer was lost."""
        record = {
            "version": VERSION,
            "files": dict(sorted(files.items())),
            "writer": secrets.token_hex(8),
            "sha256": seal(VERSION, files),
        }
        name, data = _generation_name(number), json.dumps(record, indent=1).encode()
        self._attempted = name, data
        try:
            create_new(self._fs, self._path(name), data, self._rules.plural)
        except Exception as error:
            with contextlib.suppress(Exception):
                if self._get(name) == data:
                    return True
            if isinstance(error, FileExistsError) or BUSY in f"{error!r} {error.__cause__!r}":
                return False
            raise error from error.__cause__
        return True

    def is_promised(self) -> bool:
        """Tell whether the last generation that was tried exists after all."""
        if self._attempted is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            return self._get(self._attempted[0]) == self._attempted[1]
        return False

    def finish(self) -> None:
        """Do nothing: a generation is complete when it exists."""

    def settle(self, timeout_s: float) -> list[str]:  # noqa: ARG002
        """Remove objects that neither the current nor the previous state needs.

        Objects that a new generation needs meanwhile are restored. Returns those of no state.
        """
        check_writable(self._location)
        leftovers = self.leftovers()
        with write_errors():
            numbers = self._numbers()
            unused = self._unused(_last_two(numbers)) if numbers else set()
            contents = {name: self._get(name) for name in unused}
            for name in unused:
                self._remove(name)
            fresh = {number: of for number, of in self._numbers().items() if number not in numbers}
            self._put({name: contents[name] for name in unused & self._used(fresh)})
        return leftovers

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, KeyError):
            self._fs.rm_file(self._path(name))

    # The layout of a folder -----------------------------------------------------------------------

    def _plain(self, selection: Collection[str]) -> dict[str, Stamp]:
        if scheme(self._location) not in UNLISTABLE:
            stamps = list_objects(self._fs, self._root)
            return {n: of for n, of in stamps.items() if not n.startswith(f"{OBJECTS}/")}
        if any(name.endswith("/") for name in selection):
            raise cannot_list(self._location, self._rules.plural)
        files = {}
        for name in {OLD_UPDATE, self._rules.first, *selection}:
            with contextlib.suppress(FileNotFoundError):
                files[name] = stamp_of(self._fs.info(self._path(name)))
        return files

    def _read_plain(self, selection: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
        files = self._plain(selection)
        refuse_old_update(files, self._url, self._rules)
        names = sorted(filter(is_visible, files))
        selected = [name for name in names if is_selected(name, selection)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            contents = pool.map(self._get, selected, (files[name].size for name in selected))
            return dict(zip(selected, contents, strict=True)), names

    def unlock(self) -> str:
        """Remove the lock of an earlier qgate, and return its holder."""
        check_writable(self._location)
        with read_errors(self._url):
            try:
                holder = self._get(LOCK).decode("utf-8", "replace")
            except FileNotFoundError:
                return ""
            self._remove(LOCK)
        return holder.rpartition(", ")[0][:160] or "another process"

    def migrate(self) -> int:
        """Turn the layout of a folder into a first generation; return the number of its files."""
        check_writable(self._location)
        with read_errors(self._url):
            current, old = self._current(), self._plain(())
            if LOCK in old and not current.number:
                raise QgateError(
                    f"'{self._url}/{LOCK}' says that an earlier qgate updates these "
                    f"{self._rules.plural}. Wait for it, or remove it with `qgate baselines "
                    "unlock`."
                )
            names = [name for name in old if self._rules.files.fullmatch(name)]
            contents = {} if current.number else self._read_plain(names)[0]
        with write_errors():
            if contents:
                probe_exclusive(self._fs, self._root, self._rules.plural)
                if not self._advance(current, contents):
                    raise QgateError(f"somebody else migrated {self._url!r} at this moment.")
            for name in sorted(names, key=lambda name: (name == self._rules.first, name)):
                self._remove(name)
        return len(contents)


def _last_two(numbers: Mapping[int, Stamp]) -> dict[int, Stamp]:
    return dict(list(numbers.items())[-2:])


def _generation_name(number: int) -> str:
    return f"{GENERATIONS}/{number:06d}.json"
