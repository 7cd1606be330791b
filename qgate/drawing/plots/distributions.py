"""Distributions of values: quartiles, tails, moments, densities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import dress
from qgate.charts.palette import BLACK, COLORS
from qgate.charts.shapes import NumberColumn
from qgate.charts.sheet import MOST_ROWS, Sheet, plain
from qgate.summaries.reading import (
    Floats,
    by_kind,
    figure_of,
    grouped,
    histogram_of,
    kind_of,
    kind_title,
    quant_type_of,
    tensor_title,
    value_tensors,
    worst,
)
from qgate.summaries.record import DumpAnalysis, GroupSummary, TensorSummary, ValueSummary
from qgate.text import brief, counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_QQ, _MOST_DENSITIES, _MOST_TYPES = 9, 4, 12
_BF16 = ("bf16", "bfloat16")
CENTRAL = "value (0.1 % to 99.9 %)"

Histogram = tuple[Floats, Floats]


def _numbers(
    kinds: Sequence[Sequence[TensorSummary]], measure: Callable[[TensorSummary], float]
) -> list[list[float]]:
    """Return the finite numbers of each row of tensors."""
    return [[v for t in mine if math.isfinite(v := measure(t))] for mine in kinds]


def _of(name: str, power: int = 1) -> Callable[[TensorSummary], float]:
    """Return a function that reads a figure; a power beyond float64, as of huge values, is inf."""
    return lambda tensor: math.prod([figure_of(tensor, name)] * power)


# Quartiles and tails -----------------------------------------------------------------------------


def boxes(analysis: DumpAnalysis) -> Sheet | None:
    groups = [
        group
        for group in analysis["groups"]
        if figure_of(group, "std") > 0
        and {"0.25", "0.5", "0.75"} <= set(group.get("quantiles", ()))
    ]
    if not groups:
        return None
    groups.sort(key=lambda group: (kind_of(group), quant_type_of(group)))
    total = len(groups)
    far, sigmas = worst(groups, _reach)[0]
    if total > MOST_ROWS:
        groups = [group for group, _ in worst(groups, _reach, MOST_ROWS)]
    title = (
        f"{kind_title(kind_of(far))} reaches {brief(sigmas)} standard deviations from its mean, "
        f"the farthest{shapes.part_of(len(groups), total, 'farthest')}"
    )
    page = charts.sheet(10.5, charts.height_for(len(groups), 0.28), title)
    axes, side = page.figure.subplots(1, 2, sharey=True, width_ratios=(2.6, 1))
    colors = charts.type_colors(grouped(groups, quant_type_of))
    paint = [colors[quant_type_of(group)] for group in groups]
    rows = range(len(groups))
    quartiles = [_box(group) for group in groups]
    charts.quartile_boxes(axes, quartiles, rows, paint)
    for end in ("low", "high"):
        axes.plot([box[end] for box in quartiles], rows, "|", color=BLACK, markersize=7)
    axes.margins(x=0.03)
    charts.signed_log(axes, "x", 1.0)
    dress(
        axes, title="box: quartiles; whiskers: 1 % and 99 %; ticks: extremes",
        x="distance from the mean, in standard deviations", grid="x",
    )  # fmt: skip
    names = [kind_title(kind_of(group)) for group in groups]
    if len(colors) > 1:
        names = [
            f"{name}, {quant_type_of(group)}" for name, group in zip(names, groups, strict=True)
        ]
    charts.name_rows(axes, names)
    side.scatter([figure_of(g, "std") for g in groups], rows, c=paint, s=26, zorder=3)
    side.margins(x=0.12)
    charts.log_axis(side, "x")
    dress(side, x="standard deviation")
    side.tick_params(labelleft=False)
    if len(colors) > 1:
        charts.legend(page, shapes.patches(dict(list(colors.items())[: len(COLORS)])))
    return page


def _reach(group: GroupSummary) -> float:
    mean, std = figure_of(group, "mean"), figure_of(group, "std")
    return max(figure_of(group, "max") - mean, mean - figure_of(group, "min")) / std


_BOX = {
    "whislo": ("0.01", "0.05", "0.25"),
    "q1": ("0.25",),
    "med": ("0.5",),
    "q3": ("0.75",),
    "whishi": ("0.99", "0.95", "0.75"),
    "low": ("0", "0.001", "0.01", "0.25"),
    "high": ("1", "0.999", "0.99", "0.75"),
}


def _box(group: GroupSummary) -> dict[str, float]:
    """Return quantiles in standard deviations from the mean, the nearest one for a missing one."""
    quantiles, mean, std = group["quantiles"], figure_of(group, "mean"), figure_of(group, "std")

    def at(names: Sequence[str]) -> float:
        values = (figure_of(quantiles, name) for name in names)
        return (next(filter(math.isfinite, values), 0.0) - mean) / std

    return {end: at(names) for end, names in _BOX.items()}


def quantile_pairs(group: GroupSummary) -> tuple[Floats, Floats] | None:
    """Return quantiles of a normal distribution and of the values, in standard deviations."""
    points = group.get("qq") or {}
    names = [name for name in points if name not in ("p", "normal")]
    if "normal" not in points or not names:
        return None
    normal = np.asarray(points["normal"], dtype=np.float64)
    values = np.asarray(points[names[0]], dtype=np.float64)
    if normal.shape != values.shape or normal.size < 3:
        return None
    fine = np.isfinite(normal) & np.isfinite(values)
    mean, std = figure_of(group, "mean"), figure_of(group, "std")
    if not (fine.sum() >= 3 and std > 0 and math.isfinite(mean)):
        return None
    return normal[fine], (values[fine] - mean) / std


def normal_quantiles(analysis: DumpAnalysis) -> Sheet | None:
    pairs = [(g, pair) for g in analysis["groups"] if (pair := quantile_pairs(g)) is not None]
    farthest = worst(pairs, lambda item: float(1 - np.corrcoef(*item[1])[0, 1] ** 2), _MOST_QQ)
    if not farthest:
        return None
    first = farthest[0][0][0]
    title = f"{kind_title(kind_of(first))} is farthest from a normal distribution"
    if math.isfinite(kurtosis := figure_of(first, "kurtosis")):
        title += f": excess kurtosis {brief(kurtosis)}"
    title += shapes.part_of(len(farthest), len(pairs), "farthest")
    page, panels = shapes.tiles(title, len(farthest), (3.6, 2.7), extra=0.9, least=6.0)
    for axes, ((group, (normal, values)), _) in zip(panels, farthest, strict=True):
        shapes.diagonal(axes, normal.min(), normal.max(), linewidth=1.2)
        axes.plot(normal, values, "o", color=COLORS[0], markersize=3)
        name = plain(kind_title(kind_of(group), 36), 38)
        tails = f"kurtosis {brief(figure_of(group, 'kurtosis'))}"
        dress(
            axes, title=f"{name}\n{plain(quant_type_of(group), 20)}, {tails}",
            x="normal quantile (standard deviations)", y="quantile of the values",
        )  # fmt: skip
    return page


# Moments of tensors in rows ----------------------------------------------------------------------


def overview(analysis: DumpAnalysis) -> Sheet | None:
    kinds = {
        kind: spread
        for kind, mine in by_kind(value_tensors(analysis)).items()
        if (spread := [tensor for tensor in mine if figure_of(tensor, "std") > 0])
    }
    if not kinds:
        return None
    tensors = [tensor for mine in kinds.values() for tensor in mine]
    if heavy := worst(tensors, _of("kurtosis")):
        title = f"Heaviest tails: excess kurtosis {brief(heavy[0][1])}"
    else:
        heavy = worst(tensors, _of("std"))
        title = f"Largest standard deviation: {brief(heavy[0][1])}"
    title += f" at {tensor_title(heavy[0][0])}"
    names = list(kinds)[:MOST_ROWS]
    if len(kinds) > len(names):
        title += f"; {len(names)} of {len(kinds)} kinds"
    rows = [kinds[kind] for kind in names]
    measures: dict[str, Callable[[TensorSummary], float]] = {
        "mean over standard deviation": lambda t: figure_of(t, "mean") / figure_of(t, "std"),
        "standard deviation": _of("std"),
        "excess kurtosis (normal: 0)": _of("kurtosis"),
    }
    columns: list[NumberColumn] = []
    for label, measure in measures.items():
        if any(numbers := _numbers(rows, measure)):
            unit = None if label == "standard deviation" else 1.0 if columns else 0.01
            columns.append(NumberColumn(label, numbers, unit))

    def draw(axes: Axes, _: int, rows: list[int], values: list[Sequence[float]]) -> None:
        ends = [min(row) for row in values], [max(row) for row in values]
        axes.hlines(rows, *ends, color=COLORS[4], linewidth=4)
        axes.plot([np.median(v) for v in values], rows, "o", color=COLORS[0], markersize=6)

    page = shapes.row_columns(
        title, [kind_title(kind) for kind in names], columns, draw,
        width=3.4 + 2.8 * len(columns), air=0.08, grid="both",
    )  # fmt: skip
    charts.legend(
        page,
        {
            "median of the tensors": charts.line(COLORS[0], "o", linestyle="none"),
            "least to largest": charts.line(COLORS[4], linewidth=4),
        },
    )
    return page


def moments(analysis: DumpAnalysis) -> Sheet | None:
    tensors = [t for t in value_tensors(analysis) if _is_bf16(t) and figure_of(t, "std") > 0]
    kinds = dict(list(by_kind(tensors).items())[:MOST_ROWS])
    columns: list[NumberColumn] = []
    for label, measure in (
        ("variance", _of("std", 2)),
        ("skew", _of("skew")),
        ("excess kurtosis", _of("kurtosis")),
    ):
        numbers = _numbers(list(kinds.values()), measure)
        if any(numbers):
            logarithmic = label == "variance" and min(min(row) for row in numbers if row) > 0
            unit = None if logarithmic else 1.0 if columns else 1e-12
            columns.append(NumberColumn(label, numbers, unit))
    if not columns:
        return None
    title = f"Shapes of {counted(len(tensors), 'tensor')}"
    if skewed := worst(tensors, lambda tensor: abs(figure_of(tensor, "skew"))):
        most = skewed[0][0]
        title += f": largest skew {brief(figure_of(most, 'skew'))}, in {kind_title(kind_of(most))}"

    def draw(axes: Axes, column: int, rows: list[int], values: list[Sequence[float]]) -> None:
        charts.boxes_of(axes, values, rows, [COLORS[column]] * len(rows))

    names = [kind_title(kind) for kind in kinds]
    page = shapes.row_columns(title, names, columns, draw, width=3.0 + 3.0 * len(columns))
    charts.legend(page, {"box: quartiles; whiskers: least and largest": charts.line(BLACK)})
    return page


def type_boxes(analysis: DumpAnalysis) -> Sheet | None:
    """Draw quant types by direction, as gradients and activations do not mix."""
    tensors = value_tensors(analysis)
    types = dict(list(grouped(tensors, quant_type_of).items())[:_MOST_TYPES])
    rows = {
        (name, operation): mine
        for name, typed in types.items()
        for operation, mine in grouped(typed, lambda tensor: tensor["operation"]).items()
        if any(figure_of(tensor, "std") > 0 for tensor in mine)
    }
    if not rows:
        return None
    top, amax = worst(tensors, _of("amax"))[0]
    title = (
        f"{quant_type_of(top)} holds the largest magnitude of {len(types)} quant types: "
        f"{brief(amax)} in {tensor_title(top)}"
    )
    if len(types) == 1:
        title = f"Largest magnitude {brief(amax)}, in {tensor_title(top)}"
    means, *sizes = (_numbers(list(rows.values()), _of(name)) for name in ("mean", "std", "amax"))
    near = [abs(value) for row in means for value in row if value]
    unit = 10.0 ** math.floor(math.log10(max(float(np.median(near)) if near else 1.0, 1e-300)))
    stds, largest = ([[v for v in row if v > 0] for row in column] for column in sizes)
    columns = [
        NumberColumn("mean", means, unit),
        NumberColumn("standard deviation", stds),
        NumberColumn("largest magnitude", largest),
    ]
    colors = charts.type_colors(types)
    paint = [colors[name] for name, _ in rows]

    def draw(axes: Axes, _: int, rows: list[int], values: list[Sequence[float]]) -> None:
        charts.boxes_of(axes, values, rows, [paint[row] for row in rows])

    names = [f"{name}, {operation}" for name, operation in rows]
    return shapes.row_columns(title, names, columns, draw, width=12, height=0.45)


# Densities ---------------------------------------------------------------------------------------


def _is_bf16(item: ValueSummary) -> bool:
    return item.get("counted_as") in _BF16 or str(item.get("dtype", "")) in _BF16


def density(analysis: DumpAnalysis) -> Sheet | None:
    """Draw the values, and beside them the same scaled to 0 for the least, 1 for the largest."""
    first: dict[tuple[str, str, str], tuple[GroupSummary, Histogram, Histogram]] = {}
    for group in filter(_is_bf16, analysis["groups"]):
        core, whole = histogram_of(group.get("core")), histogram_of(group.get("histogram"))
        if core and whole:
            first.setdefault(kind_of(group), (group, core, whole))

    def peak(kind: tuple[str, str, str]) -> float:
        edges, heights = first[kind][2]
        return float((heights * np.diff(edges)).max())

    crowded = worst(first, peak, _MOST_DENSITIES)
    if not crowded:
        return None
    kind, most = crowded[0]
    title = (
        f"{kind_title(kind)} crowds most: the fullest of {len(first[kind][2][1])} equal bins from "
        f"its least to its largest value holds {percent(most)}"
    )
    page = charts.sheet(9.5, 2.5 * len(crowded) + 1.0, title)
    panels = charts.panels(page, 2 * len(crowded), 2)
    for axes, beside, (kind, _) in zip(panels[::2], panels[1::2], crowded, strict=True):
        group, (core_edges, middle), (edges, heights) = first[kind]
        axes.stairs(middle, core_edges, color=COLORS[0], alpha=0.45, fill=True)
        name = f"{plain(kind_title(kind, 34), 36)}, {plain(quant_type_of(group), 14)}"
        dress(axes, title=name, x=CENTRAL, y="density")
        axes.locator_params(axis="both", nbins=5)
        span = float(edges[-1] - edges[0])
        scaled = heights * span
        beside.stairs(scaled, (edges - edges[0]) / span, color=COLORS[1], alpha=0.5, fill=True)
        spiked = scaled.max() > 20 * float(np.median(scaled))
        if spiked:
            shapes.log_heights(beside, scaled, 2, 2)
        beside.set_xlim(0, 1)
        words = "normalized" + (", log scale" if spiked else "")
        dress(beside, title=words, x="0 least, 1 largest", y="density")
    return page


def usage(analysis: DumpAnalysis) -> Sheet | None:
    kinds = by_kind(
        [group for group in analysis["groups"] if _is_bf16(group) and group.get("usage")]
    )
    most = {
        kind: [
            max(figure_of(group["usage"], name) for group in mine)
            for name in ("exponents", "patterns", "exponent_bits")
        ]
        for kind, mine in kinds.items()
    }
    if not most:
        return None
    names = list(most)[:MOST_ROWS]
    top = max(names, key=lambda kind: most[kind][0])
    title = (
        f"At most {most[top][0]:.0f} of 256 exponents occur ({kind_title(top)}); "
        f"{brief(max(bits for *_, bits in most.values()))} bits would do for them"
    )
    page = charts.sheet(10.5, charts.height_for(len(names), 0.3), title)
    panels = page.figure.subplots(1, 2, sharey=True)
    for column, (possible, air, label) in enumerate(
        (
            (256, 1.75, "exponents that occur, of 256"),
            (65536, 1.4, "bf16 numbers that occur, of 65,536"),
        )
    ):
        axes, values = panels[column], [most[kind][column] for kind in names]
        ends = [f", entropy {most[kind][2]:.1f} bits" * (column == 0) for kind in names]
        texts = [
            f"{v:,.0f} ({percent(v / possible)}){e}" for v, e in zip(values, ends, strict=True)
        ]
        shapes.bars(axes, values, texts, COLORS[column])
        axes.set_xlim(0, max(values) * air)
        axes.locator_params(axis="x", nbins=6)
        dress(axes, x=label, grid="x")
    charts.name_rows(panels[0], [kind_title(kind) for kind in names])
    panels[1].tick_params(labelleft=False)
    return page
