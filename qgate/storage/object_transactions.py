"""Objects of a store that are changed as one.

The store has to put an object as a whole. An update writes its objects under names with their
hashes, so that no two writers meet there; the journal is created, if none is there.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from qgate.storage.object_listing import (
    REMEDY,
    UNLISTED,
    entry_of,
    listed,
    scheme,
    unlisted,
)
from qgate.storage.object_locks import ObjectLock, created_anew
from qgate.storage.places import changing, check_writable, reaching, store_of
from qgate.storage.transactions import (
    JOURNAL,
    LOCK,
    FileGroup,
    FileRules,
    ListedFile,
    Listing,
    is_visible,
)

if TYPE_CHECKING:
    from upath import UPath

_AT_ONCE = 8
_KEPT_BYTES, _NEIGHBOR_BYTES = 1 << 20, 1 << 17


class ObjectGroup(FileGroup):
    """The files below a URL. Nothing of a listing is kept between calls."""

    remedy = REMEDY
    cut_off = (JOURNAL,)
    moved = FileNotFoundError
    tries, pause_s = 100, 0.05

    def __init__(self, place: UPath, rules: FileRules, name: str) -> None:
        super().__init__(str(place), rules)
        self._place = place
        self._fs, self._root = store_of(place)
        self._kept = _kept_of(self.shown)
        root = shlex.quote(str(place.parent).rstrip("/"))
        self._lock = ObjectLock(
            self._fs,
            self._path(LOCK),
            f"the {rules.what} in {self.shown!r} are",
            f"`{rules.unlock.format(root, shlex.quote(name))}`.",
            rules.what,
        )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @property
    def _is_listed(self) -> bool:
        return scheme(self._place) not in UNLISTED

    def reading(self) -> AbstractContextManager[None]:
        return reaching(self.shown)

    def writing(self) -> AbstractContextManager[None]:
        return changing()

    # Reading --------------------------------------------------------------------------------------

    def listing(self, wanted: Collection[str] = ()) -> Listing:
        if self._is_listed:
            return listed(self._fs, self._root)
        if any(name.endswith("/") for name in wanted):
            raise unlisted(self._place, self.rules.what)
        found = {}
        for name in {JOURNAL, self.rules.first, *wanted}:
            with contextlib.suppress(FileNotFoundError):
                found[name] = entry_of(self._fs.info(self._path(name)))
        return found

    def names(self, listing: Listing | None = None) -> Iterable[str]:
        return self.listing() if listing is None else listing

    def may_have(self, listing: Listing, name: str) -> bool:
        return name in listing or not self._is_listed

    def contents(self, listing: Listing, names: list[str]) -> tuple[dict[str, bytes], bool]:
        kept = {name: self._kept[name][1] for name in names if self._is_kept(listing, name)}
        missing = [name for name in names if name not in kept]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            more = self._neighbors(listing, missing)
            along = pool.map(self._get_along, more, (listing[name].size for name in more))
            sizes = (listing[name].size for name in missing)
            read = dict(zip(missing, pool.map(self.get, missing, sizes), strict=True))
            others = dict(zip(more, along, strict=True))
        for name, data in (read | others).items():
            if data is not None and listing[name].tag and len(data) <= _KEPT_BYTES:
                self._kept[name] = listing[name], data
        return kept | read, bool(read)

    def _neighbors(self, listing: Listing, names: Collection[str]) -> list[str]:
        """Return small objects that are asked for next, as they lie in the same folder."""
        beside = {name.rpartition("/")[0] for name in names} - {""}
        return [
            name
            for name, entry in listing.items()
            if name.rpartition("/")[0] in beside
            and is_visible(name)
            and name not in names
            and entry.tag
            and entry.size <= _NEIGHBOR_BYTES
            and not self._is_kept(listing, name)
        ]

    def _get_along(self, name: str, size: int) -> bytes | None:
        try:
            return self.get(name, size)
        except Exception:
            return None

    def _is_kept(self, listing: Listing, name: str) -> bool:
        return name in self._kept and self._kept[name][0] == listing[name]

    def get(self, name: str, size: int = 0) -> bytes:
        """Read a small object by its range: s3fs asks how long it is where no range is given."""
        ranged = {"start": 0, "end": size} if 0 < size <= _KEPT_BYTES else {}
        return bytes(self._fs.cat_file(self._path(name), **ranged))

    def stats(self) -> Listing:
        if not self._is_listed:
            raise unlisted(self._place, self.rules.what)
        return super().stats()

    def leftovers(self) -> list[str]:
        return super().leftovers() if self._is_listed else []

    # Writing --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        check_writable(self._place)
        with self._lock.held(timeout_s):
            yield

    def unlock(self) -> str:
        check_writable(self._place)
        with self.reading():
            return self._lock.remove()

    def staged(self, name: str, sha256: str) -> str:
        folder, slash, file = name.rpartition("/")
        return f"{folder}{slash}.{file}.{sha256[:16]}.new"

    def check(self, name: str) -> None:
        """Allow all: a store has no links."""

    def sync(self, folders: Collection[str]) -> None:
        """Do nothing: an object is there when the store says so."""

    def stage(self, name: str, sha256: str, content: bytes) -> None:
        self._fs.pipe_file(self._path(self.staged(name, sha256)), content)

    def promise(self, journal: bytes) -> None:
        """Create the journal; an answer that was lost is asked for once more."""
        self._lock.check()
        try:
            created_anew(self._fs, self._path(JOURNAL), journal, self.rules.what)
        except Exception as error:
            with contextlib.suppress(Exception):
                if self.get(JOURNAL) == journal:
                    return
            raise error from error.__cause__

    def move(self, staged: str, name: str) -> None:
        """Copy by the store: of objects that another writer has cleared away nothing comes."""
        self._fs.cp_file(self._path(staged), self._path(name))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError, KeyError):
                self._fs.rm_file(self._path(name))


@functools.cache
def _kept_of(shown: str) -> dict[str, tuple[ListedFile, bytes]]:  # noqa: ARG001
    """Return small contents that this process has read, with what identified them."""
    return {}
