"""Moments of each kind of tensor, and the channels that stand out."""

from __future__ import annotations

import math

import numpy as np

from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import BLACK, COLORS, GRAY, WARN
from qgate.charts.sheet import (
    MOST_ROWS,
    Drawing,
    Sheet,
    height_for,
    legend,
    line,
    log_axis,
    panels,
    rows_named,
    sheet,
    signed_log,
    wrapped,
)
from qgate.summaries.reading import (
    by_kind,
    figure_of,
    kind_title,
    outliers,
    row_titles,
    tensor_title,
    value_tensors,
    worst,
)
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import brief

_MOST_CURVES, _MOST_NAMED = 9, 3


def _relative_mean(tensor: TensorPortrait) -> float:
    std = figure_of(tensor, "std")
    return figure_of(tensor, "mean") / std if std > 0 else math.nan


_COLUMNS = (
    ("mean over standard deviation", _relative_mean),
    ("standard deviation", lambda tensor: figure_of(tensor, "std")),
    ("excess kurtosis (normal: 0)", lambda tensor: figure_of(tensor, "kurtosis")),
)


def _build_overview(analysis: DumpAnalysis) -> Sheet | None:
    kinds = {
        kind: [t for t in mine if figure_of(t, "std") > 0]
        for kind, mine in by_kind(value_tensors(analysis)).items()
    }
    kinds = {kind: mine for kind, mine in kinds.items() if mine}
    if not kinds:
        return None
    every = [tensor for mine in kinds.values() for tensor in mine]
    heavy = worst(every, lambda tensor: figure_of(tensor, "kurtosis"))
    if heavy:
        title = (
            f"Heaviest tails: excess kurtosis {brief(heavy[0][1])} at {tensor_title(heavy[0][0])}"
        )
    else:
        wide, std = worst(every, lambda tensor: figure_of(tensor, "std"))[0]
        title = f"Largest standard deviation: {brief(std)} at {tensor_title(wide)}"
    names = list(kinds)[:MOST_ROWS]
    if len(kinds) > len(names):
        title += f"; {len(names)} of {len(kinds)} kinds"
    told = [
        (label, [[v for t in kinds[k] if math.isfinite(v := measure(t))] for k in names])
        for label, measure in _COLUMNS
    ]
    told = [(label, rows) for label, rows in told if any(rows)]
    made = sheet(3.4 + 2.8 * len(told), height_for(len(names), 0.32), title)
    drawn = made.figure.subplots(1, len(told), sharey=True, squeeze=False)[0]
    for place, (axes, (label, rows)) in enumerate(zip(drawn, told, strict=True)):
        y = [row for row, values in enumerate(rows) if values]
        values = [row for row in rows if row]
        axes.hlines(
            y, [min(v) for v in values], [max(v) for v in values], color=COLORS[4], linewidth=4
        )
        axes.plot([float(np.median(v)) for v in values], y, "o", color=COLORS[0], markersize=6)
        axes.margins(x=0.08)
        dress(axes, x=label)
        if label == "standard deviation":
            log_axis(axes, "x")
        else:
            signed_log(axes, "x", 0.01 if place == 0 else 1.0)
        if place == 0:
            rows_named(axes, [kind_title(kind) for kind in names])
        else:
            axes.tick_params(labelleft=False)
    entries = {
        "median of the tensors": line(COLORS[0], "o", linestyle="none"),
        "least to largest": line(COLORS[4], linewidth=4),
    }
    legend(made, entries)
    return made


def _build_channels(analysis: DumpAnalysis) -> Sheet | None:
    told = [t for t in analysis["tensors"] if t.get("channels") and len(t["channels"]["curve"]) > 1]
    shown = worst(told, outliers, _MOST_CURVES)
    if not shown:
        return None
    first, factor = shown[0]
    channel = int(first["channels"]["largest"][0][0])
    times = f"{brief(factor)} times"
    title = f"Channel {channel} of {tensor_title(first)} reaches {times} the median channel"
    if len(told) > len(shown):
        title += f"; the {len(shown)} worst of {len(told)} tensors"
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    made = sheet(max(3.9 * columns, 6.4), 2.5 * rows + 0.9, title)
    titles = row_titles([tensor for tensor, _ in shown], 90)
    drawn = panels(made, len(shown), columns)
    for axes, name, (tensor, factor) in zip(drawn, titles, shown, strict=True):
        channels = tensor["channels"]
        curve = np.maximum(np.asarray(channels["curve"], dtype=np.float64), 0)
        places = np.linspace(1, channels["count"], len(curve))
        axes.plot(places, np.where(curve > 0, curve, np.nan), color=COLORS[0], linewidth=1.6)
        axes.axhline(channels["median"], color=GRAY, linewidth=1, linestyle="--")
        axes.margins(y=0.12)
        log_axis(axes, "y")
        largest = channels["largest"][:_MOST_NAMED]
        large = [(i, size) for i, size in largest if size > 5 * channels["median"]]
        axes.plot(range(1, len(large) + 1), [s for _, s in large], "o", color=WARN, markersize=5)
        names = ", ".join(f"{i} ({brief(size)})" for i, size in large)
        label = f"channel{'s' if len(large) > 1 else ''} {names}" if large else "no outliers"
        axes.text(
            0.97, 0.95, f"{label}\n{brief(factor)}× the median", transform=axes.transAxes,
            ha="right", va="top", fontsize=SMALL, color=WARN if large else BLACK,
        )  # fmt: skip
        dress(
            axes,
            title=wrapped(name, 42),
            x=f"channels by largest magnitude ({channels['count']:,})",
            y="largest magnitude",
        )
    entries = {
        "largest magnitude of each channel": line(COLORS[0]),
        "median channel": line(GRAY, linestyle="--"),
        "more than 5 times the median": line(WARN, "o", linestyle="none"),
    }
    legend(made, entries)
    return made


draw_overview = Drawing(_build_overview)
draw_channels = Drawing(_build_channels)
