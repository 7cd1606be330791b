"""Lines over the same positions, named at their ends: a few in color, the others gray.

A line differs from others by its marker too, never by its color alone. Values of None leave gaps,
and zeros lie in the row that a logarithmic axis reserves for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from qgate.charts import svg
from qgate.charts.svg import (
    Axis,
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

# Up to five lines are all in color; of more only the first four are, and the others gray.
MOST_COLORED, COLORED_OF_MANY = 5, 4
LINE_STYLES = (
    ("blue", "circle"),
    ("orange", "square"),
    ("green", "triangle"),
    ("purple", "diamond"),
    ("ink", "down"),
)
DASH = "4 2.5"
# Markers closer than this run into each other, so only ends and lone points have one.
LEAST_PITCH = 9.0
NAME_WIDTH, NAME_PITCH = 92.0, 13.0


@dataclass(frozen=True)
class Line:
    """Values at the positions 0, 1, 2 ..., and others to compare with, drawn dashed."""

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
        """All values that are drawn, to set the axis by."""
        rows = [line.values for line in (*self.colored, *self.gray)]
        rows += [line.beside for line in self.colored]
        return [value for row in rows for value in row if value is not None]


def color_lines(ranked: Sequence[Line]) -> ColoredLines:
    """Give color to the first lines, which come in the order of their importance."""
    count = len(ranked) if len(ranked) <= MOST_COLORED else COLORED_OF_MANY
    return ColoredLines(ranked[:count], ranked[count:])


def distinct_names(lines: Sequence[Line]) -> list[str]:
    """Shorten names to fit; of long ones, the beginning and end in common go first."""
    names = [line.name[:400] for line in lines]
    if len(names) > 1 and any(text_width(one_line(name)) > NAME_WIDTH for name in names):
        head = _common_start(names)
        tail = _common_start([name[head:][::-1] for name in names])
        start, end = ("…" if head > 1 else names[0][:head]), "…" if tail > 1 else ""
        stop = -tail if tail > 1 else None
        names = [f"{start}{name[head:stop]}{end}" for name in names]
    return [cut_to_width(name, NAME_WIDTH) for name in names]


def _common_start(names: Sequence[str]) -> int:
    columns = takewhile(lambda chars: len(set(chars)) == 1, zip(*names, strict=False))
    return sum(1 for _ in columns)


def draw_lines(lines: ColoredLines, x: Axis, y: Axis) -> str:
    """Draw the lines, the gray ones first, so that none hides one in color."""
    out = "".join(_stroke(line.values, x, y) for line in lines.gray)
    out = group(out, stroke=color("gray"), stroke_opacity=0.55, fill="none")
    for line, (fill, shape) in zip(lines.colored, LINE_STYLES, strict=False):
        beside = _stroke(line.beside, x, y)
        strokes = group(beside, stroke_dasharray=DASH) + _stroke(line.values, x, y, 1.8)
        out += group(strokes, stroke=color(fill), fill="none")
        out += markers(shape, _marked(line.values, x, y), fill)
        if any(value is not None for value in line.beside):
            out += markers(shape, _marked(line.beside, x, y, lone=True), fill)
    return out


def _stroke(values: Values, x: Axis, y: Axis, width: float = 0.0) -> str:
    """Connect neighbors; a lone point has no line."""
    points = [
        None if value is None else (x.place(at), y.place(value)) for at, value in enumerate(values)
    ]
    return path(polyline(points), **({"stroke_width": width} if width else {}))


def _marked(values: Values, x: Axis, y: Axis, *, lone: bool = False) -> list[tuple[float, float]]:
    present = [value is not None for value in values]
    dense = lone or (len(values) > 1 and abs(x.place(1) - x.place(0)) < LEAST_PITCH)
    last = max((at for at, is_point in enumerate(present) if is_point), default=-1)
    return [
        (x.place(at), y.place(value))
        for at, value in enumerate(values)
        if value is not None
        and not (
            dense
            and sum(present[max(at - 1, 0) : at + 2]) > 1
            and (lone or at != last)
            and value != 0
        )
    ]


def line_names(lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Write each line's name at the right, as near to its end as the other names allow."""
    ends = []
    for line, name, style in zip(lines, distinct_names(lines), LINE_STYLES, strict=False):
        points = [(at, value) for at, value in enumerate(line.values) if value is not None]
        if points:
            ends.append((y.place(points[-1][1]), x.place(points[-1][0]), name, style))
    ends.sort(key=lambda end: end[0])
    out, start = "", x.end + 6
    heights = spread([end[0] for end in ends], NAME_PITCH, min(y.end, y.start), max(y.start, y.end))
    for (at, end, name, (fill, shape)), height in zip(ends, heights, strict=True):
        if x.end - end < 12:
            leader = f"M{numbers([end + 4, at])}L{numbers([start, height])}"
            out += path(leader, stroke=color(fill), stroke_opacity=0.6, fill="none")
        out += markers(shape, [(start + 5, height)], fill)
        out += label(start + 12, height + 4, name, fill=fill)
    return out


