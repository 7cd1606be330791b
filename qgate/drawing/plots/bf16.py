"""How tensors use bf16: their densities, the exponents and patterns that occur, their shapes."""

from __future__ import annotations

import math

import numpy as np

from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import BLACK, COLORS
from qgate.charts.sheet import (
    MOST_ROWS,
    Drawing,
    Sheet,
    bars,
    boxes_of,
    height_for,
    legend,
    line,
    log_axis,
    panels,
    plain,
    rows_named,
    sheet,
    signed_log,
)
from qgate.summaries.reading import (
    Floats,
    by_kind,
    figure_of,
    grouped,
    histogram_of,
    kind_of,
    kind_title,
    quant_type_of,
    value_tensors,
    worst,
)
from qgate.summaries.record import DumpAnalysis, GroupPortrait, Portrait
from qgate.text import brief, counted, percent

_MOST_GROUPS = 4
_NAMES = ("bf16", "bfloat16")


def _is_bf16(item: Portrait) -> bool:
    return item.get("counted_as") in _NAMES or str(item.get("dtype", "")) in _NAMES


def _groups(analysis: DumpAnalysis) -> list[GroupPortrait]:
    return [group for group in analysis["groups"] if _is_bf16(group)]


def _build_density(analysis: DumpAnalysis) -> Sheet | None:
    """Original values left, the same from 0 for the least to 1 for the largest right."""
    told = [
        (group, core, whole)
        for group in _groups(analysis)
        if (core := histogram_of(group.get("core")))
        and (whole := histogram_of(group.get("histogram")))
    ]
    if not told:
        return None
    first = {kind: mine[0] for kind, mine in grouped(told, lambda item: kind_of(item[0])).items()}
    shown = worst(first, lambda kind: _peak(first[kind][2]), _MOST_GROUPS)
    kind, peak = shown[0]
    title = (
        f"{kind_title(kind)} crowds most: the fullest of {len(first[kind][2][1])} equal bins from "
        f"its least to its largest value holds {percent(peak)}"
    )
    made = sheet(9.5, 2.5 * len(shown) + 1.0, title)
    drawn = panels(made, 2 * len(shown), 2)
    for row, (kind, _) in enumerate(shown):
        group, (core_edges, middle), (edges, density) = first[kind]
        left, right = drawn[2 * row], drawn[2 * row + 1]
        left.stairs(middle, core_edges, color=COLORS[0], alpha=0.45, fill=True)
        name = f"{plain(kind_title(kind, 34), 36)}, {plain(quant_type_of(group), 14)}"
        dress(left, title=name, x="value (0.1 % to 99.9 %)", y="density")
        left.locator_params(axis="both", nbins=5)
        span = float(edges[-1] - edges[0])
        scaled = density * span
        right.stairs(scaled, (edges - edges[0]) / span, color=COLORS[1], alpha=0.5, fill=True)
        spiked = scaled.max() > 20 * float(np.median(scaled))
        if spiked:
            right.set_yscale("log")
            right.set_ylim(float(scaled[scaled > 0].min()) / 2, float(scaled.max()) * 2)
            log_axis(right, "y")
        right.set_xlim(0, 1)
        dress(
            right,
            title="normalized" + (", log scale" if spiked else ""),
            x="0 least, 1 largest",
            y="density",
        )
    return made


def _peak(histogram: tuple[Floats, Floats]) -> float:
    edges, density = histogram
    return float((density * np.diff(edges)).max())


def _build_usage(analysis: DumpAnalysis) -> Sheet | None:
    groups = [group for group in _groups(analysis) if group.get("usage")]
    kinds = by_kind(groups)
    if not kinds:
        return None
    told = {
        kind: (
            max(group["usage"]["exponents"] for group in mine),
            max(group["usage"]["patterns"] for group in mine),
            max(figure_of(group["usage"], "exponent_bits") for group in mine),
        )
        for kind, mine in kinds.items()
    }
    names = list(told)[:MOST_ROWS]
    most = max(names, key=lambda kind: told[kind][0])
    title = (
        f"At most {told[most][0]} of 256 exponents occur ({kind_title(most)}); "
        f"{brief(max(bits for *_, bits in told.values()))} bits would do for them"
    )
    made = sheet(10.5, height_for(len(names), 0.3), title)
    left, right = made.figure.subplots(1, 2, sharey=True)
    rows = range(len(names))
    for axes, place, of, label in (
        (left, 0, 256, "exponents that occur, of 256"),
        (right, 1, 65536, "bf16 numbers that occur, of 65,536"),
    ):
        values = [told[kind][place] for kind in names]
        bars(axes, values, rows, COLORS[place], 0.7)
        for row, value in enumerate(values):
            extra = f", entropy {told[names[row]][2]:.1f} bits" if place == 0 else ""
            axes.annotate(
                f"{value:,} ({percent(value / of)}){extra}", (value, row), (4, 0), fontsize=SMALL,
                textcoords="offset points", va="center",
            )  # fmt: skip
        axes.set_xlim(0, max(values) * (1.75 if place == 0 else 1.4))
        axes.locator_params(axis="x", nbins=6)
        dress(axes, x=label, grid="x")
    rows_named(left, [kind_title(kind) for kind in names])
    right.tick_params(labelleft=False)
    return made


def _power(value: float, power: int) -> float:
    """What float64 cannot hold, as the variance of huge values, is infinite."""
    return math.prod([value] * power)


def _build_moments(analysis: DumpAnalysis) -> Sheet | None:
    tensors = [t for t in value_tensors(analysis) if _is_bf16(t) and figure_of(t, "std") > 0]
    kinds = dict(list(by_kind(tensors).items())[:MOST_ROWS])
    columns = []
    for label, name, power in (
        ("variance", "std", 2),
        ("skew", "skew", 1),
        ("excess kurtosis", "kurtosis", 1),
    ):
        found = [
            [v for t in mine if math.isfinite(v := _power(figure_of(t, name), power))]
            for mine in kinds.values()
        ]
        if any(found):
            columns.append((label, found))
    if not columns:
        return None
    skewed = worst(tensors, lambda tensor: abs(figure_of(tensor, "skew")))
    title = f"Shapes of {counted(len(tensors), 'tensor')}"
    if skewed:
        most = skewed[0][0]
        title += f": largest skew {brief(figure_of(most, 'skew'))}, in {kind_title(kind_of(most))}"
    made = sheet(3.0 + 3.0 * len(columns), height_for(len(kinds), 0.32), title)
    drawn = made.figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for place, (axes, (label, found)) in enumerate(zip(drawn, columns, strict=True)):
        rows = [row for row, values in enumerate(found) if values]
        boxes_of(axes, [v for v in found if v], rows, [COLORS[place]] * len(rows))
        axes.margins(x=0.06)
        if label == "variance" and min(min(v) for v in found if v) > 0:
            log_axis(axes, "x")
        else:
            signed_log(axes, "x", 1.0 if place else 1e-12)
        dress(axes, x=label, grid="x")
        if place == 0:
            rows_named(axes, [kind_title(kind) for kind in kinds])
        else:
            axes.tick_params(labelleft=False)
    legend(made, {"box: quartiles; whiskers: least and largest": line(BLACK)})
    return made


draw_density = Drawing(_build_density)
draw_usage = Drawing(_build_usage)
draw_moments = Drawing(_build_moments)
