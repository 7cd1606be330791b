"""Describe a page by what a reader sees: its words, tables, and what its inline SVG draws."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

from tests.golden.summaries import array_text

HIDDEN = {"script", "style", "template"}
BLOCKS = {
    "p", "div", "section", "article", "header", "footer", "main", "nav", "table", "tr", "ul", "ol",
    "li", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "details", "summary", "figure", "figcaption",
    "dl", "dt", "dd", "form", "label", "select", "option", "button", "caption", "br", "hr", "svg",
    "title", "fieldset", "thead", "tbody",
}  # fmt: skip
CELLS = {"td", "th"}
SPOKEN = ("alt", "title", "aria-label", "placeholder")
# Of an SVG element: where it is and how large.
DATA = (
    "x",
    "y",
    "width",
    "height",
    "cx",
    "cy",
    "r",
    "x1",
    "y1",
    "x2",
    "y2",
    "points",
    "d",
    "transform",
)
EMPTY = {"br", "hr", "img", "input", "meta", "link", "col", "wbr", "source"}
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self.words: list[str] = []
        self.hidden: list[str] = []
        self.svg = 0
        self.shapes: dict[str, list[float]] = {}

    def _end_line(self) -> None:
        text = " ".join("".join(self.words).split()).strip(" |")
        self.words = []
        if text:
            self.lines.append(text)

    def _end_shapes(self) -> None:
        for name, numbers in self.shapes.items():
            self.lines.append(f"  svg {name}: {array_text(numbers)}")
        self.shapes = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        # The files of pictures are pinned by themselves.
        if tag in HIDDEN or (attributes.get("class") == "frame" and not self.hidden):
            self.hidden.append(tag)
        if self.hidden:
            return
        if tag in BLOCKS:
            self._end_line()
        if tag in CELLS and self.words:
            self.words.append(" | ")
        if tag == "svg":
            self.svg += 1
        if tag == "option" or (self.svg and tag in ("text", "title", "g")):
            self._end_line()
        for name in SPOKEN:
            if attributes.get(name):
                self.words.append(f" [{name}: {attributes[name]}] ")
        if tag == "img":
            self.words.append(" [picture] ")
        if self.svg and tag not in ("text", "svg"):
            numbers = [
                float(number)
                for name in DATA
                for number in _NUMBER.findall(attributes.get(name) or "")
            ]
            if numbers:
                self.shapes.setdefault(f"{tag} {attributes.get('class') or ''}".strip(), []).extend(
                    numbers
                )

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.hidden:
            if tag == self.hidden[-1]:
                self.hidden.pop()
            return
        if tag in BLOCKS or (self.svg and tag in ("text", "title", "g")):
            self._end_line()
        if tag == "svg":
            self.svg -= 1
            if not self.svg:
                self._end_shapes()

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.words.append(data)


def page_lines(html: str) -> Iterator[str]:
    """The page in lines; styles and scripts are left out."""
    page = _Page()
    page.feed(html)
    page.close()
    page._end_line()
    page._end_shapes()
    yield from page.lines
