"""The files of a baseline as objects of a store that puts an object as a whole.

The layout is that of a folder, so that one can be copied to the other. An update writes its
objects beside the old ones, under names with their hashes; then the journal is created, if none is
there: from there on the update has happened. Objects are copied into place, and the journal goes.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from qgate.baselines import _journal
from qgate.baselines._files import Stat, is_wanted
from qgate.baselines._journal import NAME as JOURNAL
from qgate.baselines._journal import Contents
from qgate.baselines._object_lock import NAME as LOCK
from qgate.baselines._object_lock import ObjectLock, created_anew
from qgate.baselines._object_store import (
    REMEDY,
    UNLISTED,
    Listing,
    ObjectListing,
    is_visible,
    listed,
    scheme,
    store_of,
    unlisted,
)
from qgate.baselines.manifest import NAME as MANIFEST
from qgate.errors import QgateError
from qgate.storage.places import changing, check_writable, reaching

if TYPE_CHECKING:
    from upath import UPath

_AT_ONCE = 8
_KEPT_BYTES, _NEIGHBOR_BYTES = 1 << 20, 1 << 17
_TRIES, _PAUSE_S = 100, 0.05


def staged_name(name: str, sha256: str) -> str:
    """Where content is written before it takes its place: no two writers meet there."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}.{file}.{sha256[:16]}.new"


