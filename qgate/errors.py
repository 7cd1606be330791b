"""The one exception users see, and the sentence that helps them out of a typo."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 60


class QgateError(Exception):
    """Something the caller gave cannot be used; the message repeats it and says what can."""


def unknown(
    what: str, given: object, allowed: Iterable[str], also: Iterable[str] = ()
) -> QgateError:
    """The error for a name that is not in a list: the nearest names first, then all of them.

    `also` are names that would do too, offered as near ones but not listed.
    """
    listed = sorted(allowed)
    names = sorted([*listed, *also])
    text = str(given).lower()
    near = [name for name in names if text and text in name][:4]
    near = near or difflib.get_close_matches(text, names, n=2, cutoff=0.5)
    rest = len(listed) - _MOST
    more = f" and {rest} more" if rest > 0 else ""
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return QgateError(
        f"unknown {what} {given!r}.{hint} Allowed: {', '.join(listed[:_MOST])}{more}."
    )
