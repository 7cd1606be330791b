"""Reports of features as sections, from which a page follows: findings first, no empty ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qgate.charts import inline, svg
from qgate.charts.pages import Cell, Evidence, HeadView, render
from qgate.text import shortened
from qgate.text.findings import Finding

# The width of a column of a wide table, in rem, where nobody gives another.
_COLUMN = 6.0


class PagePicture(NamedTuple):
    """A picture of a sheet: its file beside the page, its sentence, the SVG and how wide it is."""

    path: str
    title: str
    about: str
    svg: str
    width: int


class HeatTable(NamedTuple):
    """Colored cells with links.

    heads   the name of each column and a short one
    rows    of each row its name, an address or nothing, and its cells
    legend  texts of the colors, then class, sign and words of each sign
    """

    label: str
    about: str
    heads: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, str, Sequence[Mapping[str, str] | None]]]
    legend: tuple[Sequence[str], Sequence[tuple[str, str, str]]] = ((), ())


class FigureGroup(NamedTuple):
    """Pieces of SVG side by side with their captions, under the name of what they are of."""

    title: str
    address: str
    failure: str
    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class SectionTable:
    """A table that sorts; the first `words` columns are texts.

    label    what it is of, for those who hear the page
    name     its id, where it has filters or other columns on a phone
    title    its heading, a link if there is an address
    anchors  ids of the rows
    about    definitions by the names of columns
    widths   fixed widths in rem by the names of columns: of thousands of rows at once
    narrow   the columns that a phone shows, with their widths in percent
    filters  a choice of values by name and column
    more     how many rows it leaves out, and where they are
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: int
    label: str
    name: str = ""
    title: str = ""
    address: str = ""
    anchors: Sequence[str] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, float] = field(default_factory=dict)
    narrow: Mapping[str, int] = field(default_factory=dict)
    filters: Sequence[tuple[str, int, Sequence[str]]] = ()
    more: str = ""

    @property
    def column_widths(self) -> Sequence[float]:
        """Return the fixed width of each column in rem; nothing without fixed widths."""
        return [self.widths.get(name, _COLUMN) for name in self.head] if self.widths else ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report; without anything to show, `empty` says why on a folded line.

    link    its words in the contents; `total` is what the contents count
    folded  what is in it, on a line to open
    figures pieces of SVG, side by side; `whole` is one that stands before them
    beside  short tables stand side by side
    facts   names with their values; `lines` are to be copied
    more    how much is left out, and where it is
    """

    anchor: str
    title: str
    link: str = ""
    total: int = 0
    about: str = ""
    folded: str = ""
    evidence: Sequence[Evidence] = ()
    heat: HeatTable | None = None
    whole: str = ""
    figures: Sequence[str] = ()
    groups: Sequence[FigureGroup] = ()
    pictures: Sequence[PagePicture] = ()
    tables: Sequence[SectionTable] = ()
    beside: bool = False
    facts: Sequence[tuple[str, object]] = ()
    lines: Sequence[str] = ()
    more: str = ""
    empty: str = ""

    @property
    def is_empty(self) -> bool:
        has_pictures = self.whole or self.figures or self.groups or self.pictures
        has_rows = self.evidence or self.heat or any(table.rows for table in self.tables)
        return not (has_pictures or has_rows or self.lines or self.facts)


def report_page(
    sections: Sequence[Section],
    *,
    verdict: str,
    tone: str,
    cause: str = "",
    about: str = "",
    head_view: HeadView | None = None,
    findings: Sequence[Finding] = (),
    files: Sequence[str] = (),
    notes: Sequence[str] = (),
    title: str = "",
    contents: str = "",
) -> str:
    """Render the page of a report: `verdict` has its tone, and `cause` stands behind it.

    contents   "tabs" to show one section at a time
    """
    present = [section for section in sections if not section.is_empty or not section.empty]
    absent = [(section.title, section.empty) for section in sections if section not in present]
    links = [(s.anchor, s.link or s.title, s.total) for s in present]
    links += [("files", "Files", len(files))] if files else []
    links += [("notes", "Notes", len(notes))] if notes else []
    return render(
        "charts/report",
        title=shortened(title or (f"{verdict}: {cause}" if cause else verdict), 120),
        plot_style=f"{svg.STYLE}@media print{{.plot{{{svg.LIGHT}}}}}{inline.STYLE}",
        verdict=verdict, tone=tone, cause=cause, about=about, head_view=head_view,
        findings=findings, sections=present, absent=absent, links=links, contents=contents,
        files=files, notes=notes,
    )  # fmt: skip