class Objects:
    """The baseline below a URL. Nothing of a listing is kept between calls."""

    remedy = REMEDY

    def __init__(self, place: UPath, model: str) -> None:
        self.place, self.shown = place, str(place)
        self._model = model
        self._fs, self._root = store_of(place)
        self._kept = _kept_of(self.shown)
        root = shlex.quote(str(place.parent).rstrip("/"))
        self._lock = ObjectLock(
            self._fs,
            self._path(LOCK),
            f"the baselines in {self.shown!r} are",
            f"`qgate baselines unlock --baselines {root} --model {shlex.quote(model)}`.",
        )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # Reading --------------------------------------------------------------------------------------

    def read(self, wanted: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
        """A reader takes no lock: it looks again when something moved."""
        for _ in range(_TRIES):
            problem: Exception | None = None
            with reaching(self.shown):
                before = self._listing(wanted)
                try:
                    found, fresh = self._read_once(before, wanted)
                except (QgateError, FileNotFoundError) as error:
                    problem, fresh = error, True
                if not fresh or self._listing(wanted) == before:
                    if problem is None:
                        return found
                    raise problem
            time.sleep(_PAUSE_S)
        raise QgateError(f"the baselines in {self.shown!r} change all the time: run this again.")

    def _listing(self, wanted: Collection[str] = ()) -> Listing:
        if scheme(self.place) in UNLISTED:
            return self._asked(wanted)
        return listed(self._fs, self._root)

    def _asked(self, wanted: Collection[str]) -> Listing:
        """Name by name, where there is no listing."""
        if any(name.endswith("/") for name in wanted):
            raise unlisted(self.place)
        found = {}
        for name in {JOURNAL, MANIFEST, *wanted}:
            with contextlib.suppress(FileNotFoundError):
                found[name] = ObjectListing.of(self._fs.info(self._path(name)))
        return found

    def _read_once(
        self, listing: Listing, wanted: Collection[str]
    ) -> tuple[tuple[dict[str, bytes], list[str]], bool]:
        """What is read, and whether anything of it was asked of the store."""
        journal = self._journal(listing) or {}
        names = [name for name in listing if is_visible(name) and name not in journal]
        chosen = [name for name in names if is_wanted(name, wanted)]
        found, fresh = self._contents(listing, chosen)
        for name, sha256 in journal.items():
            if sha256 is not None:
                names.append(name)
                if is_wanted(name, wanted):
                    found[name] = self._held(listing, name, sha256)[1]
        return (dict(sorted(found.items())), sorted(names)), fresh or JOURNAL in listing

    def _contents(self, listing: Listing, names: Iterable[str]) -> tuple[dict[str, bytes], bool]:
        kept = {name: self._kept[name][1] for name in names if self._is_kept(listing, name)}
        missing = [name for name in names if name not in kept]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            more = self._neighbors(listing, missing)
            along = pool.map(self._get_along, more, (listing[name].size for name in more))
            sizes = (listing[name].size for name in missing)
            read = dict(zip(missing, pool.map(self._get, missing, sizes), strict=True))
            others = dict(zip(more, along, strict=True))
        for name, data in (read | others).items():
            if data is not None and listing[name].tag and len(data) <= _KEPT_BYTES:
                self._kept[name] = listing[name], data
        return kept | read, bool(read)

    def _neighbors(self, listing: Listing, names: Collection[str]) -> list[str]:
        """Small objects that are asked for next: the accepted errors of the other modes."""
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
            return self._get(name, size)
        except Exception:
            return None

    def _is_kept(self, listing: Listing, name: str) -> bool:
        return name in self._kept and self._kept[name][0] == listing[name]

    def _get(self, name: str, size: int = 0) -> bytes:
        """A small object by its range: s3fs asks how long it is where no range is given."""
        ranged = {"start": 0, "end": size} if 0 < size <= _KEPT_BYTES else {}
        return bytes(self._fs.cat_file(self._path(name), **ranged))

    def _journal(self, listing: Listing) -> dict[str, str | None] | None:
        if JOURNAL not in listing:
            return None
        return _journal.parsed(self._get(JOURNAL), f"{self.shown}/{JOURNAL}")

    def _held(self, listing: Listing, name: str, sha256: str) -> tuple[str, bytes]:
        """Where the content is that a journal promises, and the content."""
        for place in (staged_name(name, sha256), name):
            if place in listing or scheme(self.place) in UNLISTED:
                with contextlib.suppress(FileNotFoundError):
                    data = self._get(place)
                    if _journal.sha256_of(data) == sha256:
                        return place, data
        raise _journal.broken(f"{self.shown}/{JOURNAL}", name)

    def stats(self) -> Mapping[str, Stat]:
        with reaching(self.shown):
            if scheme(self.place) in UNLISTED:
                raise unlisted(self.place)
            listing = self._listing()
        return {n: Stat(of.size, of.modified) for n, of in listing.items() if is_visible(n)}

    def leftovers(self) -> list[str]:
        with reaching(self.shown):
            if scheme(self.place) in UNLISTED:
                return []
            return self._leftovers(self._listing())

    def _leftovers(self, listing: Listing) -> list[str]:
        found = [n for n in listing if _journal.LEFTOVER.fullmatch(n.rpartition("/")[2])]
        if JOURNAL in listing and self._journal(listing) is None:
            found.append(JOURNAL)
        return sorted(found)

    # Writing --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, timeout_s: float) -> Iterator[None]:
        check_writable(self.place)
        with contextlib.ExitStack() as stack:
            with changing():
                stack.enter_context(self._lock.held(timeout_s))
                self._recover()
            yield

    def replace(self, contents: Contents) -> None:
        with changing():
            self._replace(contents)

    def _replace(self, contents: Contents) -> None:
        hashes = _journal.hashes_of(contents)
        try:
            for name, content in contents.items():
                if content is not None:
                    self._put(staged_name(name, hashes[name] or ""), content)
            self._lock.check()
            self._promise(_journal.written(hashes))
        except BaseException:
            with contextlib.suppress(Exception):
                if not self.is_promised():
                    self._remove(self._leftovers(self._listing()))
            raise
        self._finish({n: sha and staged_name(n, sha) for n, sha in hashes.items()})
        self._remove(self._leftovers(self._listing()))

    def is_promised(self) -> bool:
        return JOURNAL in self._listing()

    def is_unfinished(self) -> bool:
        with reaching(self.shown):
            listing = self._listing()
            return JOURNAL in listing or bool(self._leftovers(listing))

    def unlock(self) -> str:
        check_writable(self.place)
        with reaching(self.shown):
            return self._lock.remove()

    def _promise(self, journal: bytes) -> None:
        """The moment of the update. An answer that was lost is asked for once more."""
        try:
            created_anew(self._fs, self._path(JOURNAL), journal)
        except Exception as error:
            with contextlib.suppress(Exception):
                if self._get(JOURNAL) == journal:
                    return
            raise error from error.__cause__

    def _recover(self) -> None:
        """Finish what an interrupted update has promised, and remove what it left."""
        listing = self._listing()
        journal = self._journal(listing)
        if journal is not None:
            held = {n: sha and self._held(listing, n, sha)[0] for n, sha in journal.items()}
            self._finish(held)
            listing = self._listing()
        self._remove(self._leftovers(listing))

    def _finish(self, places: Mapping[str, str | None]) -> None:
        """Copied by the store: of objects that another writer has cleared away nothing comes."""
        for name, place in places.items():
            if place is None:
                self._remove([name])
            elif place != name:
                self._fs.cp_file(self._path(place), self._path(name))
        self._remove([JOURNAL])

    def _put(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(self._path(name), content)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError, KeyError):
                self._fs.rm_file(self._path(name))


@functools.cache
def _kept_of(shown: str) -> dict[str, tuple[ObjectListing, bytes]]:  # noqa: ARG001
    """Small contents that this process has read, with what identified them in the listing."""
    return {}
