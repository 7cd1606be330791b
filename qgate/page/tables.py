"""Tables for a terminal: they fit its width and never cut the layer out of a site's name."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence

from tabulate import tabulate

from qgate.metrics import METRICS
from qgate.text import for_terminal, one_line

CUT = "…"


def display_width(text: str) -> int:
    """Count the columns of a line: two for wide characters, none for combining ones."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a plain table; `numbers` are columns that align right."""
    listed = [list(heads), *([for_terminal(cell) for cell in row] for row in rows)]
    # Heads are a row like others: those of the library make columns wider than what is in them.
    widths = [max(widest(str(row[at]).split("\n")) for row in listed) for at in range(len(heads))]
    listed.insert(1, ["-" * width for width in widths])
    aligned = ["right" if column in numbers else "left" for column in range(len(heads))]
    text = tabulate(
        listed, tablefmt="plain", disable_numparse=True, colalign=aligned, preserve_whitespace=True
    )
    return [line.rstrip() for line in str(text).splitlines()]


def widest(lines: Sequence[str]) -> int:
    return max(map(display_width, lines), default=0)


def fit_table(
    layouts: Sequence[tuple[int, Callable[[int], list[str]]]], width: int, sites: Iterable[str]
) -> list[str]:
    """Return the first layout that fits with readable sites, else the last one clipped.

    layouts  the least width of a site, and the lines with sites of a width
    """
    longest = max((display_width(one_line(site)) for site in sites), default=0)
    lines: list[str] = []
    for least, layout in layouts:
        site, least = longest, min(longest, least)
        lines = layout(site)
        while widest(lines) > width and site > least:
            site = max(least, site - (widest(lines) - width))
            lines = layout(site)
        if widest(lines) <= width:
            return lines
    return [clip_line(line, width) for line in lines]


def clip_line(line: str, width: int) -> str:
    """Return the start of a line that is too long for the terminal."""
    if display_width(line) <= width:
        return line
    return f"{_end(line[::-1], width - 1)[::-1]}{CUT}"


def cut_middle(text: str, width: int) -> str:
    """Keep the ends of a name, more of the last one, which says more."""
    if display_width(text) <= width:
        return text
    room = width - 1
    tail = _end(text, max(1, room * 2 // 3))
    head = _end(text[::-1], room - display_width(tail))[::-1]
    return f"{head}{CUT}{tail}"


def _end(text: str, width: int) -> str:
    """Return as much of the end of a text as fits."""
    start, room = len(text), width
    while start and (room := room - display_width(text[start - 1])) >= 0:
        start -= 1
    return text[start:]


def site_text(site: str, layer: str, width: int) -> str:
    """Return a site in `width` columns: its layer whole, then as much of its end as fits."""
    site, layer = one_line(site), one_line(layer)
    if display_width(site) <= width:
        return site
    start = site.find(layer) if layer else -1
    if start < 0:
        return cut_middle(site, width)
    port = site[start + len(layer) :]
    room = width - display_width(layer) - bool(start)
    if room < 2:
        return clip_line(layer, width)
    lead = CUT if start else ""
    if display_width(port) <= room:
        return f"{lead}{layer}{port}"
    return f"{lead}{layer}{CUT}{_end(port, room - 1)}"


def metric_lines(metric: str) -> str:
    """Return a metric and, on a line of its own, its part: together they are wide as a site."""
    kind = METRICS.find(metric)
    return f"{kind.base}\n  @{kind.part}" if kind.part else one_line(metric)
