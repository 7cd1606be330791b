"""Pages as templates: one style, every text escaped, no need of scripts or the network.

A room has its templates beside its code; they extend `page.html.j2` and use the macros of
`parts.html.j2` here. Jinja2 is loaded by the first page that is rendered.
"""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qgate.charts.palette import HEAT_DARK, HEAT_LIGHT
from qgate.text import brief, for_html, one_line, shortened, times_figure
from qgate.text.findings import NOTHING, Finding

if TYPE_CHECKING:
    from jinja2 import Environment


# A browser takes a second for thousands of rows: a longer table begins with the first ones.
_SHORT_TABLE, _FIRST_ROWS = 250, 100


class Link(NamedTuple):
    """A link to a file; `spoken` is for those who hear the page."""

    text: str
    address: str
    spoken: str = ""


class Cell(NamedTuple):
    """A cell of a table.

    key      sorts it where that is not its text
    tone     "fail", "warn", "good" or nothing; `step` is a class of color
    links    stand in place of the text
    failure  stands behind it
    """

    text: object
    key: str | None = None
    tone: str = ""
    step: str = ""
    links: Sequence[Link] = ()
    failure: str = ""


class HeadView(NamedTuple):
    """The head of a page.

    tone      "failed", "open" or "passed"
    counts    tone, count, words and address of what is counted by verdict
    totals    further counts with their words
    about     sums up the facts that are folded
    covered   facts that are always shown: name and text
    facts     facts that are folded
    """

    tone: str
    counts: Sequence[tuple[str, int, str, str]]
    totals: Sequence[tuple[int, str]]
    about: str
    covered: Sequence[tuple[str, str]]
    facts: Sequence[tuple[str, str]]


class Evidence(NamedTuple):
    """A row of findings: what differs where, and beyond which limit.

    times   how many times its limit the value is; None without a limit
    also    what else differs there
    link    the anchor of its subject; empty for none
    """

    tone: str
    badge: str
    text: str
    subject: str = ""
    link: str = ""
    also: str = ""
    value: str = "–"
    limit: str = "–"
    times: float | None = None

    @property
    def far(self) -> str:
        """Write how many times the limit it is."""
        if self.times is None:
            return "–"
        return f"{times_figure(self.times)}×" if math.isfinite(self.times) else "over 0"

    @property
    def step(self) -> str:
        """Return the class that colors it by its distance to the limit."""
        return "" if self.times is None else f"h{margin_step(self.times)}"


def number(value: float, text: str | None = None, *, bad: bool = False, step: str = "") -> Cell:
    """Return the cell of a number; NaN is a dash and sorts last."""
    tone = "fail" * bad
    if math.isnan(value):
        return Cell("–", "nan", tone)
    return Cell(brief(value) if text is None else text, repr(float(value)), tone, step)


def leading(sentence: str, most: int = 160) -> str:
    """Return a sentence as a headline: a long one ends at a comma, colon or semicolon."""
    text = one_line(sentence).rstrip(".")
    if len(text) <= most:
        return text
    clauses = [match.start() for match in re.finditer(r"[,:;] ", text[: most - 1])]
    return f"{text[: clauses[-1]]} …" if clauses else shortened(text, most)


def headline(findings: Sequence[Finding], name: str) -> tuple[str, str]:
    """Return the first finding as the words and the tone of a page; a note is no headline."""
    first = next(iter(findings), NOTHING)
    if first.level == NOTHING.level:
        return f"Nothing is broken or lost in {name}", "good"
    return leading(first.text), first.level


def first_rows(count: int) -> int:
    """Return how many of so many rows a table begins with; a script appends the others."""
    return count if count <= _SHORT_TABLE else _FIRST_ROWS


def render(template: str, /, **values: object) -> str:
    """Render a template by its room and name, such as `sweeps/page`."""
    return _environment().get_template(f"{template}.html.j2").render(values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def printable(value: object) -> object:
        """Show control characters too, which the autoescape of Jinja2 leaves as they are."""
        if type(value) is Markup or (type(value) is str and value.isprintable()):
            return value
        return one_line(value)

    @functools.lru_cache(10_000)
    def breaking(name: object, after: str = ".:/@") -> Markup:
        """Let a line break in a name after these characters, but not within words or numbers."""
        break_point = rf"([{after}]+)(?=[^{after}])(?!(?<=\d\.)\d)"
        return Markup(re.sub(break_point, r"\1<wbr>", for_html(name)))

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "breaking": breaking,
        "grouped": lambda count: f"{count:,}",
        "lines": lambda text: Markup(for_html(text, lines=True)),
        "printable": printable,
        "shortened": shortened,
    }
    environment.globals |= {
        "first_rows": first_rows,
        "heat_light": HEAT_LIGHT,
        "heat_dark": HEAT_DARK,
    }
    return environment


# Times the limit where a step of color ends: what passed has the three palest.
_EDGES = (0.5, 0.9, 1.0, 1.2, 2.0, 5.0, 20.0)
assert len(_EDGES) == len(HEAT_LIGHT) - 1


def margin_step(margin: float) -> int:
    """Return the step of color of a value by how many times its limit it is."""
    return bisect_left(_EDGES, margin)


def margin_legend() -> list[str]:
    """Return, for each step, the margins in it."""
    return [*(f"≤ {edge:g}×" for edge in _EDGES), f"> {_EDGES[-1]:g}×"]
