"""The one entry to files that somebody else may have written: regular ones, up to a size.

Behind a name may be a link to a device, which never ends, or a pipe, which waits for a writer. A
file with holes in it has any size. What reads a file of others opens it here.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, cast

from qgate.errors import QgateError
from qgate.storage.locations import STREAMS, read_errors
from qgate.storage.locks import open_handle

if TYPE_CHECKING:
    from qgate.storage.locations import Location

MOST_SETTINGS = 64 << 20
"""Most bytes of a file that people write."""
MOST_RECORD = 2 << 30
"""Most bytes of a file of plain data that is read as a whole."""
MOST_TENSORS = 64 << 30
"""Most bytes of tensors or texts that are read as a whole."""
MOST_NAMES = 200_000
"""Tensors of one file."""
MOST_LINE = 64 << 20
"""Most bytes of one line of records."""
_UNBLOCKED = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_OTHER_KINDS = {
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


def open_foreign(location: Location, kind: str, limit: int | None) -> BufferedReader:
    """Open a file to read it; refuse what is no regular file, and one of more than `limit` bytes.

    kind   a plural of what is read, such as `settings`
    limit  None for files that are mapped or read in parts, which may be as large as a disk
    """
    if not isinstance(location, Path):
        with read_errors(location, FileNotFoundError):
            if limit is not None:
                _check_size(location, location.stat().st_size, kind, limit)
            return cast(BufferedReader, location.open("rb"))
    _check_mode(location, location.stat().st_mode, kind)
    # Another file may have the name by now; this one neither waits nor becomes a terminal of ours.
    file = open(location, "rb", opener=_opened)  # noqa: SIM115
    try:
        status = os.fstat(file.fileno())
        _check_mode(location, status.st_mode, kind)
        if limit is not None:
            _check_size(location, status.st_size, kind, limit)
    except BaseException:
        file.close()
        raise
    return file


def _opened(path: str, flags: int) -> int:
    return open_handle(Path(path), flags | _UNBLOCKED)


def _check_mode(path: Path, mode: int, kind: str) -> None:
    if (other := _OTHER_KINDS.get(stat.S_IFMT(mode))) is None:
        return
    end = f" leads to {other}" if path.is_symlink() else f" is {other}"
    raise QgateError(
        f"{str(path)!r}{end}, and {kind} are read from regular files alone: name one, or put one "
        "in its place."
    )


def _check_size(location: Location, size: int, kind: str, limit: int) -> None:
    if size > limit:
        raise QgateError(
            f"{str(location)!r} has {size} bytes, and {kind} may have {limit >> 20} MB: name "
            "another file, or write it again."
        )


def read_foreign(location: Location, kind: str, limit: int = MOST_RECORD) -> bytes:
    """Read a whole file that `open_foreign` opens."""
    is_local = isinstance(location, Path)
    with (
        open_foreign(location, kind, limit) as file,
        contextlib.nullcontext() if is_local else read_errors(location, FileNotFoundError),
    ):
        try:
            return file.read()
        except MemoryError:  # holes in a file make it as large as somebody likes
            raise QgateError(
                f"{str(location)!r} is larger than the memory that is left here: write it again, "
                "or read it on another machine."
            ) from None


def read_range(location: Location, start: int, stop: int) -> bytes:
    """Read exactly these bytes, or fewer at the end; an open file would read ahead."""
    if isinstance(location, Path) or location.protocol in STREAMS:
        with open_foreign(location, "tensors", None) as file:
            file.seek(start)
            return bytes(file.read(stop - start))
    with read_errors(location, FileNotFoundError, PermissionError):
        return bytes(location.fs.cat_file(location.path, start=start, end=stop))


def read_foreign_text(
    location: Location, kind: str, limit: int = MOST_RECORD, *, errors: str = "strict"
) -> str:
    """Read a whole file as text in UTF-8, in which each line ends with a newline."""
    text = read_foreign(location, kind, limit).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def open_foreign_text(location: Location, kind: str) -> TextIO:
    """Open a file as text in UTF-8, to read it in parts."""
    return io.TextIOWrapper(open_foreign(location, kind, None), encoding="utf-8")


def foreign_size(location: Location, kind: str) -> int:
    """Return the bytes of a file that will be read."""
    if isinstance(location, Path):
        foreign_path(location, kind)
    return int(location.stat().st_size)


def foreign_path(path: Path, kind: str, limit: int | None = None) -> Path:
    """Return the path of a file that a library opens by itself, after the same checks."""
    open_foreign(path, kind, limit).close()
    return path


def check_foreign_files(folder: Path, kind: str) -> None:
    """Check the files of a folder from which a library takes what it likes, and those one below."""
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.exists():
            _check_mode(path, path.stat().st_mode, kind)


def foreign_line(file: IO[bytes], where: str, kind: str) -> bytes:
    """Read one line of an open file; refuse one that does not end."""
    line = file.readline(MOST_LINE + 1)
    if len(line) > MOST_LINE:
        raise QgateError(
            f"{where} is damaged: it has a line of more than {MOST_LINE >> 20} MB, which {kind} "
            "never have."
        )
    return line
