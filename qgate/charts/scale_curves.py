"""Plot of the error of a format over its scale exponents, the recommended one marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from qgate.charts import svg
from qgate.charts.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    brief,
    color,
    cut_to_width,
    label,
    markers,
    path,
    polyline,
    power,
    text_width,
    times,
)

# Scales whose errors differ by less are called alike.
ALIKE = 1.02
NAME_GAP = 8.0


class ScaleCurve(NamedTuple):
    """The error of a format at each scale exponent, the recommended one, and one beside it.

    beside_name   what the one beside it is: accepted, usual
    """

    format: str
    levels: Sequence[tuple[float, float]]
    recommended: float
    beside: float | None = None
    beside_name: str = "accepted"


def scale_curve(curve: ScaleCurve) -> str:
    """Draw relative MSE over the scale exponent, exact levels in a row at the bottom."""
    levels = sorted(curve.levels)
    recommended, beside = curve.recommended, curve.beside
    marked = [recommended] if beside is None else [recommended, beside]
    ends = [exponent for exponent, _ in levels] + marked
    low, high = min(ends), max(ends)
    air = max(0.04 * (high - low), 0.5)
    x = svg.linear(low - air, high + air, LEFT, RIGHT, "scale exponent (log2)", 8)
    if high - low < 8:
        whole = svg.multiples(x.low, x.high, 1.0)
        x = replace(x, ticks=tuple((v, f"{v:g}".replace("-", "−")) for v in whole))
    y = svg.logarithmic([error for _, error in levels], BOTTOM, TOP + 16, "relative MSE")
    points = [(x.place(exponent), y.place(error)) for exponent, error in levels]
    line = polyline([p if e > 0 else None for p, (_, e) in zip(points, levels, strict=True)])
    shapes = path(line, stroke=color("blue"), stroke_width=1.4, fill="none")
    if len(levels) <= 60:
        shapes += markers("circle", points, "blue")
    shapes += _marks(levels, recommended, beside, x, y)
    description = f"{len(levels)} levels"
    if levels:
        description += f", relative MSE {brief(min(e for _, e in levels))} to "
        description += brief(max(e for _, e in levels))
    labels = _line_names(x, recommended, beside, curve.beside_name)
    return svg.panel(x, y, shapes, labels, scale_finding(curve), f"{description}.")


def _marks(
    levels: list[tuple[float, float]],
    recommended: float,
    beside: float | None,
    x: svg.Axis,
    y: svg.Axis,
) -> str:
    """Mark the recommended level with a star, and the one beside it with a diamond."""
    errors = dict(levels)
    shapes = ""
    if beside is not None and beside != recommended:
        shapes += svg.rule(x.place(beside), TOP + 14, "orange", "4 3")
        if beside in errors:
            point = (x.place(beside), y.place(errors[beside]))
            shapes += markers("diamond", [point], "orange")
    shapes += svg.rule(x.place(recommended), TOP + 14, "green")
    if recommended in errors:
        shapes += markers("star", [(x.place(recommended), y.place(errors[recommended]))], "green")
    return shapes


def _line_names(x: svg.Axis, recommended: float, beside: float | None, name: str) -> str:
    """Write names over the two lines, away from each other."""
    if beside is None or beside == recommended:
        words = "★ recommended" if beside is None else f"★ recommended = {name}"
        width = text_width(words)
        start = min(max(x.place(recommended) - width / 2, LEFT), RIGHT - width)
        return label(start, TOP + 9, words, fill="green")
    lines: list[tuple[float, str, str]] = [
        (x.place(recommended), "★ recommended", "green"),
        (x.place(beside), f"◆ {name}", "orange"),
    ]
    (at, first_name, first_fill), (after, second_name, second_fill) = sorted(lines)
    width, wide = text_width(first_name), text_width(second_name)
    second = min(max(after - 6, at + 6 + NAME_GAP), RIGHT - wide)
    first = max(min(at - width / 2, second - NAME_GAP - width), LEFT)
    second = max(second, first + width + NAME_GAP)
    return label(first, TOP + 9, first_name, fill=first_fill) + label(
        second, TOP + 9, second_name, fill=second_fill
    )


def _scale(exponent: float) -> str:
    return power(2, round(exponent, 2))


def scale_finding(curve: ScaleCurve) -> str:
    """Say in a sentence what the recommended scale saves."""
    errors, word = dict(curve.levels), curve.beside_name
    recommended, beside = curve.recommended, curve.beside
    name = cut_to_width(curve.format, 120, 13)
    best = errors.get(recommended)
    error_text = "" if best is None else f", MSE {brief(best)}" if best else ", exact"
    if beside is None:
        return f"{name}: recommended scale {_scale(recommended)}{error_text}"
    if beside == recommended:
        return f"{name}: {word} scale {_scale(beside)} is recommended{error_text}"
    before = errors.get(beside)
    to = f"{name}: scale {_scale(recommended)}"
    if before == 0:
        other = f"as is {_scale(recommended)}" if best == 0 else f"{_scale(recommended)} is not"
        return f"{name}: {word} scale {_scale(beside)} is exact, {other}"
    if before is None or best is None:
        return f"{to} is recommended, not {_scale(beside)}{error_text}"
    if best == 0:
        return f"{to} is exact, {word} {_scale(beside)} is not"
    ratio = before / best
    if ratio < ALIKE:
        return f"{to} is no better than {word} {_scale(beside)}"
    if ratio < 2:
        saved = f"{100 * (1 - best / before):.0f} %"
        return f"{to} has {saved} less error than {word} {_scale(beside)}"
    return f"{to} has {times(ratio)} less error than {word} {_scale(beside)}"
