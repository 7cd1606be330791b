"""The error of a format over its scale exponents, with the one that is recommended."""

from __future__ import annotations

from qgate.page.plots import _axes
from qgate.page.plots._axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from qgate.page.plots.svg import (
    brief,
    color,
    cut_to_width,
    document,
    label,
    markers,
    number,
    path,
    polyline,
    power,
    text_width,
    times,
)
from qgate.results.pictures import SweepPicture

# Scales whose errors differ by less are called alike.
ALIKE = 1.02
NAME_GAP = 8.0


def sweep_curve(picture: SweepPicture) -> str:
    """Relative MSE over the scale exponent; exact levels lie in a row at the bottom."""
    levels = sorted(picture["levels"])
    recommended, accepted = picture["recommended"], picture["accepted"]
    marked = [recommended] if accepted is None else [recommended, accepted]
    ends = [exponent for exponent, _ in levels] + marked
    low, high = min(ends), max(ends)
    air = max(0.04 * (high - low), 0.5)
    x = _axes.linear(low - air, high + air, LEFT, RIGHT, "scale exponent (log2)", 8)
    if high - low < 8:
        x = _whole_ticks(x)
    y = _axes.logarithmic([error for _, error in levels], BOTTOM, TOP + 16, "relative MSE")
    points = [(x.place(exponent), y.place(error)) for exponent, error in levels]
    line = polyline([p if e > 0 else None for p, (_, e) in zip(points, levels, strict=True)])
    drawn = path(line, stroke=color("blue"), stroke_width=1.4, fill="none")
    if len(levels) <= 60:
        drawn += markers("circle", points, "blue")
    drawn += _marks(levels, recommended, accepted, x, y)
    said = f"{len(levels)} levels"
    if levels:
        said += f", relative MSE {brief(min(e for _, e in levels))} to "
        said += brief(max(e for _, e in levels))
    body = _axes.frame(x, y, drawn) + _named(x, recommended, accepted)
    return document(WIDTH, HEIGHT, sweep_finding(picture), f"{said}.", body)


def _whole_ticks(x: _axes.Axis) -> _axes.Axis:
    return _axes.Axis(
        "linear",
        x.low,
        x.high,
        x.start,
        x.end,
        tuple((v, f"{v:g}".replace("-", "−")) for v in _axes.multiples(x.low, x.high, 1.0)),
        x.label,
    )


def _marks(
    levels: list[tuple[float, float]],
    recommended: float,
    accepted: float | None,
    x: _axes.Axis,
    y: _axes.Axis,
) -> str:
    """A star at the recommended level and a diamond at the accepted one, if that is another."""
    errors = dict(levels)
    drawn = ""
    if accepted is not None and accepted != recommended:
        at = number(x.place(accepted))
        drawn += path(
            f"M{at} {number(TOP + 14)}V{number(BOTTOM)}",
            stroke=color("orange"),
            stroke_dasharray="4 3",
        )
        if accepted in errors:
            place = (x.place(accepted), y.place(errors[accepted]))
            drawn += markers("diamond", [place], "orange")
    at = number(x.place(recommended))
    drawn += path(f"M{at} {number(TOP + 14)}V{number(BOTTOM)}", stroke=color("green"))
    if recommended in errors:
        drawn += markers("star", [(x.place(recommended), y.place(errors[recommended]))], "green")
    return drawn


def _named(x: _axes.Axis, recommended: float, accepted: float | None) -> str:
    """Names over the two lines, away from each other."""
    if accepted is None or accepted == recommended:
        words = "★ recommended" if accepted is None else "★ recommended = accepted"
        width = text_width(words)
        place = min(max(x.place(recommended) - width / 2, LEFT), RIGHT - width)
        return label(place, TOP + 9, words, fill="green")
    both: list[tuple[float, str, str]] = [
        (x.place(recommended), "★ recommended", "green"),
        (x.place(accepted), "◆ accepted", "orange"),
    ]
    (at, left, left_fill), (after, right, right_fill) = sorted(both)
    width, wide = text_width(left), text_width(right)
    second = min(max(after - 6, at + 6 + NAME_GAP), RIGHT - wide)
    first = max(min(at - width / 2, second - NAME_GAP - width), LEFT)
    second = max(second, first + width + NAME_GAP)
    return label(first, TOP + 9, left, fill=left_fill) + label(
        second, TOP + 9, right, fill=right_fill
    )


def sweep_finding(picture: SweepPicture) -> str:
    errors = dict(picture["levels"])
    recommended, accepted = picture["recommended"], picture["accepted"]
    name = cut_to_width(picture["format"], 120, 13)
    best = errors.get(recommended)
    there = "" if best is None else f", MSE {brief(best)}" if best else ", exact"
    if accepted is None:
        return f"{name}: recommended scale {power(2, recommended)}{there}"
    if accepted == recommended:
        return f"{name}: accepted scale {power(2, accepted)} is recommended{there}"
    before = errors.get(accepted)
    to = f"{name}: scale {power(2, recommended)}"
    if before == 0:
        other = f"as is {power(2, recommended)}" if best == 0 else f"{power(2, recommended)} is not"
        return f"{name}: accepted scale {power(2, accepted)} is exact, {other}"
    if before is None or best is None:
        return f"{to} is recommended, not {power(2, accepted)}{there}"
    if best == 0:
        return f"{to} is exact, accepted {power(2, accepted)} is not"
    ratio = before / best
    if ratio < ALIKE:
        return f"{to} is no better than accepted {power(2, accepted)}"
    if ratio < 2:
        saved = f"{100 * (1 - best / before):.0f} %"
        return f"{to} has {saved} less error than accepted {power(2, accepted)}"
    return f"{to} has {times(ratio)} less error than accepted {power(2, accepted)}"
