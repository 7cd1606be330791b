"""Pictures of two quant types or two formats, and fits of theoretical distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import dress
from qgate.charts.palette import BLACK, COLORS, GRAY
from qgate.charts.sheet import Sheet, plain
from qgate.drawing.plots.distributions import CENTRAL
from qgate.summaries.reading import (
    Floats,
    by_kind,
    figure_of,
    figures_of,
    format_named,
    grouped,
    histogram_of,
    kind_of,
    kind_title,
    outcome_of,
    quant_type_of,
    tensor_title,
    value_tensors,
    worse_db,
    worst,
)
from qgate.summaries.record import DumpAnalysis
from qgate.text import brief, counted, decibels

_MOST_PANELS = 6
_FITS = {"normal": "normal", "laplace": "Laplace", "student_t": "Student t"}
_FIT_COLORS = dict(zip(_FITS, (COLORS[1], COLORS[2], COLORS[0]), strict=True))


def _compared_types(analysis: DumpAnalysis) -> tuple[str, str] | None:
    pair = analysis["comparison"]
    return (pair["first"], pair["second"]) if pair and pair["kind"] == "quant_types" else None


def histograms(analysis: DumpAnalysis) -> Sheet | None:
    """Draw both quant types on one axis, the kinds of the most different deviations first."""
    pair = _compared_types(analysis)
    groups = [group for group in analysis["groups"] if pair and quant_type_of(group) in pair]
    kinds = {
        kind: [(g, bins) for g in mine if (bins := histogram_of(g.get("core"))) is not None]
        for kind, mine in by_kind(groups).items()
    }
    kinds = {k: mine for k, mine in kinds.items() if len({quant_type_of(g) for g, _ in mine}) == 2}
    if not pair or not kinds:
        return None

    def gap(kind: tuple[str, str, str]) -> float:
        stds = [figure_of(group, "std") for group, _ in kinds[kind]]
        return max(stds) / min(stds) - 1 if min(stds) > 0 else 0.0

    farthest = worst(kinds, gap, _MOST_PANELS)
    title = (
        f"{pair[0]} and {pair[1]} differ most in {kind_title(farthest[0][0])}: standard deviations "
        f"{brief(100 * farthest[0][1])} % apart"
        f"{shapes.part_of(len(farthest), len(kinds), 'most different', 'kinds')}"
    )
    page, panels = shapes.tiles(title, len(farthest), (3.9, 2.7))
    colors = charts.type_colors(pair)
    for axes, (kind, _) in zip(panels, farthest, strict=True):
        for group, (edges, density) in kinds[kind]:
            name = quant_type_of(group)
            filled = name == pair[0]
            axes.stairs(
                density, edges, color=colors[name], alpha=0.35 if filled else 1.0, fill=filled,
                linewidth=1.6,
            )  # fmt: skip
        dress(axes, title=plain(kind_title(kind, 44), 46), x=CENTRAL, y="density")
        axes.locator_params(axis="x", nbins=5)
        heights = np.concatenate([density[density > 0] for _, (_, density) in kinds[kind]])
        if heights.max() > 20 * float(np.median(heights)):
            shapes.log_heights(axes, heights, 2, 2)
    area = charts.patch(colors[pair[0]], alpha=0.35)
    charts.legend(page, {pair[0]: area, pair[1]: charts.line(colors[pair[1]])})
    return page


def boxes(analysis: DumpAnalysis) -> Sheet | None:
    pair = _compared_types(analysis)
    if not pair:
        return None
    tensors = grouped(value_tensors(analysis), quant_type_of)
    columns = {
        label: {name: figures_of(tensors.get(name, ()), label).tolist() for name in pair}
        for label in ("mean", "std", "min", "max")
    }
    columns = {label: values for label, values in columns.items() if all(values.values())}
    if not columns:
        return None
    stds = columns.get("std") or next(iter(columns.values()))
    sizes = [f"{name} {brief(float(np.median(np.abs(row))))}" for name, row in stds.items()]
    page = charts.sheet(11, 3.6, f"Median standard deviation: {', '.join(sizes)}")
    panels = charts.panels(page, len(columns), len(columns))
    for axes, (label, values) in zip(panels, columns.items(), strict=True):
        name = f"{label} of the tensors"
        shapes.standing_boxes(axes, values, charts.type_colors(pair), name, most=14)
        axes.margins(y=0.08)
        numbers = np.abs([v for row in values.values() for v in row if v])
        if label == "std" and min(map(min, values.values())) > 0:
            charts.log_axis(axes, "y")
        elif numbers.size:
            middle = max(float(np.median(numbers)), 1e-300)
            charts.signed_log(axes, "y", 10.0 ** math.floor(math.log10(middle)))
    return page


def scatter(analysis: DumpAnalysis) -> Sheet | None:
    comparison = analysis["comparison"]
    grid: Mapping[str, Any] = (comparison.get("scatter") if comparison else None) or {}
    counts = np.asarray(grid.get("counts") or [], dtype=np.float64)
    low, high = figure_of(grid, "low"), figure_of(grid, "high")
    if comparison is None or counts.ndim != 2 or not counts.sum() > 0 or not low < high:
        return None
    pairs = [p for p in comparison["pairs"] if math.isfinite(figure_of(p, "correlation"))]
    title = f"{comparison['second']} against {comparison['first']}"
    if pairs:
        last, value = worst(pairs, lambda pair: -figure_of(pair, "correlation"))[0]
        middle = float(np.median([figure_of(pair, "correlation") for pair in pairs]))
        title += (
            f": correlation {_four(middle)} in the median of {counted(len(pairs), 'pair')}, worst "
            f"{_four(-value)} at {tensor_title(last)}"
        )
    page, axes = shapes.single(title, 7.2, 6.2)
    image = shapes.cell_map(
        axes, np.where(counts > 0, counts, np.nan).T, origin="lower", aspect="equal",
        extent=(low, high, low, high), norm=shapes.log_norm(1, max(2.0, float(counts.max()))),
    )  # fmt: skip
    shapes.diagonal(axes, low, high, color=COLORS[1], linestyle="--")
    axes.set(xlim=(low, high), ylim=(low, high))
    unit = f", in {plain(grid['unit'], 12)}" if grid.get("unit") else ""
    first, second = (plain(comparison[key], 30) for key in ("first", "second"))
    dress(axes, x=f"value in {first}{unit}", y=f"value in {second}{unit}")
    charts.color_bar(page, image, axes, "values in a cell")
    return page


def _four(value: float) -> str:
    """Write a correlation; one that is not 1 does not read as 1."""
    return f"{value:.4f}" if abs(value) < 0.99995 or value == 1 else f"1 − {brief(1 - value)}"


def _density(name: str, fit: Mapping[str, Any], x: Floats) -> Floats | None:
    at, scale = figure_of(fit, "location"), figure_of(fit, "scale")
    if not (scale > 0 and math.isfinite(at)):
        return None
    z = (x - at) / scale
    if name == "normal":
        return np.asarray(np.exp(-0.5 * z * z) / (scale * math.sqrt(2 * math.pi)))
    if name == "laplace":
        return np.asarray(np.exp(-np.abs(z)) / (2 * scale))
    freedom = figure_of(fit, "freedom")
    if not freedom > 0:
        return None
    half = (freedom + 1) / 2
    top = math.lgamma(half) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return np.asarray(np.exp(top - half * np.log1p(z * z / freedom)) / scale)


def fits(analysis: DumpAnalysis) -> Sheet | None:
    """Draw densities with the distributions fitted to them, the heaviest tails first."""
    pair = _compared_types(analysis)
    groups = [(g, bins) for g in analysis["groups"]
              if g.get("fits") and (bins := histogram_of(g.get("core")))]  # fmt: skip
    groups = [item for item in groups if not pair or quant_type_of(item[0]) in pair] or groups
    if not groups:
        return None
    best = [_FITS.get(str(group.get("best")), "") for group, _ in groups]
    name = max(_FITS.values(), key=best.count)
    title = f"{name} fits best: {best.count(name)} of {counted(len(groups), 'group')}"
    heavy = worst(groups, lambda item: abs(figure_of(item[0], "kurtosis")), _MOST_PANELS)
    chosen = [item for item, _ in heavy] or groups[:_MOST_PANELS]
    if len(groups) > len(chosen):
        title += f"; the {len(chosen)} with the heaviest tails"
    page, panels = shapes.tiles(title, len(chosen), (3.9, 2.8))
    for axes, (group, (edges, density)) in zip(panels, chosen, strict=True):
        axes.stairs(density, edges, color=GRAY, alpha=0.45, fill=True)
        x = np.linspace(edges[0], edges[-1], 200)
        for fit, parameters in group["fits"].items():
            curve = _density(fit, parameters, x) if fit in _FITS else None
            if curve is not None:
                width = 2.2 if fit == group.get("best") else 1.0
                axes.plot(x, curve, color=_FIT_COLORS[fit], linewidth=width)
        shapes.log_heights(axes, density, 3, 8)
        kind = plain(kind_title(kind_of(group), 30), 32)
        dress(axes, title=f"{kind}\n{plain(quant_type_of(group), 30)}", x=CENTRAL, y="density")
        axes.locator_params(axis="x", nbins=5)
        if group.get("best") in _FITS:
            charts.note(axes, f"{_FITS[group['best']]} fits best")
    entries = {"values": charts.patch(GRAY, alpha=0.45)}
    entries |= shapes.keys({f"{label} fit": _FIT_COLORS[fit] for fit, label in _FITS.items()})
    charts.legend(page, {**entries, "thick: the best": charts.line(BLACK, linewidth=2.2)})
    return page


def sqnr(analysis: DumpAnalysis) -> Sheet | None:
    """Draw each tensor in the two formats that are compared, or that the quant types stand for."""
    pair = analysis["comparison"]
    names = [format_named(analysis, pair[key]) if pair else None for key in ("first", "second")]
    first, second = names
    if not first or not second or first == second:
        return None
    points: dict[str, list[tuple[float, float]]] = {}
    for tensor in analysis["tensors"]:
        outcomes = [outcome_of(tensor, name) for name in (first, second)]
        x, y = (worse_db(outcome) if outcome else math.nan for outcome in outcomes)
        if math.isfinite(x) and math.isfinite(y):
            points.setdefault(tensor["operation"], []).append((x, y))
    if not points:
        return None
    every = np.array([point for mine in points.values() for point in mine])
    gain = every[:, 1] - every[:, 0]
    title = (
        f"{second} is better than {first} for {(gain > 0).sum()} of "
        f"{counted(len(gain), 'tensor')}; median difference {float(np.median(gain)):+.1f} dB"
    )
    page, axes = shapes.single(title, 6.8, 6.2)
    low, high = float(every.min()) - 1.5, float(every.max()) + 1.5
    shapes.diagonal(axes, low, high, linewidth=1.2)
    operations = list(points)[: len(COLORS)]
    colors = charts.colors_for(operations)
    markers = {name: "os^D"[number % 4] for number, name in enumerate(operations)}
    for name in operations:
        x, y = np.transpose(points[name])
        charts.dots(axes, x, y, colors[name], markers[name], alpha=0.7, s=26)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_aspect("equal")
    charts.note(axes, f"{plain(second, 20)} better", x=0.03)
    charts.note(axes, f"{plain(first, 20)} better", y=0.03)
    dress(
        axes, title="SQNR of each tensor, or without massive elements if worse",
        x=f"{plain(first, 30)} (dB)", y=f"{plain(second, 30)} (dB)",
    )  # fmt: skip
    charts.legend(page, shapes.keys(colors, markers))
    return page


def pairs(analysis: DumpAnalysis) -> Sheet | None:
    comparison = analysis["comparison"]
    distances = [
        (pair, pair["layer"], -10 * math.log10(figure_of(pair, "relative_mse")))
        for pair in (comparison["pairs"] if comparison else ())
        if pair["layer"] is not None and figure_of(pair, "relative_mse") > 0
    ]
    if not comparison or not distances:
        return None
    last, _, value = min(distances, key=lambda item: item[2])
    title = (
        f"Same tensors, {comparison['second']} against {comparison['first']}: worst "
        f"{decibels(value)} at {tensor_title(last)}"
    )
    if comparison["unpaired"]:
        title += f"; {counted(comparison['unpaired'], 'tensor')} without a counterpart"
    page, axes = shapes.single(title, 9.5, 4.2)
    kinds = grouped(distances, lambda item: f"{item[0]['layer_type']} {item[0]['operation']}")
    kinds = dict(list(kinds.items())[: len(COLORS)])
    colors, markers = charts.colors_for(kinds), dict(zip(kinds, "os^DvPX*", strict=False))
    for number, (kind, mine) in enumerate(kinds.items()):
        shift = 0.5 * ((number + 0.5) / len(kinds) - 0.5)
        x, y = np.array([layer for _, layer, _ in mine]) + shift, [value for *_, value in mine]
        charts.dots(axes, x, y, colors[kind], markers[kind], s=20, alpha=0.6)
    dress(axes, x="layer", y="ratio to the difference (dB)", grid="y")
    charts.whole_numbers(axes, "x", 16)
    charts.legend(page, shapes.keys(colors, markers))
    return page
