"""Two quant types or two formats against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qgate.charts.figure import dress
from qgate.charts.palette import BLACK, COLORS, GRAY, MAP
from qgate.charts.sheet import (
    Drawing,
    Sheet,
    boxes_of,
    color_bar,
    dots,
    legend,
    line,
    log_axis,
    note,
    panels,
    patch,
    plain,
    sheet,
    signed_log,
    type_colors,
    whole_numbers,
)
from qgate.summaries.reading import (
    Floats,
    by_kind,
    fate_of,
    figure_of,
    format_named,
    histogram_of,
    kind_of,
    kind_title,
    quant_type_of,
    tensor_title,
    value_tensors,
    worse_db,
    worst,
)
from qgate.summaries.record import DumpAnalysis, FormatComparison, GroupPortrait
from qgate.text import brief, counted, decibels

_MOST_PANELS = 6
_FITS = {"normal": "normal", "laplace": "Laplace", "student_t": "Student t"}


def _types(analysis: DumpAnalysis) -> tuple[str, str] | None:
    """The two quant types that are compared."""
    told = analysis["comparison"]
    return (told["first"], told["second"]) if told and told["kind"] == "quant_types" else None


def _build_histograms(analysis: DumpAnalysis) -> Sheet | None:
    pair = _types(analysis)
    groups = [g for g in analysis["groups"] if pair and quant_type_of(g) in pair]
    both = {
        kind: [(g, told) for g in mine if (told := histogram_of(g.get("core"))) is not None]
        for kind, mine in by_kind(groups).items()
    }
    both = {k: found for k, found in both.items() if len({quant_type_of(g) for g, _ in found}) == 2}
    if not pair or not both:
        return None
    gaps = {kind: _gap(found) for kind, found in both.items()}
    shown = [kind for kind, _ in worst(both, lambda kind: gaps[kind], _MOST_PANELS)]
    title = (
        f"{pair[0]} and {pair[1]} differ most in {kind_title(shown[0])}: standard deviations "
        f"{100 * gaps[shown[0]]:.2g} % apart"
    )
    if len(both) > len(shown):
        title += f"; the {len(shown)} most different of {len(both)} kinds"
    columns = min(3, len(shown))
    made = sheet(max(3.9 * columns, 6.4), 2.7 * -(-len(shown) // columns) + 1.0, title)
    colors = type_colors(pair)
    for axes, kind in zip(panels(made, len(shown), columns), shown, strict=True):
        for group, (edges, density) in both[kind]:
            name = quant_type_of(group)
            filled = name == pair[0]
            axes.stairs(
                density, edges, color=colors[name], alpha=0.35 if filled else 1.0, fill=filled,
                linewidth=1.6,
            )  # fmt: skip
        dress(axes, title=plain(kind_title(kind, 44), 46), x="value (0.1 % to 99.9 %)", y="density")
        axes.locator_params(axis="x", nbins=5)
        heights = np.concatenate([density[density > 0] for _, (_, density) in both[kind]])
        if heights.max() > 20 * float(np.median(heights)):
            axes.set_yscale("log")
            axes.set_ylim(float(heights.min()) / 2, float(heights.max()) * 2)
            log_axis(axes, "y")
    legend(made, {pair[0]: patch(colors[pair[0]], alpha=0.35), pair[1]: line(colors[pair[1]])})
    return made


def _gap(found: list[tuple[GroupPortrait, tuple[Floats, Floats]]]) -> float:
    """How far the standard deviations are apart, as a part of the smaller one."""
    stds = [figure_of(group, "std") for group, _ in found]
    return max(stds) / min(stds) - 1 if min(stds) > 0 else 0.0


def _build_boxes(analysis: DumpAnalysis) -> Sheet | None:
    pair = _types(analysis)
    if not pair:
        return None
    tensors = [t for t in value_tensors(analysis) if quant_type_of(t) in pair]
    columns = [
        (label, name, {p: [t for t in tensors if quant_type_of(t) == p] for p in pair})
        for label, name in (("mean", "mean"), ("std", "std"), ("min", "min"), ("max", "max"))
    ]
    told = [
        (
            label,
            [
                [v for t in mine if math.isfinite(v := figure_of(t, name))]
                for mine in found.values()
            ],
        )
        for label, name, found in columns
    ]
    told = [(label, rows) for label, rows in told if all(rows)]
    if not told:
        return None
    sizes = [float(np.median(np.abs(row))) for row in dict(told).get("std", told[0][1])]
    title = f"Median standard deviation: {pair[0]} {brief(sizes[0])}, {pair[1]} {brief(sizes[1])}"
    colors = type_colors(pair)
    made = sheet(11, 3.6, title)
    for axes, (label, rows) in zip(panels(made, len(told), len(told)), told, strict=True):
        boxes_of(axes, rows, range(2), [colors[name] for name in pair], vertical=True)
        axes.set_xlim(-0.6, 1.6)
        axes.set_xticks(range(2), [plain(name, 14) for name in pair])
        axes.margins(y=0.08)
        values = np.abs([v for row in rows for v in row if v])
        if label == "std" and min(min(row) for row in rows) > 0:
            log_axis(axes, "y")
        elif values.size:
            signed_log(
                axes, "y", 10.0 ** math.floor(math.log10(max(float(np.median(values)), 1e-300)))
            )
        dress(axes, y=f"{label} of the tensors", grid="y")
    return made


def _build_scatter(analysis: DumpAnalysis) -> Sheet | None:
    told = analysis["comparison"]
    grid: Mapping[str, Any] = (told.get("scatter") if told else None) or {}
    counts = np.asarray(grid.get("counts") or [], dtype=np.float64)
    low, high = figure_of(grid, "low"), figure_of(grid, "high")
    if told is None or counts.ndim != 2 or not counts.sum() > 0 or not low < high:
        return None
    pairs = [p for p in told["pairs"] if math.isfinite(figure_of(p, "correlation"))]
    title = f"{told['second']} against {told['first']}"
    if pairs:
        last, value = worst(pairs, lambda p: -figure_of(p, "correlation"))[0]
        middle = float(np.median([figure_of(p, "correlation") for p in pairs]))
        title += (
            f": correlation {_four(middle)} in the median of {counted(len(pairs), 'pair')}, worst "
            f"{_four(-value)} at {tensor_title(last)}"
        )
    from matplotlib.colors import LogNorm

    made = sheet(7.2, 6.2, title)
    axes = made.figure.subplots()
    image = axes.imshow(
        np.where(counts > 0, counts, np.nan).T, origin="lower", extent=(low, high, low, high),
        cmap=MAP, norm=LogNorm(1, max(2.0, float(counts.max()))), aspect="equal",
        interpolation="nearest",
    )  # fmt: skip
    axes.plot([low, high], [low, high], color=COLORS[1], linewidth=1, linestyle="--")
    axes.set(xlim=(low, high), ylim=(low, high))
    unit = f", in {plain(grid['unit'], 12)}" if grid.get("unit") else ""
    first, second = plain(told["first"], 30), plain(told["second"], 30)
    dress(axes, x=f"value in {first}{unit}", y=f"value in {second}{unit}")
    color_bar(made, image, axes, "values in a cell")
    return made


def _four(value: float) -> str:
    """A correlation; one that is not 1 does not read as 1."""
    return f"{value:.4f}" if abs(value) < 0.99995 or value == 1 else f"1 − {brief(1 - value)}"


def _density(name: str, fit: dict[str, float], x: Floats) -> Floats | None:
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


def _build_fits(analysis: DumpAnalysis) -> Sheet | None:
    groups = [g for g in analysis["groups"] if g.get("fits") and histogram_of(g.get("core"))]
    pair = _types(analysis)
    groups = [g for g in groups if pair is None or quant_type_of(g) in pair] or groups
    if not groups:
        return None
    best = [_FITS.get(str(g.get("best")), "") for g in groups]
    wins = {name: best.count(name) for name in _FITS.values()}
    name = max(wins, key=lambda n: wins[n])
    title = f"{name} fits best: {wins[name]} of {counted(len(groups), 'group')}"
    shown = [g for g, _ in worst(groups, lambda g: abs(figure_of(g, "kurtosis")), _MOST_PANELS)]
    shown = shown or groups[:_MOST_PANELS]
    if len(groups) > len(shown):
        title += f"; the {len(shown)} with the heaviest tails"
    columns = min(3, len(shown))
    made = sheet(max(3.9 * columns, 6.4), 2.8 * -(-len(shown) // columns) + 1.0, title)
    colors = dict(zip(_FITS, (COLORS[1], COLORS[2], COLORS[0]), strict=True))
    for axes, group in zip(panels(made, len(shown), columns), shown, strict=True):
        edges, density = histogram_of(group["core"]) or (np.zeros(2), np.zeros(1))
        axes.stairs(density, edges, color=GRAY, alpha=0.45, fill=True)
        x = np.linspace(edges[0], edges[-1], 200)
        for fit, told in group["fits"].items():
            curve = _density(fit, dict(told), x) if fit in colors else None  # type: ignore[arg-type]
            if curve is not None:
                width = 2.2 if fit == group.get("best") else 1.0
                axes.plot(x, curve, color=colors[fit], linewidth=width)
        positive = density[density > 0]
        axes.set_yscale("log")
        axes.set_ylim(float(positive.min()) / 3, float(positive.max()) * 8)
        log_axis(axes, "y")
        kind = kind_title(kind_of(group), 30)
        dress(
            axes,
            title=f"{plain(kind, 32)}\n{plain(quant_type_of(group), 30)}",
            x="value (0.1 % to 99.9 %)",
            y="density",
        )
        axes.locator_params(axis="x", nbins=5)
        if group.get("best") in _FITS:
            note(axes, f"{_FITS[group['best']]} fits best")
    entries = {f"{label} fit": line(colors[fit]) for fit, label in _FITS.items()}
    legend(
        made,
        {
            "values": patch(GRAY, alpha=0.45),
            **entries,
            "thick: the best": line(BLACK, linewidth=2.2),
        },
    )
    return made


def _formats(analysis: DumpAnalysis, told: FormatComparison) -> tuple[str, str] | None:
    """The two formats to compare: those named, or those the two quant types stand for."""
    first, second = (format_named(analysis, told[key]) for key in ("first", "second"))
    return (first, second) if first and second and first != second else None


def _build_sqnr(analysis: DumpAnalysis) -> Sheet | None:
    told = analysis["comparison"]
    names = _formats(analysis, told) if told else None
    if names is None:
        return None
    points: list[tuple[float, float, str]] = []
    for tensor in analysis["tensors"]:
        fates = [fate_of(tensor, name) for name in names]
        ratios = [worse_db(fate) if fate else math.nan for fate in fates]
        if all(math.isfinite(ratio) for ratio in ratios):
            points.append((ratios[0], ratios[1], tensor["operation"]))
    if not points:
        return None
    gain = [b - a for a, b, _ in points]
    better = sum(g > 0 for g in gain)
    title = (
        f"{names[1]} is better than {names[0]} for {better} of {counted(len(points), 'tensor')}; "
        f"median difference {float(np.median(gain)):+.1f} dB"
    )
    made = sheet(6.8, 6.2, title)
    axes = made.figure.subplots()
    low = min(min(a, b) for a, b, _ in points) - 1.5
    high = max(max(a, b) for a, b, _ in points) + 1.5
    axes.plot([low, high], [low, high], color=GRAY, linewidth=1.2)
    operations = list(dict.fromkeys(op for *_, op in points))[: len(COLORS)]
    for place, operation in enumerate(operations):
        x, y = zip(*[(a, b) for a, b, op in points if op == operation], strict=True)
        dots(axes, x, y, COLORS[place], "os^D"[place % 4], alpha=0.7, s=26)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_aspect("equal")
    note(axes, f"{plain(names[1], 20)} better", x=0.03)
    note(axes, f"{plain(names[0], 20)} better", y=0.03)
    dress(
        axes,
        title="SQNR of each tensor, or without massive elements if worse",
        x=f"{plain(names[0], 30)} (dB)",
        y=f"{plain(names[1], 30)} (dB)",
    )
    legend(
        made,
        {o: line(COLORS[i], "os^D"[i % 4], linestyle="none") for i, o in enumerate(operations)},
    )
    return made


def _build_pairs(analysis: DumpAnalysis) -> Sheet | None:
    """How far the same tensors are apart, layer by layer."""
    told = analysis["comparison"]
    pairs = [
        (p, p["layer"], -10 * math.log10(figure_of(p, "relative_mse")))
        for p in (told["pairs"] if told else ())
        if p["layer"] is not None and figure_of(p, "relative_mse") > 0
    ]
    if not told or not pairs:
        return None
    last, _, value = min(pairs, key=lambda item: item[2])
    title = (
        f"Same tensors, {told['second']} against {told['first']}: worst {decibels(value)} at "
        f"{tensor_title(last)}"
    )
    if told["unpaired"]:
        title += f"; {counted(told['unpaired'], 'tensor')} without a counterpart"
    made = sheet(9.5, 4.2, title)
    axes = made.figure.subplots()
    kinds = list(dict.fromkeys(f"{p['layer_type']} {p['operation']}" for p, *_ in pairs))[
        : len(COLORS)
    ]
    for place, kind in enumerate(kinds):
        mine = [(x, y) for p, x, y in pairs if f"{p['layer_type']} {p['operation']}" == kind]
        shift = 0.5 * ((place + 0.5) / len(kinds) - 0.5)
        x, y = np.array([m[0] for m in mine]) + shift, [m[1] for m in mine]
        dots(axes, x, y, COLORS[place], "os^DvPX*"[place % 8], s=20, alpha=0.6)
    dress(axes, x="layer", y="ratio to the difference (dB)", grid="y")
    whole_numbers(axes, "x", 16)
    legend(
        made, {k: line(COLORS[i], "os^DvPX*"[i % 8], linestyle="none") for i, k in enumerate(kinds)}
    )
    return made


draw_pair_histograms = Drawing(_build_histograms)
draw_pair_boxes = Drawing(_build_boxes)
draw_scatter = Drawing(_build_scatter)
draw_fits = Drawing(_build_fits)
draw_pair_sqnr = Drawing(_build_sqnr)
draw_pairs = Drawing(_build_pairs)
