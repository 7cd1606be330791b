"""What pages are made of. All text is escaped here, whoever gave it; nothing needs a script."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from qgate.charts.page_script import SCRIPT
from qgate.charts.page_style import STYLE
from qgate.text import brief
from qgate.text import for_html as text

# What is shown, and what it is sorted by where that is something else.
Cell = tuple[str, float | str | None]
_BADGES = {"fail": "broken", "warn": "loss", "info": "note"}


def wrapping(value: object, after: str = ".:/@") -> str:
    """A name that a line may break in, but not within its words: `after` these characters."""
    return re.sub(rf"([{after}]+)(?=[^{after}])", r"\1<wbr>", text(value))


def document(
    title: str, body: Iterable[str], *, style: str = "", skip: tuple[str, str] | None = None
) -> str:
    """A whole page; `skip` is a link for the keyboard past what stands before its main part."""
    parts = "\n".join(part for part in body if part)
    ahead = f"<a class='skip' href='#{skip[0]}'>{text(skip[1])}</a>\n" if skip else ""
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n"
        f"<title>{text(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n"
        f"<body>\n{ahead}<main>\n{parts}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def section(anchor: str, title: str, html: str) -> str:
    return f"<section id='{text(anchor)}'>\n<h2>{text(title)}</h2>\n{html}\n</section>"


def empty(why: str) -> str:
    return f"<p class='empty'>{text(why)}</p>"


def contents(links: Iterable[tuple[str, str, int]]) -> str:
    """Links to sections: anchor, title, how many there are in it."""
    items = []
    for anchor, title, count in links:
        many = f" <small>{count:,}</small>" if count else ""
        items.append(f"<a href='#{text(anchor)}'>{text(title)}{many}</a>")
    return f"<nav aria-label='Contents'>\n{chr(10).join(items)}\n</nav>"


def finding_list(rows: Iterable[tuple[str, str]], badges: dict[str, str] | None = None) -> str:
    """Sentences with their level: fail, warn or info."""
    words = badges or _BADGES
    items = "\n".join(
        f"<li class='{level}'><b>{words[level]}</b> <span>{text(said)}</span></li>"
        for level, said in rows
    )
    return f"<ul class='findings'>\n{items}\n</ul>"


def image(path: str, title: str, about: str, width: int, height: int) -> str:
    """A picture that lies beside the page, linked to its file."""
    said, source = text(title), text(path)
    return (
        f"<figure>\n<figcaption><b>{said}</b> <span>{text(about)}</span></figcaption>\n"
        f"<a href='{source}'><img src='{source}' alt='{said}' width='{width}' "
        f"height='{height}' loading='lazy'></a>\n</figure>"
    )


def drawing(svg: str, kind: str = "") -> str:
    """A plot that is part of the page; it brings its own title."""
    return f"<figure class='{text(kind)} drawn'>{svg}</figure>"


def figures(shown: Sequence[str], kind: str = "figures") -> str:
    return f"<div class='{kind}'>\n{chr(10).join(shown)}\n</div>" if shown else ""


def number(value: float, shown: str | None = None) -> Cell:
    """Return the cell of a number; NaN is a dash and sorts last."""
    if math.isnan(value):
        return "–", "nan"
    return brief(value) if shown is None else shown, repr(float(value))


def head_cells(head: Sequence[str], words: int) -> str:
    """Heads that sort by a click; the first `words` columns are texts, the others numbers."""
    return "".join(
        f"<th scope='col' class='{'text' if place < words else 'number'}'>"
        f"<button type='button'>{text(name)}</button></th>"
        for place, name in enumerate(head)
    )


def scroll(table: str, label: str) -> str:
    """A box that a wide or long table scrolls in, also by keyboard."""
    return (
        f"<div class='scroll' tabindex='0' role='region' aria-label='{text(label)}'>\n"
        f"{table}\n</div>"
    )


def sortable(
    head: Sequence[str], rows: Iterable[Sequence[Cell]], words: int, label: str = "table"
) -> str:
    """A table in its box; the first column names the row."""
    body = "\n".join(_line(row, words) for row in rows)
    return scroll(
        f"<table class='sortable'>\n<thead><tr>{head_cells(head, words)}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>",
        label,
    )


def _line(row: Sequence[Cell], words: int) -> str:
    cells = []
    for place, (shown, key) in enumerate(row):
        tag = "th scope='row'" if place == 0 else "td"
        kind = "text" if place < words else "number"
        value = "" if key is None or key == shown else f" data-key='{text(key)}'"
        # A name with dots breaks there; one without at its underscores.
        told = text(shown) if place >= words else wrapping(shown, ".:/@" if place == 0 else ".:/_@")
        cells.append(f"<{tag} class='{kind}'{value}>{told}</{tag.split()[0]}>")
    return f"<tr>{''.join(cells)}</tr>"
