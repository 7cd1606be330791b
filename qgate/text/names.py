"""Names in lists: cut to a width, numbered and counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from qgate.text.escaping import one_line


def shortened(text: object, most: int = 40) -> str:
    """Cut the middle out of a long name, as start and end distinguish it."""
    line = one_line(text)
    head = (most - 1) // 2
    return line if len(line) <= most else f"{line[:head]}…{line[head + 1 - most :]}"


def beginning(text: object, most: int) -> str:
    """Keep the start of a long text, which says most of an error."""
    line = one_line(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


_SHORT_FACTS = (("rank ", "r"), ("iteration ", "it "), ("sample ", "s"), ("micro-batch ", "mb "))


def shortened_title(title: object, most: int = 120) -> str:
    """Shorten `L0 module.name, rank 0, iteration 1`: the beginning of the module goes first.

    The name, the direction, the rank and the time tell tensors apart, so they stay.
    """
    line = one_line(title)
    if len(line) <= most:
        return line
    head, *facts = line.split(", ")
    for word, short in _SHORT_FACTS:
        facts = [short + fact[len(word) :] if fact.startswith(word) else fact for fact in facts]
    tail = "".join(f", {fact}" for fact in facts)
    layer = match.group() if (match := re.match(r"L\d+ ", head)) else ""
    room = most - len(layer) - len(tail)
    if len(head + tail) <= most:
        return head + tail
    return shortened(line, most) if room < 16 else f"{layer}…{head[1 - room :]}{tail}"


def distinct(names: Sequence[str]) -> list[str]:
    """Put a number behind each name that was there before."""
    counts: Counter[str] = Counter()
    numbered = []
    for name in names:
        counts[name] += 1
        numbered.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return numbered


def counted(count: int, noun: str) -> str:
    """Write `1 tensor` or `1,200 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """Join the first names by commas and count the others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
