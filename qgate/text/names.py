"""Names in lists: cut to a width, told apart, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qgate.text.escaping import one_line


def shortened(text: object, most: int = 40) -> str:
    """Cut the middle out of a long name: its start and its end tell it apart."""
    line = one_line(text)
    head = (most - 1) // 2
    return line if len(line) <= most else f"{line[:head]}…{line[head + 1 - most :]}"


def distinct(names: Sequence[str]) -> list[str]:
    """Put a number behind each name that was there before."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return numbered


def counted(count: int, noun: str) -> str:
    """Write `1 tensor` or `1,200 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
