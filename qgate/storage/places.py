"""Places of files: a `Path`, or what `s3://bucket/key` and other URLs of fsspec mean.

A URL is a `UPath`, which has the methods of a `Path`; `file://` is a plain path. Stores that put an
object in one step replace it as a whole; others are refused where something is written.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qgate.errors import QgateError

if TYPE_CHECKING:
    from upath import UPath

    Place: TypeAlias = Path | UPath

# Stores whose objects are there whole, or not at all.
_WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
# Servers that may answer a range with the whole file.
_STREAMS = ("http", "https")
_NEEDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs",
          "abfs": "adlfs", "abfss": "adlfs", "http": "aiohttp", "https": "aiohttp"}  # fmt: skip
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_url(text: object) -> bool:
    return _URL.match(str(text)) is not None


def place_of(text: str | Place) -> Place:
    """Return a path, or what a URL means; whether anything is there is not asked."""
    if not isinstance(text, str | Path):
        return text
    found = _URL.match(str(text))
    if not found:
        return Path(text)
    scheme = found[1].lower()
    if scheme in ("file", "local"):
        return Path(str(text)[found.end() :])
    from upath import UPath

    try:
        place = UPath(f"{scheme}://{str(text)[found.end() :]}")
        place.fs  # noqa: B018  # the first use imports what speaks to the store
    except ImportError:
        package = _NEEDS.get(scheme, "the package that fsspec names for it")
        raise QgateError(f"{str(text)!r}: {scheme}:// needs {package}; pip install it.") from None
    except ValueError:
        raise QgateError(
            f"{str(text)!r}: {scheme}:// is not known; use s3://, gs://, az:// or another one of "
            "fsspec, or a path."
        ) from None
    except OSError as error:
        raise QgateError(f"{str(text)!r} cannot be reached: {error}.") from None
    return place


def user_place(text: str | Place) -> Place:
    """Return a place; the `~` of a path is the home of the user."""
    place = place_of(text)
    return place.expanduser() if isinstance(place, Path) else place


def place_below(home: Path, text: str) -> Place:
    """Return a place; a relative path begins at a folder."""
    place = place_of(text)
    return home / place if isinstance(place, Path) else place


def text_below(home: Path, text: str) -> str:
    """Return the text of `place_below`, without a look at what a URL needs."""
    return text if is_url(text) else str(home / text)


def text_seen_from(home: Path, text: str) -> str:
    """Return the way from a folder to a path; a URL as it is."""
    return text if is_url(text) else os.path.relpath(text, home)


def split_spec(spec: str, endings: Collection[str]) -> tuple[Place, str | None]:
    """Return the file of a spec `FILE:NAME`, and the name, or None for a spec without one."""
    if is_url(spec):  # by the ending of the file, as asking a store what is there takes time
        found = [(spec.lower().find(f"{ending}:"), len(ending)) for ending in endings]
        cut = min((at + length for at, length in found if at >= 0), default=None)
        return (place_of(spec), None) if cut is None else (place_of(spec[:cut]), spec[cut + 1 :])
    whole = Path(spec)
    if whole.exists() or ":" not in spec:
        return whole, None
    file, _, key = spec.rpartition(":")
    while file and not Path(file).exists() and ":" in file:
        file, _, more = file.rpartition(":")
        key = f"{more}:{key}"
    return (Path(file), key) if Path(file).exists() else (whole, None)


def is_pattern(text: str) -> bool:
    """Tell whether a text has wildcards and is no file of that name."""
    return glob.has_magic(text) and (is_url(text) or not Path(text).exists())


def shown_below(home: Path, place: Place | str) -> str:
    """Return a path without the way to a folder that it lies below; others, and URLs, as is."""
    if is_url(place):
        return str(place)
    path = Path(str(place))
    return str(path.relative_to(home) if path.is_relative_to(home) else path)


def names_folder(text: str) -> bool:
    """Tell whether a text is a folder that is there, or a URL, which is not asked."""
    return is_url(text) or Path(text).is_dir()


def is_taken(place: Place) -> bool:
    """Tell whether anything has this name; a link that leads nowhere has it too."""
    return os.path.lexists(place) if isinstance(place, Path) else place.exists()


def is_readable(folder: Place) -> bool:
    """Tell whether this user may list and enter a folder; a store says so when it is asked."""
    return not isinstance(folder, Path) or os.access(folder, os.R_OK | os.X_OK)


def local_folder(place: Place) -> Path:
    """Return a folder for files that grow: the place, or instead of a store where this runs."""
    return place if isinstance(place, Path) else Path()


def may_refuse_later(text: str) -> bool:
    """Tell whether a place can be lost while this runs, as the login to a store ends."""
    return not isinstance(place_of(text), Path)


def check_writable(place: Place) -> None:
    """Refuse a store that could be left with half of a file."""
    scheme = getattr(place, "protocol", "")
    if not isinstance(place, Path) and scheme not in _WHOLE:
        raise QgateError(
            f"{str(place)!r}: {scheme}:// may leave half a file behind, so nothing is written "
            f"there; write to a path, or to {', '.join(f'{name}://' for name in _WHOLE[:4])} …"
        )


def identity(place: Place) -> str:
    """Return a file as a key: its place and what tells whether it was written anew.

    What cannot be asked is told when it is read.
    """
    try:
        if isinstance(place, Path):
            found = place.stat()
            return f"{place} {found.st_size} {found.st_mtime_ns}"
        return f"{place} {place.fs.ukey(place.path)}"
    except Exception:
        return f"{place} missing"


def read_bytes(place: Place, *passed: type[Exception]) -> bytes:
    """Read a file; what a store says against it is a QgateError, unless it is `passed`."""
    with contextlib.nullcontext() if isinstance(place, Path) else reaching(place, *passed):
        return place.read_bytes()


def read_range(place: Place, start: int, stop: int) -> bytes:
    """Read these bytes and no more, or less at the end: an open file would read ahead."""
    if isinstance(place, Path) or place.protocol in _STREAMS:
        with place.open("rb") as file:
            file.seek(start)
            return bytes(file.read(stop - start))
    return bytes(place.fs.cat_file(place.path, start=start, end=stop))


def names_matching(pattern: str) -> list[str]:
    """Return the files, or URLs, that a pattern with wildcards stands for, in order."""
    place = place_of(pattern)
    if isinstance(place, Path):
        return sorted(glob.glob(str(place), recursive=True))  # noqa: PTH207
    return sorted(place.fs.unstrip_protocol(name) for name in place.fs.glob(place.path))


def at_exit(place: Place, method: Callable[[], None]) -> None:
    """Call a method when Python ends, while its place can still be written to.

    For a store that is before the threads are gone that look up addresses.
    """
    atexit.register(method)
    register = getattr(threading, "_register_atexit", None)
    if isinstance(place, Path) or register is None:
        return
    reference = weakref.WeakMethod(method)

    def call() -> None:
        kept = reference()
        if kept is not None:
            kept()

    register(call)


def store_of(place: UPath) -> tuple[Any, str]:
    """Return what speaks to a store, without a memory of listings, and the path in it."""
    with reaching(place):
        store = type(place.fs)(**{**place.storage_options, "use_listings_cache": False})
        return store, str(store._strip_protocol(place.path)).rstrip("/")


# What stores say against it ---------------------------------------------------------------------


@contextlib.contextmanager
def reaching(place: Place | str, *passed: type[Exception]) -> Iterator[None]:
    """Turn what a store says against being read into a QgateError, but for what is `passed`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (QgateError, *passed)):
            raise
        raise QgateError(f"{str(place)!r} cannot be reached: {_line(error)}.") from None


@contextlib.contextmanager
def changing(place: Place | None = None) -> Iterator[None]:
    """Turn what a store says against being changed into an OSError, which names the place."""
    try:
        yield
    except QgateError:
        raise
    except Exception as error:
        usual = 17 if isinstance(error, FileExistsError) else 5
        number = error.errno if isinstance(error, OSError) else None
        named = None if place is None else str(place)
        raise OSError(number or usual, _line(error), named) from error


def _line(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = (said.strip() or type(error).__name__).splitlines()[0]
    return text.rstrip(".") if " " in text else f"{type(error).__name__} {text}"
