"""The page people open a minute after a gate failed: one file, without network, worst first.

Everything that has a name in it is escaped, and all of it is there without scripts: they sort,
filter and jump.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from qgate.charts.page_parts import contents, document, section
from qgate.page import _details, _head, _heat, _list, _panels, _run_parts
from qgate.page._details import failing, passing, unknown
from qgate.page._head import counts_of, summary_head, tone_of
from qgate.page._heat import heat_maps, map_fragment
from qgate.page._list import gate_table
from qgate.page._panels import Panels
from qgate.page._run_parts import others, updates
from qgate.page._words import headline_parts
from qgate.page.runs import Run
from qgate.results.pictures import Plots
from qgate.text import for_html as text
from qgate.text import shortened

__all__ = ["Section", "map_fragment", "page", "summary_head"]

_PARTS = (_head, _heat, _details, _list, _panels, _run_parts)
_STYLE = (
    "".join(part.STYLE for part in _PARTS)
    + """
@page { size: A4 landscape; margin: 11mm; }
"""
)
_TONES = {"failed": "fail", "passed": "good", "open": "warn"}


@dataclass(frozen=True)
class Section:
    """A part that somebody else made; its html is put in as it is."""

    anchor: str
    title: str
    html: str


def page(run: Run, *, plots: Plots = "worst", sections: Sequence[Section] = ()) -> str:
    """The whole page of a run."""
    panels = Panels(plots, _panels.BUDGET)
    grown = panels.growth(run.growth)
    broken = failing(run, panels)
    nearest = passing(run, panels)
    detailed = {int(number) for number in re.findall(r"id='details-(\d+)'", broken)}
    tone = tone_of(run)
    said, rest = headline_parts(run)
    said, rest = said[:1].upper() + said[1:], shortened(rest, 280)
    parts = [
        f"<h1><span class='{_TONES[tone]}'>{text(said)}</span>{text(f': {rest}' if rest else '')}"
        "</h1>",
        summary_head(run, alone=False),
        _contents(run, broken, grown, nearest, sections),
        unknown(run),
        others(run),
        heat_maps(run),
        broken,
        section("growth", "Error over depth", grown) if grown else "",
        *(section(each.anchor, each.title, each.html) for each in sections),
        gate_table(run, detailed),
        nearest,
        updates(run),
        section("notes", "Notes", f"<ul>{told}</ul>") if (told := panels.told()) else "",
    ]
    style = _STYLE + panels.style()
    title = shortened(f"{said}: {rest}" if rest else said, 120)
    return document(title, parts, style=style, skip=("gates", "To the table of all gates"))


def _contents(run: Run, broken: str, grown: str, nearest: str, sections: Sequence[Section]) -> str:
    counts = counts_of(run)
    links = [
        ("unknown", "Errors", len(run.errors) + len(run.broken)),
        ("others", "Other failed tests", run.other["failed"]),
        ("map", "Modes and layers", 0),
        ("failing", "Failing gates", len(run.failed)),
        ("growth", "Error over depth", 0),
        *((each.anchor, each.title, 0) for each in sections),
        ("gates", "All gates", counts.total()),
        ("passing", "Passing gates", 0),
        ("update", "Update", (run.header.get("update") or {}).get("entries", 0)),
    ]
    there = {
        "unknown": bool(run.errors or run.broken),
        "others": bool(run.other["failed"]),
        "update": bool((run.header.get("update") or {}).get("changes")),
        "map": bool(run.spots),
        "failing": bool(broken),
        "growth": bool(grown),
        "passing": bool(nearest),
    }
    return contents(link for link in links if there.get(link[0], True))
