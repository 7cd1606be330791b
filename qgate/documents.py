"""Texts that hold data, where a library of Python takes too long or too deep to say no."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MOST_DOTS = 100


def toml(text: str) -> dict[str, Any]:
    """What a TOML text says; a ValueError for one that is broken, or that nobody would write."""
    for piece in re.split(r"[=,\n\[\]{}]", text):
        if piece.count(".") > _MOST_DOTS and not piece.lstrip().startswith("#"):
            raise ValueError(f"{piece.strip()[:30]}… has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
