"""The exception that users see, and sentences for unknown names and for errors of the system."""

from __future__ import annotations

import copyreg
import errno
from collections.abc import Callable, Iterable
from typing import Any

_MOST = 80
# What to do about an error of the system, beside what it says.
_WAYS_OUT = {
    errno.ENOENT: "check the spelling",
    errno.EACCES: "name a file or folder that you may read and write",
    errno.EPERM: "name a file or folder that you may read and write",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a folder; a part of this path is a file",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), or name a folder on another disk",
    errno.ENOSPC: "free some space, or name a folder on another disk",
    getattr(errno, "EDQUOT", errno.ENOSPC): "free some space, or name a folder on another disk",
}


class QgateError(Exception):
    """An input that cannot be used; the message repeats it and says what is allowed."""


class CopyableError:
    """A base of exceptions made from more than their text, which keeps it in copies and pickles.

    Python makes a copy of an exception from its text alone. A process that gets one from a worker
    would fail to read it, and wait forever.
    """

    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, object]]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


def unknown(
    noun: str, value: object, allowed: Iterable[str], also: Iterable[str] = ()
) -> QgateError:
    """Return the error for a name that is not in a list: near names first, then all of them.

    `also` has further valid names, which are offered as near ones but not listed.
    """
    allowed_names = sorted(allowed)
    names = sorted([*allowed_names, *also])
    text = str(value).lower()
    near = [name for name in names if text and text in name][:4]
    near = near or _close_matches(text, names)
    remaining = len(allowed_names) - _MOST
    more = f" and {remaining} more" if remaining > 0 else ""
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return QgateError(
        f"unknown {noun} {value!r}.{hint} Allowed: {', '.join(allowed_names[:_MOST])}{more}."
    )


def _close_matches(text: str, names: list[str]) -> list[str]:
    import difflib  # here, as every run of pytest loads this file and few have an error

    return difflib.get_close_matches(text, names, n=2, cutoff=0.5)


def first_line(error: Exception, most: int = 160) -> str:
    """Return the first line of another library's error, or its class if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:most] if lines else type(error).__name__


def sentence_of(error: Exception) -> str:
    """Describe an error; one of the system with its file and a way out."""
    if not isinstance(error, OSError) or not (error.filename and error.strerror):
        return str(error)
    way_out = _WAYS_OUT.get(error.errno or 0)
    return f"{str(error.filename)!r}: {error.strerror}{f'; {way_out}' if way_out else ''}."
