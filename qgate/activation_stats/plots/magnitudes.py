"""Largest, median and smallest magnitudes of every layer: input, output, weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from qgate.activation_stats.plots._sheet import (
    grid,
    grid_sheet,
    groups_of,
    key,
    shared_limits,
    y_label,
)
from qgate.activation_stats.reading import Layers, Look, in_panel, name_of, rounding_note
from qgate.activation_stats.record import ActivationsRecord, LayerActivations, Magnitude
from qgate.charts.palette import BLUE, GREEN, ORANGE, PINK, PURPLE, SKY, WHITE, YELLOW
from qgate.charts.sheet import Sheet, line, log_axis, note
from qgate.summaries.reading import worst
from qgate.text import brief

_OF = {
    ("input", "token"): "largest |x| of a token, over its channels",
    ("input", "channel"): "largest |x| of a channel, over the tokens",
    ("input", "all"): "|x|, of all values",
    ("weight", "channel"): "largest |w| of an input channel, over the outputs",
    ("weight", "all"): "|w|, of all values",
}


@dataclass(frozen=True)
class _Curve:
    name: str
    color: str
    marker: str
    value: Callable[[Magnitude], float]


def _at(values: list[float], place: int) -> float:
    return values[place] if place < len(values) else math.nan


_TOP = (
    _Curve("top-1", ORANGE, "o", lambda m: _at(m["top"], 0)),
    _Curve("top-2", YELLOW, "s", lambda m: _at(m["top"], 1)),
    _Curve("top-3", PINK, "^", lambda m: _at(m["top"], 2)),
    _Curve("median", BLUE, "D", lambda m: m["median"]),
    _Curve("min", GREEN, "v", lambda m: _at(m["low"], 0)),
)
_OUTPUT = (
    _Curve("max", ORANGE, "o", lambda m: _at(m["top"], 0)),
    _Curve("median", BLUE, "D", lambda m: m["median"]),
    _Curve("min-3", SKY, "s", lambda m: _at(m["low"], 2)),
    _Curve("min-2", PURPLE, "^", lambda m: _at(m["low"], 1)),
    _Curve("min-1", GREEN, "v", lambda m: _at(m["low"], 0)),
)


def draw_magnitudes(
    record: ActivationsRecord, role: str, patterns: list[str], look: Look
) -> Sheet | None:
    """The panels of some patterns in one role; a weight is reduced to its input channels."""
    reduced = look.reduced if role != "weight" or look.reduced == "all" else "channel"
    kind = f"magnitude_{role}"
    layers: Layers = []
    for pattern in patterns:
        layers += [each for each in in_panel(record, kind, pattern, role) if each not in layers]
    layers = [each for each in layers if reduced in each.get("magnitude", {})]
    if not layers:
        return None

    def figures(layer: LayerActivations) -> Magnitude:
        return layer["magnitude"][reduced]

    curves = _OUTPUT if role == "output" else _TOP
    groups, more = groups_of(layers)
    made, columns = grid_sheet(groups, _title(layers, figures, role, reduced))
    drawn = grid(made, groups, columns)
    for axes, group in zip(drawn, groups, strict=True):
        for curve in curves:
            values = [curve.value(figures(each)) for each in group.layers]
            shown = [value if value > 0 else math.nan for value in values]
            style = "-" if not group.names and len(shown) > 1 else ""
            axes.plot(
                group.places, shown, style, color=curve.color, marker=curve.marker,
                markersize=4.5 if len(shown) <= 40 else 2.5, linewidth=1.2,
                markeredgecolor=WHITE, markeredgewidth=0.3,
            )  # fmt: skip
    _scale(drawn, [c.value(figures(each)) for each in layers for c in curves])
    what = _OF["weight" if role == "weight" else "input", reduced]
    y_label(made, drawn, what if role == "weight" else f"{what} (mean of samples)")
    if more:
        note(drawn[-1], more)
    near = rounding_note(layers) if reduced == "all" else ""
    entries = {
        f"{c.name} ({near})" if near and c.name == "median" else c.name: line(c.color, c.marker)
        for c in curves
    }
    key(made, entries, look.show_legend)
    return made


def _scale(drawn: list, values: list[float]) -> None:  # type: ignore[type-arg]
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    if positive and max(positive) > 20 * min(positive):
        for axes in drawn:
            axes.set_yscale("log")
        shared_limits(drawn)
        for axes in drawn:
            log_axis(axes, "y")
    else:
        shared_limits(drawn)
        for axes in drawn:
            axes.set_ylim(bottom=0)


def _title(
    layers: Layers, figures: Callable[[LayerActivations], Magnitude], role: str, reduced: str
) -> str:
    found = worst(layers, lambda each: _at(figures(each)["top"], 0))
    if not found:
        return f"No {role} has a magnitude"
    top, value = found[0]
    median = figures(top)["median"]
    many = {"token": "token", "channel": "channel", "all": "value"}[reduced]
    past = f", {brief(value / median)} times its median {many}" if median > 0 else ""
    return f"The {role} of {name_of(top, 60)} reaches {brief(value)}{past}"