def spread(positions: Sequence[float], pitch: float, low: float, high: float) -> list[float]:
    """Move ascending positions until they are a pitch apart, each as little as possible."""
    moved: list[float] = []
    for position in positions:
        moved.append(max(position, low, moved[-1] + pitch if moved else low))
    ceiling = high
    for at in range(len(moved) - 1, -1, -1):
        moved[at] = min(moved[at], ceiling)
        ceiling = moved[at] - pitch
    return moved


def gray_key(count: int, noun: str) -> list[tuple[str, str]]:
    """Return a legend entry that says how many lines are gray."""
    return [(svg.stroke_sample("gray", "", 1.4), f"{count} other {noun}")] if count else []


def thin_ticks(texts: Sequence[str], x: Axis, order: Sequence[int]) -> svg.Ticks:
    """Return the texts that have room below their positions; the first in `order` come first."""
    spans: list[tuple[float, float]] = []
    ticks = []
    for at in order:
        half = max(text_width(line) for line in texts[at].split("\n")) / 2 + 3
        middle = x.place(at)
        if all(middle + half <= start or middle - half >= end for start, end in spans):
            spans.append((middle - half, middle + half))
            ticks.append((float(at), texts[at]))
    return tuple(sorted(ticks))


def position_axis(count: int, colored: Sequence[Line], width: float) -> Axis:
    """Make an axis of the positions 0, 1, 2 ... with room for names at the right."""
    air = 0.02 * count + 0.15
    names = max((text_width(name) for name in distinct_names(colored)), default=0.0) + 24
    return Axis("linear", -air, max(count - 1, 0) + air, svg.LEFT, width - names - 2)


def numbered_axis(
    lines: Sequence[Line], count: int, width: float, label: str, first: int = 0, step: int = 1
) -> Axis:
    """Make an axis of `count` positions that stand for numbers from `first` on, `step` apart."""
    x = position_axis(count, lines, width)
    pace = max(1, int(svg.round_step(count * step, 8)))
    start = -(-first // pace) * pace
    numbered = range(start, first + count * step, pace)
    ticks = [((at - first) / step, f"{at:,}") for at in numbered]
    fits = sum(text_width(text) + 8 for _, text in ticks) < x.end - x.start
    chosen = tuple(ticks if fits else ticks[::2])
    return Axis("linear", x.low, x.high, x.start, x.end, chosen, label)


def line_chart(
    lines: ColoredLines, x: Axis, y: Axis, entries: Sequence[tuple[str, str]],
    *, width: float, over: str = "", nothing: str = "",
) -> str:  # fmt: skip
    """Draw lines with their names, `over` on top of them; `nothing` says why there is no line."""
    body = svg.frame(x, y, draw_lines(lines, x, y) + over, width=width)
    body += line_names(lines.colored, x, y) + svg.legend(entries, width - 4)
    return body + (label(width / 2, 130, nothing, "middle", fill="muted") if nothing else "")
