"""Foreign text made safe to show: one function makes it one line, one per target escapes it.

Names come from other people's files, models and tests. A terminal would obey control characters, a
page would run scripts, a spreadsheet formulas, and GitHub workflow commands.

Tables for spreadsheets are escaped cell by cell.
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# Characters that start a formula in a spreadsheet, with the wide forms that some of them accept.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
_COMMANDS = ("::", "##[", "##vso[")
_LONGEST = 300
_MARKDOWN = {char: f"&#{ord(char)};" for char in "&<>|`*_[]\\~#"}
# Texts that GitHub turns into links, mentions, mathematics or pictures, even from entities; only
# code is left as it is. `10:48:06` is a time.
_LIVELY = re.compile(r"[@$]|://|www\.|\bGH-\d|#\d|:(?!\d\d[:+-])[\w+-]+:", re.IGNORECASE)
_NO_CODE = re.compile(r"([|`<>])")


def one_line(text: object) -> str:
    """Write a text as one line of printable characters; others become escapes such as `\\x1b`."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in line
    )


def for_terminal(text: object) -> str:
    """Write a message of any number of lines so that no terminal and no log of CI obeys it.

    GitHub takes a line that begins with `::` for a command, and `##[` or `##vso[` anywhere.
    """
    lines = [one_line(line) for line in str(text).split("\n")]
    lines = [f"| {line}" if line.lstrip().startswith("::") else line for line in lines]
    return re.sub(r"##(?=\[|vso\[)", "# #", "\n".join(lines))


def lines_for_terminal(lines: Iterable[object], indent: str = "") -> str:
    """Write lines as a message; ends of lines in them, as in names, become escapes."""
    return for_terminal(f"\n{indent}".join(map(one_line, lines)))


def for_json(text: str) -> str:
    """Write JSON that reads the same and has only printable characters and no command of CI."""
    text = re.sub(r"#(?=#(\[|vso\[))", r"\\u0023", text)
    return re.sub("[\x7f-\x9f]", lambda char: f"\\u{ord(char[0]):04x}", text)


def for_html(text: object, *, lines: bool = False) -> str:
    """Escape a text for an HTML element or an attribute in quotes; `lines` keeps line ends."""
    parts = str(text).split("\n") if lines else [text]
    return "\n".join(html.escape(one_line(part)) for part in parts)


def for_xml(text: object) -> str:
    """Escape a text for an XML or SVG element or an attribute in quotes."""
    # xml.sax.saxutils would load a client of HTTP in every run of pytest.
    escaped = html.escape(one_line(text), quote=False)
    return escaped.replace('"', "&quot;").replace("'", "&apos;")


def for_csv(value: object) -> str | int | float:
    """Return the value of a CSV cell: numbers as they are, an empty text for None.

    An apostrophe stands before a text that a spreadsheet would take for a formula, or a log of CI
    that shows the file for a command.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value if math.isfinite(value) else ""
    text = str(value)
    is_live = text.startswith(_FORMULA) or text.lstrip().startswith(_COMMANDS)
    return f"'{one_line(text)}" if is_live else one_line(text)


def for_markdown(text: object) -> str:
    """Escape a text for one cell of a Markdown table, cut where it is very long."""
    line = one_line(text)
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]}…{line[-_LONGEST // 2 :]}"
    return " ".join(
        _code(word) if _LIVELY.search(word) else _plain(word) for word in line.split(" ")
    )


def _plain(text: str) -> str:
    return "".join(_MARKDOWN.get(char, char) for char in text)


def _code(word: str) -> str:
    """Put a word into code spans, with characters between them that would end a span or a cell."""
    parts = [part for part in _NO_CODE.split(word) if part]
    return "".join(_plain(part) if _NO_CODE.match(part) else f"`{part}`" for part in parts)


def for_workflow(text: object) -> str:
    """Escape a text for the message of a workflow command of GitHub."""
    return one_line(text).replace("%", "%25")


def for_workflow_property(text: object) -> str:
    """Escape a text for a property of a workflow command, such as its title."""
    return for_workflow(text).replace(":", "%3A").replace(",", "%2C")


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write one line per row, with a head; missing values are empty cells."""
    return "".join(csv_lines(columns, rows))


def csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of `as_csv` one at a time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([for_csv(name) for name in columns])
    for row in rows:
        yield text.getvalue()
        text.seek(0)
        text.truncate()
        writer.writerow([for_csv(row.get(name)) for name in columns])
    yield text.getvalue()
