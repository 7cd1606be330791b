"""Files of this machine that are changed as one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from pathlib import Path

from qgate.errors import QgateError
from qgate.storage.files import lock
from qgate.storage.transactions import (
    JOURNAL,
    LOCK,
    FileGroup,
    FileRules,
    ListedFile,
    Listing,
    is_visible,
)


class LocalGroup(FileGroup):
    """Each file is on the disk before the journal is, and each move before the journal goes."""

    remedy = "make room or the folder writable"
    cut_off = (JOURNAL, LOCK)
    moved = OSError
    tries, pause_s = 200, 0.01

    def __init__(self, folder: Path, rules: FileRules) -> None:
        super().__init__(str(folder), rules)
        self._folder = folder

    def names(self, listing: Listing | None = None) -> Iterator[str]:  # noqa: ARG002
        for path in sorted(self._folder.rglob("*")):
            yield path.relative_to(self._folder).as_posix()

    def listing(self, wanted: Collection[str] = ()) -> Listing:  # noqa: ARG002
        found = {}
        for name in self.names():
            path = self._folder / name
            if (is_visible(name) or name == JOURNAL) and not path.is_dir():
                found[name] = _entry(path)
        return found

    def get(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def contents(self, listing: Listing, names: list[str]) -> tuple[dict[str, bytes], bool]:  # noqa: ARG002
        return {name: self.get(name) for name in names}, True

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.shown
            raise QgateError(f"{str(where)!r} cannot be read: {error.strerror}.") from None

    def staged(self, name: str, sha256: str) -> str:  # noqa: ARG002
        folder, slash, file = name.rpartition("/")
        return f"{folder}{slash}.{file}.new"

    def check(self, name: str) -> None:
        parent = (self._folder / name).parent
        if parent.is_symlink():
            raise QgateError(
                f"{str(parent)!r} is a link, and nothing is written through it: put a folder in "
                "its place."
            )

    def stage(self, name: str, sha256: str, content: bytes) -> None:
        path = self._folder / self.staged(name, sha256)
        _make_folder(path.parent)
        path.unlink(missing_ok=True)  # a link to somewhere else is no place to write to
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)

    def promise(self, journal: bytes) -> None:
        self.stage(JOURNAL, "", journal)
        self.move(self.staged(JOURNAL, ""), JOURNAL)

    def move(self, staged: str, name: str) -> None:
        os.replace(self._folder / staged, self._folder / name)  # noqa: PTH105

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / name)  # noqa: PTH108

    def sync(self, folders: Collection[str]) -> None:
        for folder in folders:
            if (self._folder / folder).is_dir():
                _sync(self._folder / folder)

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock of the folder; its file is there only while it is held."""
        _make_folder(self._folder)
        what = f"the {self.rules.what} in {self.shown!r} are"
        with lock(self._folder / LOCK, timeout_s, what):
            yield

    def unlock(self) -> str:
        raise QgateError(
            f"{self.shown!r} needs no unlocking: the system lets go of a lock when its process "
            "ends."
        )


def _entry(path: Path) -> ListedFile:
    """Return what moves when a file does; a link that leads nowhere has nothing."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ListedFile(0, (), (), None)
    modified = datetime.fromtimestamp(stat.st_mtime)
    return ListedFile(stat.st_size, (str(stat.st_ino),), (str(stat.st_mtime_ns),), modified)


def _make_folder(folder: Path) -> None:
    """Make a folder with those above it, all of them on the disk and not only in memory."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)  # noqa: PTH102
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
