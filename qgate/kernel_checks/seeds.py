"""The seed of the inputs that a check makes."""

from __future__ import annotations

import os
import re

VARIABLE = "QGATE_SEED"


def seed_of(typed: int | None, default: int, option: str = "seed") -> int:
    """Return the seed that was typed, else that of QGATE_SEED, else a default."""
    text = os.environ.get(VARIABLE, "") if typed is None else str(typed)
    if not text:
        return default
    if not re.fullmatch(r"\d{1,18}", text):
        name = VARIABLE if typed is None else option
        raise ValueError(f"{name} {text[:40]!r} is no seed; give a whole number from 0 on.")
    return int(text)
