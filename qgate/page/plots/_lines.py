"""Lines over the same places, named at their ends: few of them in color, the others gray.

A line differs from others by its marker too, never by its color alone. Values of None leave gaps,
and zeros lie in the row that a logarithmic axis keeps for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from qgate.page.plots import _axes
from qgate.page.plots._axes import Axis
from qgate.page.plots.svg import (
    color,
    cut_to_width,
    group,
    label,
    markers,
    numbers,
    path,
    polyline,
    text_width,
)
from qgate.text import one_line

Values = Sequence[float | None]

# So many lines are all in color; of more only the first few are, and the others gray.
MOST_COLORED, COLORED_OF_MANY = 5, 4
LOOKS = (
    ("blue", "circle"),
    ("orange", "square"),
    ("green", "triangle"),
    ("purple", "diamond"),
    ("ink", "down"),
)
DASH = "4 2.5"
# Markers closer than this run into each other; then only ends and lone points have one.
LEAST_PITCH = 9.0
NAME_WIDTH, NAME_PITCH = 92.0, 13.0


@dataclass(frozen=True)
class Line:
    """Values at the places 0, 1, 2 ..., and others to compare with, drawn dashed."""

    name: str
    values: Values
    beside: Values = ()


@dataclass(frozen=True)
class ColoredLines:
    """The lines in color and the gray ones."""

    colored: Sequence[Line]
    gray: Sequence[Line]

    @property
    def values(self) -> list[float]:
        """All that is drawn, to set the axis by."""
        rows = [line.values for line in (*self.colored, *self.gray)]
        rows += [line.beside for line in self.colored]
        return [value for row in rows for value in row if value is not None]


def chosen(ranked: Sequence[Line]) -> ColoredLines:
    """Of lines in the order of their importance."""
    kept = len(ranked) if len(ranked) <= MOST_COLORED else COLORED_OF_MANY
    return ColoredLines(ranked[:kept], ranked[kept:])


def name_room(lines: Sequence[Line]) -> float:
    """How much room names at the ends of lines need."""
    return max((text_width(name) for name in told_apart(lines)), default=0.0) + 24


def told_apart(lines: Sequence[Line]) -> list[str]:
    """Names that fit; of long ones, what all of them begin and end with is left out first."""
    whole = [line.name[:400] for line in lines]
    if len(whole) > 1 and any(text_width(one_line(name)) > NAME_WIDTH for name in whole):
        head = _same_start(whole)
        tail = _same_start([name[head:][::-1] for name in whole])
        ends = (("…" if head > 1 else whole[0][:head]), "…" if tail > 1 else "")
        cut = [name[head : len(name) - tail if tail > 1 else len(name)] for name in whole]
        whole = [f"{ends[0]}{name}{ends[1]}" for name in cut]
    return [cut_to_width(name, NAME_WIDTH) for name in whole]


def _same_start(names: Sequence[str]) -> int:
    columns = takewhile(lambda chars: len(set(chars)) == 1, zip(*names, strict=False))
    return sum(1 for _ in columns)


def drawn(lines: ColoredLines, x: Axis, y: Axis) -> str:
    """The lines themselves; gray ones first, so that none hides one in color."""
    out = "".join(_stroke(line.values, x, y) for line in lines.gray)
    out = group(out, stroke=color("gray"), stroke_opacity=0.55, fill="none")
    for line, (fill, shape) in zip(lines.colored, LOOKS, strict=False):
        beside = _stroke(line.beside, x, y)
        strokes = group(beside, stroke_dasharray=DASH) + _stroke(line.values, x, y, 1.8)
        out += group(strokes, stroke=color(fill), fill="none")
        out += markers(shape, _marked(line.values, x, y), fill)
        if any(value is not None for value in line.beside):
            out += markers(shape, _marked(line.beside, x, y, lone=True), fill)
    return out


def _stroke(values: Values, x: Axis, y: Axis, width: float = 0.0) -> str:
    """Of two places at least in a row: a lone point has no line."""
    points = [
        None if value is None else (x.place(at), y.place(value)) for at, value in enumerate(values)
    ]
    wide = {"stroke_width": width} if width else {}
    return path(polyline(points), **wide)


def _marked(values: Values, x: Axis, y: Axis, *, lone: bool = False) -> list[tuple[float, float]]:
    known = [value is not None for value in values]
    dense = lone or (len(values) > 1 and abs(x.place(1) - x.place(0)) < LEAST_PITCH)
    last = max((at for at, there in enumerate(known) if there), default=-1)
    found = []
    for at, value in enumerate(values):
        around = known[max(at - 1, 0) : at + 2]
        if value is None or (dense and sum(around) > 1 and (lone or at != last) and value != 0):
            continue
        found.append((x.place(at), y.place(value)))
    return found


def names(lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Each line's name at the right, as near to its end as the other names let it be."""
    ends = []
    for line, name, look in zip(lines, told_apart(lines), LOOKS, strict=False):
        known = [at for at, value in enumerate(line.values) if value is not None]
        value = line.values[known[-1]] if known else None
        if value is not None:
            ends.append((y.place(value), x.place(known[-1]), name, look))
    ends.sort(key=lambda end: end[0])
    out = ""
    places = spread([end[0] for end in ends], NAME_PITCH, min(y.end, y.start), max(y.start, y.end))
    for (at, end, name, (fill, shape)), placed in zip(ends, places, strict=True):
        left = x.end + 6
        if x.end - end < 12:
            leader = f"M{numbers([end + 4, at])}L{numbers([left, placed])}"
            out += path(leader, stroke=color(fill), stroke_opacity=0.6, fill="none")
        out += markers(shape, [(left + 5, placed)], fill)
        out += label(left + 12, placed + 4, name, fill=fill)
    return out


def spread(wanted: Sequence[float], pitch: float, low: float, high: float) -> list[float]:
    """Places in order, at least a pitch apart, none far from where it wants to be."""
    placed: list[float] = []
    for want in wanted:
        placed.append(max(want, low, placed[-1] + pitch if placed else low))
    ceiling = high
    for at in range(len(placed) - 1, -1, -1):
        placed[at] = min(placed[at], ceiling)
        ceiling = placed[at] - pitch
    return placed


def gray_key(count: int, what: str) -> list[tuple[str, str]]:
    """An entry of the legend that says how many lines are gray."""
    return [(_axes.stroke_sample("gray", "", 1.4), f"{count} other {what}")] if count else []


def thinned(texts: Sequence[str], x: Axis, order: Sequence[int]) -> _axes.Ticks:
    """The texts that have room below their places, those first that come first in `order`."""
    taken: list[tuple[float, float]] = []
    kept = []
    for at in order:
        half = max(text_width(line) for line in texts[at].split("\n")) / 2 + 3
        middle = x.place(at)
        if all(middle + half <= left or middle - half >= right for left, right in taken):
            taken.append((middle - half, middle + half))
            kept.append((float(at), texts[at]))
    return tuple(sorted(kept))
