"""Pieces of SVG as text: escaped words, rounded numbers, colors that follow the page.

Nothing has an id, so hundreds of pictures share a page. Colors are custom properties with a
fallback: a picture looks right on any page and follows one that defines `STYLE`.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from typing import Literal

from qgate.charts.palette import BLUE, GRAY, RED
from qgate.text import brief as shared_brief
from qgate.text import for_xml, one_line

Anchor = Literal["start", "middle", "end"]

# By name: in light, in dark.
COLORS = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#a3adb8"),
    "grid": ("#dfe3e8", "#2d333b"),
    "paper": ("#ffffff", "#0d1117"),
    "blue": (BLUE, "#6cb0f5"),
    "red": (RED, "#ff8a8a"),
    "green": ("#1b7837", "#5fbf6f"),
    "orange": ("#b35806", "#eb9a4c"),
    "purple": ("#7b3294", "#c79bf2"),
    "gray": (GRAY, "#858d96"),
}
FONT = 11.0
TITLE_FONT = 13.0
# Bold letters are wider by this factor.
BOLD = 1.13
# Widths in em are those of the widest common screen font, so a text fits in any other too.
_NARROW, _WIDE = frozenset("iIjlftr.,:;'|!()[]{} "), frozenset("mwMW@%…→×")
# Characters of a text that are read at all: cutting goes through them one by one.
_LONGEST = 400


LIGHT, DARK = (
    ";".join(f"--{name}:{pair[dark]}" for name, pair in COLORS.items()) for dark in (False, True)
)
# The style of a page with these pictures, unless the page sets these properties itself.
STYLE = f".plot{{{LIGHT}}}@media (prefers-color-scheme:dark){{.plot{{{DARK}}}}}"


def color(name: str) -> str:
    return f"var(--{name},{COLORS[name][0]})"


def number(value: float) -> str:
    """Write a coordinate with at most one decimal, as short as possible."""
    text = f"{value:.1f}".removesuffix(".0")
    if text == "-0":
        return "0"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def numbers(values: Sequence[float]) -> str:
    """Write coordinates in a row; a minus sign separates as well as a space does."""
    out = ""
    for value in values:
        text = number(value)
        out += text if not out or text.startswith("-") else f" {text}"
    return out


# Words -----------------------------------------------------------------------------------------


def text_width(text: str, size: float = FONT) -> float:
    """Estimate how wide a text is drawn, rather too wide than too narrow."""
    return sum(map(_em, text)) * size


@functools.lru_cache(4096)
def _em(char: str) -> float:
    if char in _NARROW:
        return 0.4
    if char in _WIDE:
        return 0.98
    if char.isupper():
        return 0.72
    return 1.0 if unicodedata.east_asian_width(char) in "WF" else 0.635


def cut_to_width(text: object, width: float, size: float = FONT) -> str:
    """Leave out the middle of a long name: beginnings and ends tell names apart."""
    whole = one_line(str(text)[:_LONGEST])
    if text_width(whole, size) <= width:
        return whole
    for length in range(min(len(whole) - 1, int(width / size / 0.35)), 0, -1):
        tail = length // 2
        text = f"{whole[: length - tail]}…{whole[len(whole) - tail :]}"
        if text_width(text, size) <= width:
            return text
    return "…"


def wrap_lines(text: str, width: float, size: float, most: int) -> list[str]:
    """Break a text into at most so many lines; the last one is cut and marked."""
    lines = [""]
    words = one_line(text[:_LONGEST]).split(" ")
    for at, word in enumerate(words):
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < most:
            lines.append(word)
        else:
            last = " ".join([lines[-1], *words[at:]])
            while last and text_width(f"{last}…", size) > width:
                last = last[:-1]
            lines[-1] = f"{last.rstrip()}…"
            break
    return [cut_to_width(line, width, size) for line in lines]


def label(
    x: float, y: float, words: object, anchor: Anchor = "start",
    *, fill: str = "", size: float = FONT, bold: bool = False,
) -> str:  # fmt: skip
    """Write one line of text with its baseline at y."""
    attributes = f' text-anchor="{anchor}"' if anchor != "start" else ""
    attributes += f' fill="{color(fill)}"' if fill else ""
    attributes += f' font-size="{number(size)}"' if size != FONT else ""
    attributes += ' font-weight="600"' if bold else ""
    return f'<text x="{number(x)}" y="{number(y)}"{attributes}>{for_xml(words)}</text>'


# Numbers in words ------------------------------------------------------------------------------


def brief(value: float) -> str:
    """Write a number as everywhere, but powers of ten with two digits: labels are small."""
    return shared_brief(value, 2)


def times(ratio: float) -> str:
    factor = f"{ratio:.1f}".removesuffix(".0") if ratio < 9.95 else brief(float(f"{ratio:.2g}"))
    return f"{factor} times"


_RAISED = str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·")


def power(base: int, exponent: float) -> str:
    return f"{base}{f'{exponent:g}'.translate(_RAISED)}"


# Shapes ----------------------------------------------------------------------------------------


def path(d: str, **attributes: object) -> str:
    """Draw a path; names of attributes have _ for -, and one with an empty value is left out."""
    return f'<path d="{d}"{_attributes(attributes)}/>' if d else ""


def group(body: str, **attributes: object) -> str:
    return f"<g{_attributes(attributes)}>{body}</g>" if body else ""


def _attributes(values: dict[str, object]) -> str:
    present = {name: value for name, value in values.items() if value != ""}
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in present.items())


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as a piece of a path."""
    return f"M{numbers([x, y])}h{number(width)}v{number(height)}h{number(-width)}z"


