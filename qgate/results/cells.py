"""Names from models and files, where they are shown: in a line, in a cell of a table.

They come from other people's files. What a terminal would obey is written out, and what a
spreadsheet would run is made text.
"""

from __future__ import annotations

import math
import re

# What a spreadsheet takes for the start of a formula, with the wide forms that some of them know.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")


def one_line(text: object) -> str:
    """A name as one line of printable characters, whatever is in it."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in str(text)
    )


def cell(value: object) -> str | int | float:
    """A value as a table may hold it: numbers as they are, nothing for what is missing, and an
    apostrophe before a text that a spreadsheet would take for a formula."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value if math.isfinite(value) else ""
    text = str(value)
    return f"'{one_line(text)}" if text.startswith(_FORMULA) else one_line(text)


def for_terminal(text: object) -> str:
    """A message of any number of lines, without what a terminal or a service of CI would obey.

    GitHub takes a line that begins with `::` for a command, and `##[` or `##vso[` anywhere.
    """
    lines = [one_line(line) for line in str(text).split("\n")]
    lines = [f"| {line}" if line.lstrip().startswith("::") else line for line in lines]
    return re.sub(r"##(?=\[|vso\[)", "# #", "\n".join(lines))
