"""Tables for a terminal: they fit its width, and never cut the layer out of a site's name."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from tabulate import tabulate

from qgate.metrics import METRICS
from qgate.results.ranking import bound_of, times_figure, value_of
from qgate.results.summary import Finding
from qgate.text import one_line

CUT = "…"
_WITHOUT_NUMBER = ("missing", "absent", "nothing")


def shown_width(text: str) -> int:
    """How many places a line takes: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> list[str]:
    """Lines of a plain table; `numbers` are the columns that align at the right."""
    listed = [list(heads), *(list(row) for row in rows)]
    # Heads are a row like others: those of the library make columns wider than what is in them.
    widths = [max(widest(str(row[at]).split("\n")) for row in listed) for at in range(len(heads))]
    listed.insert(1, ["-" * width for width in widths])
    aligned = ["right" if place in numbers else "left" for place in range(len(heads))]
    made = tabulate(
        listed,
        tablefmt="plain",
        disable_numparse=True,
        colalign=aligned,
        preserve_whitespace=True,
    )
    return [line.rstrip() for line in str(made).splitlines()]


def widest(lines: Sequence[str]) -> int:
    return max(map(shown_width, lines), default=0)


def clipped(line: str, width: int) -> str:
    """The start of a line that is too long for the terminal."""
    if shown_width(line) <= width:
        return line
    return f"{_end(line[::-1], width - 1)[::-1]}{CUT}"


def middle_cut(text: str, width: int) -> str:
    """A name with its ends, the end being the longer one: it says more."""
    if shown_width(text) <= width:
        return text
    room = width - 1
    tail = _end(text, max(1, room * 2 // 3))
    head = _end(text[::-1], room - shown_width(tail))[::-1]
    return f"{head}{CUT}{tail}"


def _end(text: str, width: int) -> str:
    """The end of a text, as much as fits."""
    start, room = len(text), width
    while start and (room := room - shown_width(text[start - 1])) >= 0:
        start -= 1
    return text[start:]


def site_text(site: str, layer: str, width: int) -> str:
    """A site in so many places; its layer is kept whole, and then as much of its end as fits."""
    site, layer = one_line(site), one_line(layer)
    if shown_width(site) <= width:
        return site
    start = site.find(layer) if layer else -1
    if start < 0:
        return middle_cut(site, width)
    rest = site[start + len(layer) :]
    room = width - shown_width(layer) - bool(start)
    if room < 2:
        return clipped(layer, width)
    lead = CUT if start else ""
    if shown_width(rest) <= room:
        return f"{lead}{layer}{rest}"
    return f"{lead}{layer}{CUT}{_end(rest, room - 1)}"


def value_text(finding: Finding) -> str:
    """The value in three digits, or in words why there is no number."""
    check = finding.check
    if check is None:
        return "none"
    value = value_of(check)
    if isinstance(value, str):
        return one_line(value)
    if value is not None and math.isfinite(value):
        return short(value)
    return "-" if check["kind"] in _WITHOUT_NUMBER else "not finite"


def short(value: float) -> str:
    """Three digits, in as few places as they take."""
    return f"{value:.3g}"


def limit_text(finding: Finding) -> str:
    """`3.5e-05`, with the sign where a value may not be below it."""
    check = finding.check
    if check is None or check["bound"] is None:
        return "-"
    bound = bound_of(check)
    shown = one_line(bound) if isinstance(bound, str) else short(check["bound"])
    return f"{'' if check['side'] == '<=' else check['side'] + ' '}{shown}"


def far_text(finding: Finding) -> str:
    """`26.6x` its limit, or the word for what no number says."""
    check = finding.check
    if check is None:
        return "nothing"
    if check["kind"] in _WITHOUT_NUMBER:
        return one_line(check["kind"])
    times = check["times"]
    unfit = check["value"] is None or not math.isfinite(check["value"])
    if unfit or check["kind"] == "nonfinite":
        return "-"
    return f"{times_figure(times)}x" if times is not None and math.isfinite(times) else "over 0"


def metric_lines(metric: str) -> str:
    """A metric on one line, what it is of on the next: names with both are as wide as a site."""
    known = METRICS.find(metric)
    return f"{known.base}\n  @{known.part}" if known.part else one_line(metric)
