"""Places that are no local files: `s3://bucket/key` and what else fsspec reaches.

A URL is a `UPath`, which has the methods of a `Path`; `file://` is a plain path. Stores that put an
object in one step replace it as a whole; others are refused where something is written.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from qgate.errors import QgateError

if TYPE_CHECKING:
    from upath import UPath

    Place: TypeAlias = Path | UPath

# Stores whose objects are there whole, or not at all.
_WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
_NEEDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs",
          "abfs": "adlfs", "abfss": "adlfs", "http": "aiohttp", "https": "aiohttp"}  # fmt: skip
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_url(text: object) -> bool:
    return _URL.match(str(text)) is not None


def place_of(text: str | Place) -> Place:
    """A path, or what a URL means; whether anything is there is not asked."""
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


def check_writable(place: Place) -> None:
    """Refuse a store that could be left with half of a file."""
    scheme = getattr(place, "protocol", "")
    if not isinstance(place, Path) and scheme not in _WHOLE:
        raise QgateError(
            f"{str(place)!r}: {scheme}:// may leave half a file behind, so nothing is written "
            f"there; write to a path, or to {', '.join(f'{name}://' for name in _WHOLE[:4])} …"
        )


def identity(place: Place) -> str:
    """A file as a key: its place and what tells whether it was written anew.

    What cannot be asked is told when it is read.
    """
    try:
        if isinstance(place, Path):
            found = place.stat()
            return f"{place} {found.st_size} {found.st_mtime_ns}"
        return f"{place} {place.fs.ukey(place.path)}"
    except Exception:
        return f"{place} missing"


# What stores say against it ---------------------------------------------------------------------


@contextlib.contextmanager
def reaching(place: Place | str, *passed: type[Exception]) -> Iterator[None]:
    """What a store says against being read, in one line; what is `passed` is the caller's."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (QgateError, *passed)):
            raise
        raise QgateError(f"{str(place)!r} cannot be reached: {_line(error)}.") from None


@contextlib.contextmanager
def changing() -> Iterator[None]:
    """What a store says against being changed, as an OSError: like a full disk."""
    try:
        yield
    except QgateError:
        raise
    except Exception as error:
        usual = 17 if isinstance(error, FileExistsError) else 5
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(number or usual, _line(error)) from error


def _line(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = (said.strip() or type(error).__name__).splitlines()[0]
    return text.rstrip(".") if " " in text else f"{type(error).__name__} {text}"
