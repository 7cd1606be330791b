"""Plot of the magnitudes of a tensor and of what a format cannot hold."""

from __future__ import annotations

from qgate.charts import svg
from qgate.charts.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    box,
    color,
    cut_to_width,
    label,
    number,
    path,
    power,
)
from qgate.results.pictures import MagnitudePicture
from qgate.text import rounded_percent

# An end of the range this many octaves beyond the data is named, and not drawn to scale.
NEAR_ENDS = 6


def magnitude_histogram(picture: MagnitudePicture) -> str:
    """Draw elements per octave on a logarithmic axis, which shows the tails."""
    counts, low = picture["counts"], picture["low"]
    filled = [at for at, count in enumerate(counts) if count]
    first, last = (filled[0], filled[-1] + 1) if filled else (0, max(len(counts), 1))
    edges, (tall,) = svg.merge_octaves(low, [counts], range(first, last))
    lowest, highest = float(edges[0]), float(edges[-1])
    ends = [picture["smallest"], picture["largest"]]
    near = [
        end if end is not None and lowest - NEAR_ENDS <= end <= highest + NEAR_ENDS else None
        for end in ends
    ]
    drawn_ends = [end for end in near if end is not None]
    x = svg.octaves(
        min([lowest, *drawn_ends]) - 0.5, max([highest, *drawn_ends]) + 0.5, LEFT, RIGHT, "|x|"
    )
    unit = "elements" if edges.step == 1 else f"elements in {edges.step} octaves"
    y = svg.log_count_axis(max(tall), BOTTOM, TOP + 16, unit)
    bars = svg.octave_bars(edges, tall, x, y, 0.5 if len(tall) < 60 else 0.0)
    shapes = path(bars, fill=color("blue"), data_bars="counts") + _range(near, x)
    description = (
        f"{sum(counts):,} values from 2^{lowest:g} to 2^{highest:g}, {picture['zeros']:,} zeros, "
        f"{picture['nonfinite']:,} not finite; {picture['saturated']:,} clipped, "
        f"{picture['flushed']:,} flushed to zero."
    )
    return svg.panel(x, y, shapes, _names(picture, near), magnitudes_finding(picture), description)


def _range(near: list[float | None], x: svg.Axis) -> str:
    """Shade what is outside of the range, with a line where it ends."""
    boxes, lines = "", ""
    for end, far in zip(near, (x.start, x.end), strict=True):
        if end is None:
            continue
        at = x.place(end)
        boxes += box(min(at, far), TOP + 14, abs(far - at), BOTTOM - TOP - 14)
        lines += f"M{number(at)} {number(TOP + 14)}V{number(BOTTOM)}"
    return path(boxes, fill=color("red"), fill_opacity=0.13) + path(
        lines, stroke=color("red"), stroke_dasharray="4 3", fill="none"
    )


def _names(picture: MagnitudePicture, near: list[float | None]) -> str:
    """Write what is lost above either end, and the end itself where it is far away."""
    total = _total(picture)
    words = ""
    for at, (lost, verb) in enumerate(
        ((picture["flushed"], "flushed"), (picture["saturated"], "clipped"))
    ):
        end = picture["largest"] if at else picture["smallest"]
        if end is None and not lost:
            continue
        text = f"{rounded_percent(lost / total)} {verb}"
        if end is not None and near[at] is None and not lost:
            text = f"range {'to' if at else 'from'} {power(2, round(end, 1))}"
        fill = "red" if lost else "muted"
        words += label(RIGHT if at else LEFT, TOP + 9, text, "end" if at else "start", fill=fill)
    notes = []
    if picture["zeros"]:
        notes.append(f"zeros {rounded_percent(picture['zeros'] / total)}")
    if picture["nonfinite"]:
        notes.append(f"not finite {rounded_percent(picture['nonfinite'] / total)}")
    return words + label(RIGHT, svg.STRIP, ", ".join(notes), "end", fill="muted") * bool(notes)


def _total(picture: MagnitudePicture) -> int:
    return sum(picture["counts"]) + picture["zeros"] + picture["nonfinite"] or 1


def magnitudes_finding(picture: MagnitudePicture) -> str:
    total = _total(picture)
    name = cut_to_width(picture["format"], 120, 13)
    parts = []
    if picture["saturated"]:
        parts.append(f"clips {rounded_percent(picture['saturated'] / total)}")
    if picture["flushed"]:
        parts.append(f"flushes {rounded_percent(picture['flushed'] / total)} to zero")
    bad = picture["nonfinite"]
    also = f"; {bad:,} {'is' if bad == 1 else 'are'} not finite" if bad else ""
    if parts:
        return f"{name} {' and '.join(parts)}{also}"
    if not any(picture["counts"]):
        return f"All values are zero{also}" if picture["zeros"] else f"No values{also}"
    if picture["largest"] is None and picture["smallest"] is None:
        filled = [at for at, count in enumerate(picture["counts"]) if count]
        span = filled[-1] - filled[0] + 1
        return f"Magnitudes span {span} octave{'s' if span > 1 else ''}{also}"
    return f"{name} holds all magnitudes: none clipped, none flushed{also}"
