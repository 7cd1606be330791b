"""Locations of files: a `Path`, or a `UPath` for `s3://bucket/key` and other URLs of fsspec.

A `UPath` has the methods of a `Path`; `file://` is a plain path. Stores that replace an object in
one step are written to; others are only read.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qgate.errors import QgateError
from qgate.text.printing import print_line

if TYPE_CHECKING:
    from upath import UPath

    Location: TypeAlias = Path | UPath

# Stores in which an object is complete or absent.
_WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
# Servers that may answer a range with the whole file.
STREAMS = ("http", "https")
_NEEDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs",
          "abfs": "adlfs", "abfss": "adlfs", "http": "aiohttp", "https": "aiohttp"}  # fmt: skip
_LOCAL = ("file", "local")
# s3fs tries five times, and botocore in each of them, for 10 s where a server answers with errors.
_ATTEMPTS = {"AWS_MAX_ATTEMPTS": "3"}
_SILENCE_S = 10.0
# Requests that fail take so long in sum, and then no more are sent: a command may go on after one
# that failed, and has thousands. A store is forgiven a second for each ten that it does not fail.
_MOST_LOST_S, _FORGIVEN = 60.0, 0.1
# With these a store has answered.
_ANSWERS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError,
            PermissionError)  # fmt: skip
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_STORE = re.compile(rf"{_URL.pattern}[^/]*")


def is_url(text: object) -> bool:
    return _URL.match(str(text)) is not None


def location_of(text: str | Location) -> Location:
    """Return the path or `UPath` of a text, without looking whether anything is there."""
    if not isinstance(text, str | Path):
        return text
    match = _URL.match(str(text))
    if not match:
        return Path(text)
    scheme = match[1].lower()
    if scheme in _LOCAL:
        return Path(str(text)[match.end() :])
    from upath import UPath

    for name, value in _ATTEMPTS.items():
        os.environ.setdefault(name, value)
    try:
        location = UPath(f"{scheme}://{str(text)[match.end() :]}")
        location.fs  # noqa: B018  # the first use imports the client of the store
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
    return location


def local_path(text: str | Path, subject: str, remedy: str) -> Path:
    """Return the path of a text; a URL of a store is an error that ends in the remedy."""
    match = _URL.match(str(text))
    if match and match[1].lower() not in _LOCAL:
        raise QgateError(f"{subject} {str(text)!r} is a URL, and has to be a path: {remedy}")
    return Path(str(text)[match.end() :] if match else text)


def user_location(text: str | Location) -> Location:
    """Return a location; a leading `~` in a path means the home of the user."""
    location = location_of(text)
    return location.expanduser() if isinstance(location, Path) else location


def location_below(home: Path, text: str) -> Location:
    """Return a location; a relative path starts at `home`."""
    location = location_of(text)
    return home / location if isinstance(location, Path) else location


def text_below(home: Path, text: str) -> str:
    """Return the text of `location_below` without importing the client of a store."""
    return text if is_url(text) else os.path.normpath(home / text)


def last_name(text: str) -> str:
    """Return the name of a file or folder; that of the folder itself for `.`."""
    location = location_of(text)
    return (location.resolve() if isinstance(location, Path) else location).name


def relative_text(home: Path, text: str) -> str:
    """Return a path relative to a folder; a URL stays as it is."""
    return text if is_url(text) else os.path.relpath(text, home)


def split_spec(spec: str, endings: Collection[str]) -> tuple[Location, str | None]:
    """Split a spec `FILE:NAME` into file and name; the name is None where there is none."""
    if is_url(spec):  # by the ending of the file: a request to a store takes time
        positions = [(spec.lower().find(f"{ending}:"), len(ending)) for ending in endings]
        cut = min((at + length for at, length in positions if at >= 0), default=None)
        return (
            (location_of(spec), None) if cut is None else (location_of(spec[:cut]), spec[cut + 1 :])
        )
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


def short_path(home: Path, location: Location | str) -> str:
    """Return a path relative to a folder above it; other paths and URLs stay as they are."""
    if is_url(location):
        return str(location)
    path = Path(str(location))
    return str(path.relative_to(home) if path.is_relative_to(home) else path)


def may_be_folder(text: str) -> bool:
    """Tell whether a text is an existing folder, or a URL, which is not asked."""
    return is_url(text) or Path(text).is_dir()


def name_exists(location: Location) -> bool:
    """Tell whether a name is in use, be it by a broken link."""
    return os.path.lexists(location) if isinstance(location, Path) else location.exists()


def is_readable(folder: Location) -> bool:
    """Tell whether this user may list and enter a folder; a store answers when it is read."""
    return not isinstance(folder, Path) or os.access(folder, os.R_OK | os.X_OK)


def local_folder(location: Location) -> Path:
    """Return the folder for files that grow: the location, or the current one for a store."""
    return location if isinstance(location, Path) else Path()


def may_expire(text: str) -> bool:
    """Tell whether access can end while this runs, as the login to a store can."""
    return not isinstance(location_of(text), Path)


def check_writable(location: Location) -> None:
    """Refuse a store that could keep half of a file."""
    scheme = getattr(location, "protocol", "")
    if not isinstance(location, Path) and scheme not in _WHOLE:
        raise QgateError(
            f"{str(location)!r}: {scheme}:// may leave half a file behind, so nothing is written "
            f"there; write to a path, or to {', '.join(f'{name}://' for name in _WHOLE[:4])} …"
        )


def file_key(location: Location) -> str:
    """Return a key of a file that changes when the file is written again.

    A file that cannot be reached raises its error when it is read.
    """
    try:
        if isinstance(location, Path):
            stat = location.stat()
            return f"{location} {stat.st_size} {stat.st_mtime_ns}"
        with _requesting(location):
            return f"{location} {location.fs.ukey(location.path)}"
    except Exception:
        return f"{location} missing"


def matching_names(pattern: str) -> list[str]:
    """List the files or URLs that match a pattern with wildcards, in order."""
    location = location_of(pattern)
    if isinstance(location, Path):
        return sorted(glob.glob(str(location), recursive=True))  # noqa: PTH207
    with read_errors(location):
        names = location.fs.glob(location.path)
    return sorted(location.fs.unstrip_protocol(name) for name in names)


def call_at_exit(location: Location, method: Callable[[], None]) -> None:
    """Call a method when Python ends, while its location can still be written to.

    A store needs threads that look up addresses, so its method runs before these end.
    """
    atexit.register(method)
    register = getattr(threading, "_register_atexit", None)
    if isinstance(location, Path) or register is None:
        return
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound_method = reference()
        if bound_method is not None:
            bound_method()

    register(call)


def store_and_path(location: UPath) -> tuple[Any, str]:
    """Return the client of a store, without a cache of listings, and the path in it."""
    with read_errors(location):
        store = type(location.fs)(**{**location.storage_options, "use_listings_cache": False})
        return store, str(store._strip_protocol(location.path)).rstrip("/")


# Errors of stores -------------------------------------------------------------------------------


@contextlib.contextmanager
def read_errors(location: Location | str, *passed: type[Exception]) -> Iterator[None]:
    """Turn errors of reading a store into a QgateError; `passed` types go through."""
    try:
        with _requesting(location):
            yield
    except Exception as error:
        if isinstance(error, (QgateError, *passed)):
            raise
        raise QgateError(f"{str(location)!r} cannot be reached: {_line(error)}.") from None


@contextlib.contextmanager
def write_errors(location: Location) -> Iterator[None]:
    """Turn errors of changing a store into an OSError that names the location."""
    try:
        with _requesting(location):
            yield
    except QgateError:
        raise
    except Exception as error:
        default_errno = 17 if isinstance(error, FileExistsError) else 5
        errno = error.errno if isinstance(error, OSError) else None
        raise OSError(errno or default_errno, _line(error), str(location)) from error


class _Store:
    """One store: for how long requests to it have failed, over all threads; says it once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lost_s, self._until = 0.0, -math.inf
        self._lock, self._is_told = threading.Lock(), False

    def lost_s(self, now: float) -> float:
        forgiven = _FORGIVEN * max(0.0, now - self._until)
        return max(0.0, self._lost_s - forgiven)

    def failed(self, begin: float, end: float) -> None:
        """Count the time of a request that failed, but for what another one has counted."""
        with self._lock:
            start = max(begin, self._until)
            self._lost_s = self.lost_s(start) + max(0.0, end - start)
            self._until = max(end, self._until)
        if self._lost_s >= _SILENCE_S:
            self.tell(
                f"requests to {self._name!r} have failed for {self._lost_s:.0f} s; after "
                f"{_MOST_LOST_S:g} s no more are sent"
            )

    def tell(self, text: str) -> None:
        if not self._is_told:
            self._is_told = True
            print_line(text, file=sys.stderr)


_stores: dict[str, _Store] = {}


@contextlib.contextmanager
def _requesting(location: Location | str) -> Iterator[None]:
    """Say on the way that a store has not answered for long, and give up one that fails for long.

    The bound is one for all requests of a process to a store.
    """
    match = _STORE.match(str(location))
    name = match[0] if match else str(location)
    store = _stores.setdefault(name, _Store(name)) if match else _Store(name)
    begin = time.monotonic()
    if store.lost_s(begin) >= _MOST_LOST_S:
        raise TimeoutError(
            f"requests to {name!r} have failed for {_MOST_LOST_S:g} s, and no more are sent for now"
        )
    words = f"{str(location)!r} has not answered for {_SILENCE_S:g} s; still waiting"
    timer = threading.Timer(_SILENCE_S, store.tell, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (QgateError, *_ANSWERS):
        raise
    except Exception:
        store.failed(begin, time.monotonic())
        raise
    finally:
        timer.cancel()


def _line(error: Exception) -> str:
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = (message.strip() or type(error).__name__).splitlines()[0]
    return text.rstrip(".") if " " in text else f"{type(error).__name__} {text}"
