"""Pieces of SVG as text: escaped words, rounded numbers, colors that follow the page, and axes.

Nothing has an id, so hundreds of pictures share a page. Colors are custom properties with a
fallback: a picture looks right on any page and follows one that defines `STYLE`.
"""

from __future__ import annotations

import functools
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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


# Axes: from values to pixels and back, round ticks, a grid, a strip for the legend ----------------

WIDTH, HEIGHT = 340.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 42.0, 332.0, 53.0, 192.0
# The baseline of the strip between title and plot, where the y label and the legend stand.
STRIP = 45.0
# More bars than these are merged: they would be a pixel or two wide.
MOST_BARS = 148
# A bin with few elements is not an empty one.
LEAST_BAR = 1.2

Ticks = tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `end`.

    `zero` is the pixel of exact zeros on a logarithmic axis, where no other pixel means zero.
    """

    kind: Literal["linear", "log", "asinh"]
    low: float
    high: float
    start: float
    end: float
    ticks: Ticks = ()
    label: str = ""
    zero: float | None = None

    def _bent(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(value)
        return math.asinh(value) if self.kind == "asinh" else value

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.kind == "log" and value <= 0:
            return self.start if self.zero is None else self.zero
        low, high = self._bent(self.low), self._bent(self.high)
        share = (self._bent(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def written(self) -> str:
        """Write the axis as an attribute, from which a picture can be read back."""
        zero = "" if self.zero is None else f" {number(self.zero)}"
        ends = f"{self.low:.7g} {self.high:.7g} {number(self.start)} {number(self.end)}"
        return f"{self.kind} {ends}{zero}"


# Axes by what they show ------------------------------------------------------------------------


def linear(
    low: float, high: float, start: float, end: float, label: str = "", most: int = 6
) -> Axis:
    """Make an axis with round ticks; a power of ten that all of them share is in the label."""
    axis = _linear(low, high, start, end, label, most)
    if most <= 2 or end < start:
        return axis
    # The labels below an axis leave room between them.
    ends = [(axis.place(value), text_width(text) / 2) for value, text in axis.ticks]
    fits = all(b - a >= half + other + 4 for (a, half), (b, other) in pairwise(ends))
    return axis if fits else linear(low, high, start, end, label, most - 1)


def _linear(low: float, high: float, start: float, end: float, label: str, most: int) -> Axis:
    step = round_step(high - low, most)
    values = multiples(low, high, step)
    largest = max(abs(low), abs(high))
    decade = math.floor(math.log10(largest)) if largest else 0
    shared = decade if decade < -2 or decade > 3 else 0
    decimals = max(0, shared - math.floor(math.log10(step) + 1e-9))
    ticks = tuple((v, f"{_scaled(v, shared):.{decimals}f}".replace("-", "−")) for v in values)
    ticks = tuple((v, "0" if float(t.replace("−", "-")) == 0 else t) for v, t in ticks)
    named = f"{label} (×{power(10, shared)})" if shared else label
    return Axis("linear", low, high, start, end, ticks, named)


def _scaled(value: float, decade: int) -> float:
    """Divide in two steps, since powers of ten beyond 300 are no floats."""
    half = decade // 2
    return value / 10.0**half / 10.0 ** (decade - half)


def count_axis(most_counted: float, start: float, end: float, label: str = "elements") -> Axis:
    """Make an axis from zero to the largest count."""
    high = max(float(most_counted), 1.0)
    step = max(round_step(high, 4), 1.0)
    ticks = tuple((v, short_count(v)) for v in multiples(0, high, step))
    return Axis("linear", 0.0, high, start, end, ticks, label)


def shares(high: float, start: float, end: float, label: str, most: int = 5) -> Axis:
    """Make an axis from zero to a share, in percent."""
    high = high if high > 0 else 1.0
    step = round_step(100 * high, most)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    values = multiples(0, 100 * high, step)
    ticks = tuple((v / 100, f"{v:.{decimals}f} %" if v else "0 %") for v in values)
    return Axis("linear", 0.0, high, start, end, ticks, label)


def logarithmic(values: Sequence[float], start: float, end: float, label: str = "") -> Axis:
    """Make an axis of positive values, over a decade at least; zeros get a row of their own before
    the start."""
    inside = [math.log10(value) for value in values if value > 0]
    zero = None
    if any(value == 0 for value in values):
        inward = 1.0 if end > start else -1.0
        zero, start = start + 6 * inward, start + 18 * inward
    if not inside:
        ticks: Ticks = () if zero is None else ((0.0, "0"),)
        return Axis("log", 1e-3, 1.0, start, end, ticks, label, zero)
    low, high = min(inside), max(inside)
    air = max(1.0 - (high - low), 0.0) / 2 + 0.05 * max(high - low, 1.0)
    low, high = max(low - air, -307.0), min(high + air, 307.0)
    ticks = _log_ticks(low, high)
    if zero is not None:
        ticks = ((0.0, "0"), *ticks)
    return Axis("log", 10.0**low, 10.0**high, start, end, ticks, label, zero)


def log_count_axis(most_counted: float, start: float, end: float, label: str = "elements") -> Axis:
    """Make a logarithmic axis of counts, from a half on, so that a bar of one element shows."""
    decades = logarithmic([1.0, max(most_counted, 10.0)], start, end)
    ticks = tuple((value, short_count(value)) for value, _ in decades.ticks if value >= 1)
    return Axis("log", 0.5, decades.high, start, end, ticks, label)


def _log_ticks(low: float, high: float) -> Ticks:
    """Mark powers of ten, every second or fifth of many; 2 and 5 of each where there are few."""
    decades = high - low
    if decades >= 1.8:
        step = int(max(1.0, round_step(decades, 6)))
        first = math.ceil(low / step - 1e-9) * step
        powers = range(first, math.floor(high + 1e-9) + 1, step)
        return tuple((10.0**p, f"{10.0**p:g}" if -3 <= p <= 3 else f"1e{p}") for p in powers)
    digits = (1, 2, 5) if decades >= 0.9 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    return tuple(
        (value := digit * 10.0**p, brief(value))
        for p in range(math.floor(low) - 1, math.ceil(high) + 1)
        for digit in digits
        if low <= math.log10(digit) + p <= high
    )


def octaves(low: float, high: float, start: float, end: float, label: str) -> Axis:
    """Make an axis of powers of two by their exponents."""
    step = max(1.0, round_step(high - low, 7, (1, 2, 4, 8)))
    ticks = tuple((v, power(2, v)) for v in multiples(low, high, step))
    return Axis("linear", low, high, start, end, ticks, label)


def round_step(span: float, most: int, digits: Sequence[int] = (1, 2, 5)) -> float:
    """Return the smallest round step that divides a span into at most so many."""
    if not span > 0:
        return 1.0
    decade = math.floor(math.log10(span / most))
    for exponent in (decade, decade + 1):
        for digit in digits:
            step = digit * 10.0**exponent
            if span / step <= most:
                return step
    return 10.0 ** (decade + 2)


def multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def short_count(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:g}"


def merge_octaves(
    low: int, rows: Sequence[Sequence[float]], used: range
) -> tuple[range, list[list[float]]]:
    """Merge two, four or more octaves into one where there are too many to be drawn."""
    width = 1
    while len(used) > MOST_BARS * width:
        width *= 2
    edges = range(low + used.start, low + used.start + width * -(-len(used) // width) + 1, width)
    sums = [
        [sum(row[at : min(at + width, used.stop)]) for at in range(used.start, used.stop, width)]
        for row in rows
    ]
    return edges, sums


# What is drawn of them -------------------------------------------------------------------------


def frame(x: Axis, y: Axis, inside: str = "", *, width: float = WIDTH) -> str:
    """Draw grid, ticks and labels, with the data over the grid and under the base line."""
    start, end = min(x.start, x.end), max(x.start, x.end)
    top, bottom = min(y.start, y.end), max(y.start, y.end)
    if y.zero is not None:
        bottom = y.zero + 6
    rules = "".join(
        f"M{number(start)} {number(y.place(value))}H{number(end)}" for value, _ in y.ticks
    )
    rules += "".join(
        f"M{number(x.place(value))} {number(top)}V{number(bottom)}" for value, _ in x.ticks
    )
    words = "".join(label(start - 5, y.place(value) + 4, text, "end") for value, text in y.ticks)
    for value, text in x.ticks:
        for row, line in enumerate(text.split("\n")):
            # A label moves inwards where it would leave the picture.
            half = text_width(line) / 2
            middle = min(max(x.place(value), half), width - half)
            words += label(middle, bottom + 14 + 13 * row, line, "middle")
    words += label((start + end) / 2, bottom + 30, x.label, "middle") if x.label else ""
    words += label(2, STRIP, y.label) if y.label else ""
    base = f"M{number(start)} {number(bottom)}H{number(end)}"
    return (
        path(rules, stroke=color("grid"), fill="none")
        + f'<g data-x="{x.written()}" data-y="{y.written()}">{inside}</g>'
        + path(base, stroke=color("muted"), fill="none")
        + group(words, fill=color("muted"))
    )


def legend(entries: Sequence[tuple[str, str]], right: float = RIGHT, y: float = STRIP) -> str:
    """Write samples and words from the right in the strip above the plot, where no data are.

    A sample is a piece of SVG drawn around (0, 0), 14 pixels wide.
    """
    out, at = "", right
    for sample, words in reversed(entries):
        at -= text_width(words)
        out += label(at, y, words, fill="muted")
        at -= 12
        out += f'<g transform="translate({number(at)} {number(y - 4)})">{sample}</g>' * bool(sample)
        at -= 14
    return out


def swatch(fill: str) -> str:
    return path("M-5-5h10v10h-10z", fill=color(fill), fill_opacity=1.0)


def stroke_sample(stroke: str, dash: str = "", width: float = 1.8) -> str:
    return path("M-8 0h16", stroke=color(stroke), stroke_width=width, stroke_dasharray=dash)


def rule(at: float, top: float, stroke: str, dash: str = "") -> str:
    """Draw a line from the base of a plot up to `top`."""
    line = f"M{numbers([at, top])}V{number(BOTTOM)}"
    return path(line, stroke=color(stroke), stroke_dasharray=dash)


def bar(start: float, end: float, count: float, y: Axis) -> str:
    """Return a piece of a path from the base line up, high enough to show; nothing for zero."""
    if not count > 0:
        return ""
    top = min(y.place(count), y.start - LEAST_BAR)
    return box(start, top, end - start, y.start - top)


def octave_bars(edges: range, counts: Sequence[float], x: Axis, y: Axis, gap: float) -> str:
    return "".join(
        bar(x.place(at) + gap, x.place(at + edges.step) - gap, count, y)
        for at, count in zip(edges, counts, strict=False)
    )


def panel(x: Axis, y: Axis, inside: str, around: str, title: str, description: str) -> str:
    """Make a picture of the usual size: axes with their data, and text and legend around them."""
    return document(WIDTH, HEIGHT, title, description, frame(x, y, inside) + around)
