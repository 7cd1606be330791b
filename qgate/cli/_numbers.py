"""Numbers as options take them, the same for every command."""

from __future__ import annotations

import argparse


def from_one(text: str) -> int:
    """A whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number
