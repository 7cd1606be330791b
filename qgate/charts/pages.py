"""Pages as templates: one style, every text escaped, no need of scripts or the network.

A room has its templates beside its code; they extend `page.html.j2` and use the macros of
`parts.html.j2` here. Jinja2 is loaded by the first page that is rendered.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qgate.charts.palette import HEAT_DARK, HEAT_LIGHT
from qgate.text import brief, for_html, one_line, shortened

if TYPE_CHECKING:
    from jinja2 import Environment


class Cell(NamedTuple):
    """A cell of a table; `key` sorts it where that is not its text."""

    text: object
    key: str | None = None
    bad: bool = False


def number(value: float, text: str | None = None, *, bad: bool = False) -> Cell:
    """Return the cell of a number; NaN is a dash and sorts last."""
    if math.isnan(value):
        return Cell("–", "nan", bad)
    return Cell(brief(value) if text is None else text, repr(float(value)), bad)


def leading(sentence: str, most: int = 160) -> str:
    """Return a sentence as a headline: a long one ends at a comma, colon or semicolon."""
    text = one_line(sentence).rstrip(".")
    if len(text) <= most:
        return text
    clauses = [match.start() for match in re.finditer(r"[,:;] ", text[: most - 1])]
    return f"{text[: clauses[-1]]} …" if clauses else shortened(text, most)


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
        """Let a line break in a name after these characters, but not within its words."""
        return Markup(re.sub(rf"([{after}]+)(?=[^{after}])", r"\1<wbr>", for_html(name)))

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
    environment.globals |= {"heat_light": HEAT_LIGHT, "heat_dark": HEAT_DARK}
    return environment
