"""Pieces of SVG as text: escaped words, rounded numbers, colors that follow the page.

Nothing has an id, so hundreds of pictures share a page. Colors are custom properties with a
fallback: a picture is right on a page that says nothing, and follows one that defines `STYLE`.
"""

from __future__ import annotations

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
# How much wider bold letters are.
BOLD = 1.13

# Widths in em of the widest common screen font: what fits there fits anywhere.
_NARROW, _WIDE = frozenset("iIjlftr.,:;'|!()[]{} "), frozenset("mwMW@%…→×")

_LONGEST = 400  # characters that a drawing looks at: cutting goes through them one by one


def _properties(dark: bool) -> str:
    return ";".join(f"--{name}:{pair[dark]}" for name, pair in COLORS.items())


LIGHT, DARK = _properties(False), _properties(True)
# What a page with these pictures puts into its own style, or its own choice of these properties.
STYLE = f".plot{{{LIGHT}}}@media (prefers-color-scheme:dark){{.plot{{{DARK}}}}}"


def color(name: str) -> str:
    return f"var(--{name},{COLORS[name][0]})"


def escaped(text: object) -> str:
    return for_xml(text)


def number(value: float) -> str:
    """A coordinate: one decimal, as short as it can be written."""
    text = f"{value:.1f}"
    text = text.removesuffix(".0")
    if text == "-0":
        return "0"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def numbers(values: Sequence[float]) -> str:
    """Coordinates in a row; a minus sign separates as well as a space does."""
    out = ""
    for value in values:
        text = number(value)
        out += text if not out or text.startswith("-") else f" {text}"
    return out


# Words -----------------------------------------------------------------------------------------


def text_width(text: str, size: float = FONT) -> float:
    """About how wide a text is drawn, rather too wide than too narrow."""
    em = 0.0
    for char in text:
        if char in _NARROW:
            em += 0.4
        elif char in _WIDE or char.isupper():
            em += 0.98 if char in _WIDE else 0.72
        else:
            em += 1.0 if unicodedata.east_asian_width(char) in "WF" else 0.635
    return em * size


def cut_to_width(text: object, width: float, size: float = FONT) -> str:
    """A name that fits, its middle left out: beginnings and ends tell names apart."""
    whole = one_line(str(text)[:_LONGEST])
    if text_width(whole, size) <= width:
        return whole
    for kept in range(min(len(whole) - 1, int(width / size / 0.35)), 0, -1):
        tail = kept // 2
        text = f"{whole[: kept - tail]}…{whole[len(whole) - tail :]}"
        if text_width(text, size) <= width:
            return text
    return "…"


def wrapped(text: str, width: float, size: float, most: int) -> list[str]:
    """Lines of words; what does not fit into the last one is cut there and marked."""
    lines = [""]
    words = one_line(text[:_LONGEST]).split(" ")
    for at, word in enumerate(words):
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < most:
            lines.append(word)
        else:
            rest = " ".join([lines[-1], *words[at:]])
            while rest and text_width(f"{rest}…", size) > width:
                rest = rest[:-1]
            lines[-1] = f"{rest.rstrip()}…"
            break
    return [cut_to_width(line, width, size) for line in lines]


def label(
    x: float,
    y: float,
    words: object,
    anchor: Anchor = "start",
    *,
    fill: str = "",
    size: float = FONT,
    bold: bool = False,
) -> str:
    """One line of text, its baseline at y."""
    said = f' text-anchor="{anchor}"' if anchor != "start" else ""
    said += f' fill="{color(fill)}"' if fill else ""
    said += f' font-size="{number(size)}"' if size != FONT else ""
    said += ' font-weight="600"' if bold else ""
    return f'<text x="{number(x)}" y="{number(y)}"{said}>{escaped(words)}</text>'


# Numbers in words ------------------------------------------------------------------------------


def brief(value: float) -> str:
    """As everywhere, with two digits where there is a power of ten: labels are small."""
    return shared_brief(value, 2)


def times(ratio: float) -> str:
    return (
        f"{f'{ratio:.1f}'.removesuffix('.0')} times"
        if ratio < 9.95
        else f"{brief(float(f'{ratio:.2g}'))} times"
    )


_RAISED = str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·")


def power(base: int, exponent: float) -> str:
    return f"{base}{f'{exponent:g}'.translate(_RAISED)}"


# Shapes ----------------------------------------------------------------------------------------


def path(d: str, **attributes: object) -> str:
    """A path; names of attributes with _ for -."""
    return f'<path d="{d}"{_attributes(attributes)}/>' if d else ""


def group(body: str, **attributes: object) -> str:
    return f"<g{_attributes(attributes)}>{body}</g>" if body else ""


def _attributes(given: dict[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in given.items())


def box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as a piece of a path."""
    return f"M{numbers([x, y])}h{number(width)}v{number(height)}h{number(-width)}z"


def polyline(points: Sequence[tuple[float, float] | None]) -> str:
    """A line as a piece of a path, in steps from point to point; None leaves a gap."""
    out, before = [], None
    for point in points:
        if point is None:
            before = None
            continue
        now = (round(point[0], 1), round(point[1], 1))
        if before is None:
            out.append(f"M{numbers(now)}")
        else:
            step = numbers((now[0] - before[0], now[1] - before[1]))
            starts = out[-1].startswith("M")
            out.append(step if not starts and step.startswith("-") else f"l{step}")
        before = now
    return "".join(out)


# Where markers are drawn with the cap of a line of no length, or as a shape around a point.
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
    """All markers of one kind in one path; each begins with its place."""
    d = "".join(f"M{numbers(point)}{MARKERS[shape]}" for point in points)
    paint = color(fill)
    if shape in ("circle", "square"):
        cap = "round" if shape == "circle" else "square"
        wide = 5.5 if shape == "circle" else 4.6
        return path(d, stroke=paint, stroke_width=wide, stroke_linecap=cap, fill="none")
    if shape == "cross":
        return path(d, stroke=paint, stroke_width=2, fill="none")
    edge = {"stroke": color("paper"), "stroke_width": 0.8} if shape == "star" else {}
    return path(d, fill=paint, **edge)


# The whole -------------------------------------------------------------------------------------


def document(width: float, height: float, title: str, description: str, body: str) -> str:
    """An inline picture: its title is drawn, its title and its numbers are read aloud."""
    head = "".join(
        label(2, 13 + 15 * row, line, size=TITLE_FONT, bold=True)
        for row, line in enumerate(wrapped(title, (width - 4) / BOLD, TITLE_FONT, 2))
    )
    said = escaped(f"{title}. {description}" if description else title)
    return (
        f'<svg class="plot" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" height="{number(height)}" role="img" aria-label="{said}" '
        f'font-family="system-ui,sans-serif" font-size="{number(FONT)}" fill="{color("ink")}">'
        f"{head}{body}</svg>"
    )


def standalone(svg: str) -> str:
    """The same picture as a file or an image: with its own colors in light and dark, on a ground.

    It may still stand inside a page; then its style says to all pictures what `STYLE` says.
    """
    opening, rest = svg.split(">", 1)
    ground = f'<path d="M0 0h4000v4000H0z" fill="{color("paper")}"/>'
    return f'{opening} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{ground}{rest}'