def polyline(points: Sequence[tuple[float, float] | None]) -> str:
    """Return a line as a piece of a path, in steps from point to point; None leaves a gap."""
    pieces: list[str] = []
    before: tuple[float, float] | None = None
    for point in points:
        now = None if point is None else (round(point[0], 1), round(point[1], 1))
        if now and before is None:
            pieces.append(f"M{numbers(now)}")
        elif now and before:
            step = numbers((now[0] - before[0], now[1] - before[1]))
            joined = step.startswith("-") and not pieces[-1].startswith("M")
            pieces.append(step if joined else f"l{step}")
        before = now
    return "".join(pieces)


# Markers are the cap of a line of no length, or a shape around a point.
MARKERS: dict[str, str] = {
    "circle": "h.01",
    "square": "h.01",
    "triangle": "m-3.4 2.6h6.8l-3.4-6z",
    "diamond": "m0-4l3.6 4-3.6 4-3.6-4z",
    "down": "m-3.4-2.6h6.8l-3.4 6z",
    "cross": "m-3.5-3.5l7 7m0-7l-7 7",
    "star": "m0-7.5l1.8 4.9 5.3.2-4.2 3.3 1.5 5.1-4.4-2.9-4.4 2.9 1.5-5.1-4.2-3.3 5.3-.2z",
}


def markers(shape: str, points: Sequence[tuple[float, float]], fill: str) -> str:
    """Draw all markers of one kind in one path; each begins with its point."""
    d = "".join(f"M{numbers(point)}{MARKERS[shape]}" for point in points)
    paint = color(fill)
    if shape in ("circle", "square"):
        cap, width = ("round", 5.5) if shape == "circle" else ("square", 4.6)
        return path(d, stroke=paint, stroke_width=width, stroke_linecap=cap, fill="none")
    if shape == "cross":
        return path(d, stroke=paint, stroke_width=2, fill="none")
    edge = {"stroke": color("paper"), "stroke_width": 0.8} if shape == "star" else {}
    return path(d, fill=paint, **edge)


# The whole -------------------------------------------------------------------------------------


def document(width: float, height: float, title: str, description: str, body: str) -> str:
    """Make an inline picture: its title is drawn, its title and its numbers are read aloud."""
    head = "".join(
        label(2, 13 + 15 * row, line, size=TITLE_FONT, bold=True)
        for row, line in enumerate(wrap_lines(title, (width - 4) / BOLD, TITLE_FONT, 2))
    )
    spoken = for_xml(f"{title}. {description}" if description else title)
    return (
        f'<svg class="plot" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" height="{number(height)}" role="img" aria-label="{spoken}" '
        f'font-family="system-ui,sans-serif" font-size="{number(FONT)}" fill="{color("ink")}">'
        f"{head}{body}</svg>"
    )


def standalone(svg: str) -> str:
    """Make a file of a picture: with its own colors in light and dark, and a background.

    It may still stand inside a page; its style then holds for all pictures there, as `STYLE` does.
    """
    opening, content = svg.split(">", 1)
    ground = f'<path d="M0 0h4000v4000H0z" fill="{color("paper")}"/>'
    return f'{opening} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{ground}{content}'
