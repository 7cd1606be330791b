"""Parsers of text data, with limits that the standard library lacks."""

from __future__ import annotations

import re
import tomllib

_MOST_DOTS = 100


def toml(text: str) -> dict[str, object]:
    """Parse a TOML text; a ValueError for one that is broken, or has too many dots."""
    for piece in re.split(r"[=,\n\[\]{}]", text):
        if piece.count(".") > _MOST_DOTS and not piece.lstrip().startswith("#"):
            raise ValueError(f"{piece.strip()[:30]}… has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
