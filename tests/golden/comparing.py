"""Compare two texts word by word and number by number, and show what differs.

Numbers with a point or an exponent are equal if they are within 1e-6 of the larger one; those in
at most six digits have to be written the same, since a reader sees them. Integers are words.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

TOLERANCE = 1e-6
SHORT = 6
CONTEXT = 60
_REAL = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+)(?!\w|\.\d)", re.I)
_TOKENS = re.compile(rf"{_REAL.pattern}|\w+|\s+|[^\w\s]", re.I)


@dataclass(frozen=True)
class Difference:
    """One line that changed; `old` or `new` is None where there is no such line."""

    line: int
    old: str | None
    new: str | None

    def __str__(self) -> str:
        old, new = _windows(self.old, self.new)
        lines = [f"  line {self.line}"]
        lines += [] if old is None else [f"    - {old}"]
        lines += [] if new is None else [f"    + {new}"]
        return "\n".join(lines)


def differences(old: str, new: str) -> list[Difference]:
    """All lines in which the texts differ by more than the tolerance, in the order of the old."""
    if old == new:
        return []
    before, after = old.splitlines(), new.splitlines()
    skeletons = [[_REAL.sub("#", line) for line in lines] for lines in (before, after)]
    if skeletons[0] == skeletons[1]:
        blocks = [("equal", 0, len(before), 0, len(after))]
    else:
        matcher = difflib.SequenceMatcher(None, *skeletons, autojunk=False)
        blocks = list(matcher.get_opcodes())
    return [difference for block in blocks for difference in _block(before, after, *block)]


def _block(
    before: list[str], after: list[str], _kind: str, i: int, i_end: int, j: int, j_end: int
) -> Iterator[Difference]:
    for offset in range(max(i_end - i, j_end - j)):
        old = before[i + offset] if i + offset < i_end else None
        new = after[j + offset] if j + offset < j_end else None
        if old is None or new is None or not same_line(old, new):
            yield Difference(i + offset + 1, old, new)


def same_line(old: str, new: str) -> bool:
    """Tell whether two lines say the same, within the tolerance of their numbers.

    Spaces count unless a number is written in another length, which moves what stands after it.
    """
    if old == new:
        return True
    tokens = [[t for t in _TOKENS.findall(line) if not t.isspace()] for line in (old, new)]
    if len(tokens[0]) != len(tokens[1]):
        return False
    moved = False
    for a, b in zip(*tokens, strict=True):
        if a == b:
            continue
        if not (_REAL.fullmatch(a) and _REAL.fullmatch(b) and same_number(a, b)):
            return False
        moved = moved or len(a) != len(b)
    spaces = [[t for t in _TOKENS.findall(line) if t.isspace()] for line in (old, new)]
    return moved or spaces[0] == spaces[1]


def same_number(old: str, new: str) -> bool:
    """Tell whether two numbers, as they are written, are equal within the tolerance."""
    if old == new:
        return True
    if max(_digits(old), _digits(new)) <= SHORT:
        return False
    return math.isclose(float(old), float(new), rel_tol=TOLERANCE, abs_tol=0.0)


def _digits(number: str) -> int:
    mantissa = re.split("e", number, flags=re.I)[0]
    return len(re.sub(r"\D", "", mantissa).lstrip("0"))


def _windows(old: str | None, new: str | None) -> tuple[str | None, str | None]:
    """Of long lines only the part around the first difference."""
    if old is None or new is None:
        return tuple(text if text is None else _cut(text, 0) for text in (old, new))  # type: ignore[return-value]
    at = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
    return _cut(old, at), _cut(new, at)


def _cut(text: str, at: int) -> str:
    if len(text) <= 4 * CONTEXT:
        return text
    start = max(0, at - 2 * CONTEXT)
    start = 0 if start < 10 else start
    end = start + 4 * CONTEXT
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
