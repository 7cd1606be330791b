"""Pictures of a series of steps as inline SVG, with the steps between which a drift begins."""

from __future__ import annotations

from collections.abc import Sequence

from qgate.charts import axes
from qgate.charts.axes import BOTTOM, TOP
from qgate.charts.lines import (
    Line,
    color_lines,
    line_chart,
    position_axis,
    thin_ticks,
)
from qgate.charts.svg import box, color, document, path
from qgate.engines.series_record import Drift, SeriesRecord

_WIDTH, _HEIGHT = 440.0, 240.0


def series_charts(series: SeriesRecord) -> list[str]:
    """Draw the figures along the steps; a band marks where their drift begins."""
    steps = series.steps
    quarters = ("first quarter", "second", "third", "last quarter")
    charts = [
        _chart(series, f"{series.figure} per token (nats)", ("mean", "99 %"), [
            Line("99 %", [step.q99 for step in steps]),
            Line("mean", [step.mean for step in steps]),
        ]),
        _chart(series, "chi2 of the tokens", ("chi2",), [
            Line("chi2", [step.chi2 for step in steps]),
        ]),
        _chart(series, "k3 in quarters of the samples (nats)", (), [
            Line(name, [step.quarters[at] for step in steps]) for at, name in enumerate(quarters)
        ]),
    ]  # fmt: skip
    shares = [Line("beyond 1.25", [step.beyond for step in steps])]
    if all(step.flips is not None for step in steps):
        shares.append(Line("top-1 flips", [step.flips for step in steps]))
    return [*charts, _chart(series, "share of tokens", ("share beyond",), shares)]


def _chart(series: SeriesRecord, title: str, figures: Sequence[str], lines: Sequence[Line]) -> str:
    colored = color_lines(lines)
    numbers = [str(step.step) for step in series.steps]
    x = position_axis(len(numbers), colored.colored, _WIDTH)
    spaced = [*range(0, len(numbers), max(1, len(numbers) // 6))]
    ticks = thin_ticks(numbers, x, spaced)
    x = axes.Axis("linear", x.low, x.high, x.start, x.end, ticks, "step")
    y = axes.logarithmic(colored.values, BOTTOM, TOP)
    drift = next((d for d in series.drifts if d.figure in figures), None)
    band = "" if drift is None else _band(series, drift, x)
    words = title if drift is None else f"{title}; it changes at step {drift.step}"
    body = band + line_chart(colored, x, y, (), width=_WIDTH)
    return document(_WIDTH, _HEIGHT, title, words, body)


def _band(series: SeriesRecord, drift: Drift, x: axes.Axis) -> str:
    """Mark the steps between which a drift begins."""
    at = {step.step: number for number, step in enumerate(series.steps)}
    start, end = x.place(at[drift.first] - 0.5), x.place(at[drift.last] + 0.5)
    area = path(box(start, TOP, end - start, BOTTOM - TOP), fill=color("red"), fill_opacity=0.18)
    return area + axes.rule(x.place(at[drift.step]), TOP, "red", "3 2")
