"""Formats against each other by what they lose, and quant types by what they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts.figure import TICK, dress
from qgate.charts.palette import BLACK, COLORS
from qgate.charts.sheet import (
    Drawing,
    Sheet,
    dots,
    format_colors,
    format_markers,
    legend,
    line,
    log_axis,
    panels,
    plain,
    sheet,
    type_colors,
    whole_numbers,
)
from qgate.drawing.plots.distributions import (
    border_entries,
    border_formats,
    draw_borders,
    span_of,
    stacked_binades,
)
from qgate.summaries.reading import (
    FINE_DB,
    Floats,
    Kind,
    fates,
    figure_of,
    format_names,
    grouped,
    is_quantized,
    kind_of,
    layer_of,
    quant_type_of,
    tensor_title,
    value_tensors,
    worse_db,
    worst,
)
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import brief, counted, decibels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Loss = tuple[TensorPortrait, float]
_FEWEST, _HANDFUL = 20, 5
"""Tensors that a trend needs."""
_LEAST_SLOPE, _LEAST_SPREAD, _EXPLAINED = 0.05, 0.1, 0.25


def losses_of(analysis: DumpAnalysis) -> dict[str, list[Loss]]:
    """The SQNR of every tensor in every format, that without massive elements where it is worse;
    the format with the worst tensor first."""
    found: dict[str, list[Loss]] = {}
    for name in format_names(analysis):
        told = [(tensor, worse_db(fate)) for tensor, fate in fates(analysis["tensors"], name)]
        told = [
            (t, value if value <= FINE_DB else math.inf)
            for t, value in told
            if not math.isnan(value)
        ]
        if told:
            found[name] = told
    return dict(sorted(found.items(), key=lambda item: min(value for _, value in item[1])))


def worst_loss(losses: dict[str, list[Loss]]) -> tuple[str, TensorPortrait, float]:
    """Of all formats; the first of them has it."""
    name = next(iter(losses))
    tensor, value = min(losses[name], key=lambda item: item[1])
    return name, tensor, value


def _build_sqnr(analysis: DumpAnalysis) -> Sheet | None:
    losses = losses_of(analysis)
    if not losses:
        return None
    name, tensor, value = worst_loss(losses)
    title = f"{name} loses most: worst {decibels(value)} at {tensor_title(tensor)}"
    losses = dict(list(losses.items())[: len(COLORS)])
    colors, markers = format_colors(losses), format_markers(losses)
    made = sheet(11, 5.2, title)
    axes = made.figure.subplots()
    finite = [v for told in losses.values() for _, v in told if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    air = max(0.06 * (high - low), 1.0)
    exact = any(v == math.inf for told in losses.values() for _, v in told)
    layers = [
        layer for told in losses.values() for t, _ in told if (layer := layer_of(t)) is not None
    ]
    unknown = min(layers, default=0) - 1
    for place, (name, told) in enumerate(losses.items()):
        shift = 0.7 * ((place + 0.5) / len(losses) - 0.5)
        at = [unknown if (layer := layer_of(t)) is None else layer for t, _ in told]
        y = [min(max(v, low), high + 1.3 * air) for _, v in told]
        x = np.asarray(at) + shift
        thin = 0.5 if len(told) < 400 else 0.2
        dots(axes, x, y, colors[name], markers[name], s=12, alpha=thin, linewidths=0)
        by_layer = grouped(zip(at, y, strict=True), lambda pair: pair[0])
        marked = sorted((layer, min(v for _, v in pairs)) for layer, pairs in by_layer.items())
        mx, my = np.array([m[0] for m in marked]) + shift, [m[1] for m in marked]
        size = 52 if len(marked) < 60 else 20
        dots(axes, mx, my, colors[name], markers[name], s=size, edgecolors=BLACK, linewidths=0.8)
    axes.set_ylim(low - air, high + (2.2 if exact else 1.0) * air)
    if exact:
        axes.text(
            1.005, high + 1.3 * air, f"> {FINE_DB:g} dB", transform=axes.get_yaxis_transform(),
            fontsize=TICK, va="center",
        )  # fmt: skip
    dress(
        axes,
        title="one dot per tensor, the worst of each layer outlined; formats without scales: "
        "as they are or with one power of two, the better",
        x="layer",
        y="SQNR, or without massive elements if worse (dB)",
        grid="y",
    )
    _layer_axis(
        axes, layers, unknown, [layer_of(t) is None for t, _ in next(iter(losses.values()))]
    )
    legend(made, {n: line(colors[n], markers[n], linestyle="none") for n in losses}, columns=8)
    return made


def _layer_axis(axes: Axes, layers: Sequence[int], unknown: int, missing: Sequence[bool]) -> None:
    whole_numbers(axes, "x", 20)
    first = unknown if any(missing) or not layers else unknown + 1
    axes.set_xlim(first - 0.6, max(layers, default=first) + 0.6)
    if first == unknown:
        ticks = [t for t in axes.get_xticks() if unknown < t <= max(layers, default=unknown)]
        names = ["none", *(f"{tick:g}" for tick in ticks)]
        axes.set_xticks([unknown, *ticks], names)


def _build_crest(analysis: DumpAnalysis) -> Sheet | None:
    """What makes a tensor hard for a format: how far its largest value is above the rest."""
    losses = {
        name: [
            (crest, value, kind_of(tensor))
            for tensor, value in told
            if math.isfinite(value) and (crest := _crest(tensor)) >= 1 and not is_quantized(tensor)
        ]
        for name, told in losses_of(analysis).items()
    }
    losses = {name: told for name, told in losses.items() if len(told) >= _FEWEST}
    if not losses:
        return None
    slopes = {name: slope for name, told in losses.items() if (slope := _slope(told)) is not None}
    name = min(slopes, key=lambda n: slopes[n], default="")
    count = max(len(told) for told in losses.values())
    title = f"No format loses steadily more of {counted(count, 'tensor')} with a larger crest"
    if name and slopes[name] < -_LEAST_SLOPE:
        title = (
            f"{name} loses {-slopes[name]:.1f} dB with each doubling of the largest value over "
            f"rms, in {counted(len(losses[name]), 'tensor')}"
        )
    losses = dict(list(losses.items())[: len(COLORS)])
    colors, markers = format_colors(losses), format_markers(losses)
    made = sheet(9.5, 4.8, title)
    axes = made.figure.subplots()
    for name, told in losses.items():
        x, y, _ = zip(*told, strict=True)
        dots(axes, x, y, colors[name], markers[name], alpha=0.75 if len(told) < 400 else 0.4)
    log_axis(axes, "x")
    dress(
        axes,
        title="tensors that are not quantized already",
        x="largest magnitude over root mean square",
        y="SQNR, or without massive elements if worse (dB)",
    )
    legend(made, {n: line(colors[n], markers[n], linestyle="none") for n in losses}, columns=8)
    return made


def _crest(tensor: TensorPortrait) -> float:
    rms = figure_of(tensor, "rms")
    return figure_of(tensor, "amax") / rms if rms > 0 else math.nan


def _slope(told: Sequence[tuple[float, float, Kind]]) -> float | None:
    """Decibels with each doubling of the crest factor among tensors of one kind, which differ in
    nothing else; None where that explains less than a quarter of how they differ, or where it is a
    handful of tensors far out that make it."""
    middle = {
        kind: float(np.median([crest for crest, *_ in points]))
        for kind, points in grouped(told, lambda point: point[2]).items()
    }
    inner = sorted(told, key=lambda point: abs(math.log2(point[0] / middle[point[2]])))
    (x, whole), (_, rest) = _fit(told), _fit(inner[:-_HANDFUL])
    if math.sqrt(float(x @ x) / len(x)) < _LEAST_SPREAD or whole is None or rest is None:
        return None
    return whole if 2 * rest / whole >= 1 else None


def _fit(told: Sequence[tuple[float, float, Kind]]) -> tuple[Floats, float | None]:
    """Deviations of log2 of the crest from the mean of each kind, and the slope if it explains."""
    parts = []
    for found in grouped(told, lambda point: point[2]).values():
        x = np.log2([crest for crest, *_ in found])
        y = np.array([value for _, value, _ in found])
        parts.append(np.stack([x - x.mean(), y - y.mean()]))
    x, y = np.concatenate(parts, axis=1)
    spread, height = float(x @ x), float(y @ y)
    if not (spread > 0 and height > 0):
        return x, None
    slope = float(x @ y) / spread
    return x, slope if slope * slope * spread / height >= _EXPLAINED else None


def _build_quant_types(analysis: DumpAnalysis) -> Sheet | None:
    groups = [group for group in analysis["groups"] if group.get("binades")]
    types = list(grouped(groups, quant_type_of))
    if len(types) < 2:
        return None
    tensors = value_tensors(analysis)
    tops = {
        name: max(
            (figure_of(t, "amax") for t in tensors if quant_type_of(t) == name), default=math.nan
        )
        for name in types
    }
    far = worst(types, lambda name: tops[name])
    near = min((v for v in tops.values() if math.isfinite(v)), default=math.nan)
    title = f"{len(types)} quant types side by side"
    if far and far[0][1] <= 1.05 * near:
        title += f": all reach up to {brief(far[0][1])}"
    elif far and math.isfinite(near):
        title += f": largest magnitudes from {brief(near)} to {brief(far[0][1])} ({far[0][0]})"
    types = types[: len(COLORS)]
    colors, borders = type_colors(types), border_formats(analysis)
    operations = grouped(groups, lambda group: group["operation"])
    chosen = list(operations)[:4]
    made = sheet(max(5.2 * len(chosen), 6.5), 4.2, title)
    for axes, operation in zip(panels(made, len(chosen), len(chosen)), chosen, strict=True):
        mine = operations[operation]
        stacked_binades(
            axes, {n: [g for g in mine if quant_type_of(g) == n] for n in types}, colors
        )
        axes.set_xlim(*span_of(mine))
        draw_borders(axes, borders)
        dress(axes, title=plain(operation), x="log2 of the magnitude", y="values (%)")
        whole_numbers(axes, "x", 8)
    legend(made, {**{n: line(colors[n], linewidth=2) for n in types}, **border_entries(borders)})
    return made


draw_sqnr_by_layer = Drawing(_build_sqnr)
draw_sqnr_by_crest = Drawing(_build_crest)
draw_quant_types = Drawing(_build_quant_types)
