"""Losses of formats: by layer, by crest, by quant type, of gradients, and by saturation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import SMALL, TICK, dress
from qgate.charts.palette import BLACK, COLORS, WARN
from qgate.charts.sheet import Sheet
from qgate.drawing.losses import share_in
from qgate.summaries.reading import (
    FINE_DB,
    Floats,
    Kind,
    cast_names,
    figure_of,
    flushed,
    format_label,
    format_names,
    format_outcomes,
    grouped,
    is_gradient,
    is_quantized,
    kind_of,
    layer_of,
    quant_type_of,
    saturation_cost,
    tensor_title,
    worse_db,
)
from qgate.summaries.record import DumpAnalysis, TensorSummary
from qgate.text import counted, decibels, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Loss = tuple[TensorSummary, float]
_FEWEST, _HANDFUL = 20, 5
"""A trend needs so many tensors, and must not come from so few."""
_LEAST_SLOPE, _LEAST_SPREAD, _EXPLAINED = 0.05, 0.1, 0.25
_SQNR = "SQNR, or without massive elements if worse (dB)"


def _losses_of(analysis: DumpAnalysis) -> dict[str, list[Loss]]:
    """Return the SQNR of every tensor in every format, with or without massive elements, whichever
    is worse; the format with the worst tensor first."""
    losses: dict[str, list[Loss]] = {}
    for name in format_names(analysis):
        ratios = [
            (tensor, worse_db(outcome))
            for tensor, outcome in format_outcomes(analysis["tensors"], name)
        ]
        pairs = [(t, v if v <= FINE_DB else math.inf) for t, v in ratios if not math.isnan(v)]
        if pairs:
            losses[name] = pairs
    return dict(sorted(losses.items(), key=lambda item: min(value for _, value in item[1])))


def _worst_loss(losses: dict[str, list[Loss]]) -> tuple[str, TensorSummary, float]:
    """Return the worst tensor of the first format, which is the worst of all."""
    name = next(iter(losses))
    return name, *min(losses[name], key=lambda item: item[1])


def sqnr_by_layer(analysis: DumpAnalysis) -> Sheet | None:
    losses = _losses_of(analysis)
    if not losses:
        return None
    name, tensor, value = _worst_loss(losses)
    title = f"{name} loses most: worst {decibels(value)} at {tensor_title(tensor)}"
    losses = dict(list(losses.items())[: len(COLORS)])
    colors, markers = charts.format_colors(losses), charts.format_markers(losses)
    page, axes = shapes.single(title, 11, 5.2)
    tensors, values = zip(*(item for pairs in losses.values() for item in pairs), strict=True)
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    air = max(0.06 * (high - low), 1.0)
    exact = math.inf in values
    layers = [layer for tensor in tensors if (layer := layer_of(tensor)) is not None]
    unknown = min(layers, default=0) - 1
    for number, (name, pairs) in enumerate(losses.items()):
        shift = 0.7 * ((number + 0.5) / len(losses) - 0.5)
        at = [unknown if (layer := layer_of(t)) is None else layer for t, _ in pairs]
        y = [min(max(v, low), high + 1.3 * air) for _, v in pairs]
        thin = 0.5 if len(pairs) < 400 else 0.2
        color, marker = colors[name], markers[name]
        charts.dots(axes, np.asarray(at) + shift, y, color, marker, s=12, alpha=thin, linewidths=0)
        by_layer = grouped(zip(at, y, strict=True), lambda pair: pair[0])
        lowest = sorted((layer, min(v for _, v in mine)) for layer, mine in by_layer.items())
        x, y = np.array([layer for layer, _ in lowest]) + shift, [v for _, v in lowest]
        size = 52 if len(lowest) < 60 else 20
        charts.dots(axes, x, y, color, marker, s=size, edgecolors=BLACK, linewidths=0.8)
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
        y=_SQNR,
        grid="y",
    )
    missing = any(layer_of(tensor) is None for tensor, _ in next(iter(losses.values())))
    _layer_axis(axes, layers, unknown, missing=missing)
    charts.legend(page, shapes.keys(colors, markers), columns=8)
    return page


def _layer_axis(axes: Axes, layers: Sequence[int], unknown: int, *, missing: bool) -> None:
    charts.whole_numbers(axes, "x", 20)
    first = unknown if missing or not layers else unknown + 1
    axes.set_xlim(first - 0.6, max(layers, default=first) + 0.6)
    if first == unknown:
        ticks = [t for t in axes.get_xticks() if unknown < t <= max(layers, default=unknown)]
        axes.set_xticks([unknown, *ticks], ["none", *(f"{tick:g}" for tick in ticks)])


def sqnr_by_crest(analysis: DumpAnalysis) -> Sheet | None:
    """Draw SQNR over crest factor: outliers make a tensor hard for a format."""
    points = {
        name: [
            (crest, value, kind_of(tensor))
            for tensor, value in pairs
            if math.isfinite(value) and (crest := _crest(tensor)) >= 1 and not is_quantized(tensor)
        ]
        for name, pairs in _losses_of(analysis).items()
    }
    points = {name: mine for name, mine in points.items() if len(mine) >= _FEWEST}
    if not points:
        return None
    slopes = {name: slope for name, mine in points.items() if (slope := _slope(mine)) is not None}
    name = min(slopes, key=lambda n: slopes[n], default="")
    count = max(len(mine) for mine in points.values())
    title = f"No format loses steadily more of {counted(count, 'tensor')} with a larger crest"
    if name and slopes[name] < -_LEAST_SLOPE:
        title = (
            f"{name} loses {-slopes[name]:.1f} dB with each doubling of the largest value over "
            f"rms, in {counted(len(points[name]), 'tensor')}"
        )
    points = dict(list(points.items())[: len(COLORS)])
    colors, markers = charts.format_colors(points), charts.format_markers(points)
    page, axes = shapes.single(title, 9.5, 4.8)
    for name, mine in points.items():
        x, y, _ = zip(*mine, strict=True)
        thin = 0.75 if len(mine) < 400 else 0.4
        charts.dots(axes, x, y, colors[name], markers[name], alpha=thin)
    charts.log_axis(axes, "x")
    dress(
        axes, title="tensors that are not quantized already",
        x="largest magnitude over root mean square", y=_SQNR,
    )  # fmt: skip
    charts.legend(page, shapes.keys(colors, markers), columns=8)
    return page


def _crest(tensor: TensorSummary) -> float:
    rms = figure_of(tensor, "rms")
    return figure_of(tensor, "amax") / rms if rms > 0 else math.nan


def _slope(points: Sequence[tuple[float, float, Kind]]) -> float | None:
    """Fit decibels with each doubling of the crest factor among tensors of one kind; None where
    that explains less than a quarter of their variation, or where a handful of tensors far out
    causes it."""
    middle = {
        kind: float(np.median([crest for crest, *_ in mine]))
        for kind, mine in grouped(points, lambda point: point[2]).items()
    }
    inner = sorted(points, key=lambda point: abs(math.log2(point[0] / middle[point[2]])))
    (x, whole), (_, most) = _fit(points), _fit(inner[:-_HANDFUL])
    if math.sqrt(float(x @ x) / len(x)) < _LEAST_SPREAD or whole is None or most is None:
        return None
    return whole if 2 * most / whole >= 1 else None


def _fit(points: Sequence[tuple[float, float, Kind]]) -> tuple[Floats, float | None]:
    """Return deviations of log2 of the crest from the mean of its kind, and the slope if any."""
    parts = []
    for mine in grouped(points, lambda point: point[2]).values():
        x = np.log2([crest for crest, *_ in mine])
        y = np.array([value for _, value, _ in mine])
        parts.append(np.stack([x - x.mean(), y - y.mean()]))
    x, y = np.concatenate(parts, axis=1)
    spread, height = float(x @ x), float(y @ y)
    if not (spread > 0 and height > 0):
        return x, None
    slope = float(x @ y) / spread
    return x, slope if slope * slope * spread / height >= _EXPLAINED else None


def losses_by_type(analysis: DumpAnalysis) -> Sheet | None:
    losses = _losses_of(analysis)
    if not losses:
        return None
    name, tensor, value = _worst_loss(losses)
    title = f"Worst of all: {decibels(value)} in {name}, {tensor_title(tensor)}"
    finite = {
        name: [(quant_type_of(t), v) for t, v in pairs if math.isfinite(v)]
        for name, pairs in losses.items()
    }
    finite = {name: pairs for name, pairs in finite.items() if pairs}
    if not finite:
        return None
    types = list(dict.fromkeys(kind for pairs in finite.values() for kind, _ in pairs))
    types = types[: len(COLORS)]
    colors, height = charts.type_colors(types), 0.8 / len(types)
    rows = len(finite) * len(types)
    page, axes = shapes.single(title, 10, min(charts.height_for(rows, 0.26, 3.0), 11.0))
    boxes = [
        (row + (number - (len(types) - 1) / 2) * height, numbers, colors[kind])
        for row, pairs in enumerate(finite.values())
        for number, kind in enumerate(types)
        if (numbers := [value for of, value in pairs if of == kind])
    ]
    positions, values, paint = zip(*boxes, strict=True)
    charts.boxes_of(axes, values, positions, paint, width=0.85 * height)
    charts.name_rows(axes, list(finite))
    dress(
        axes, title="quartiles of the tensors, whiskers to the worst and best; exact ones left out",
        x=_SQNR, grid="x",
    )  # fmt: skip
    charts.legend(page, shapes.patches(colors))
    return page


def saturation(analysis: DumpAnalysis) -> Sheet | None:
    """Draw the part of the squared error that comes from saturation, in formats whose scale rule
    leaves the largest values of a block out, in healthy tensors too."""
    casts = cast_names(analysis)
    costs = {
        name: [
            100 * cost
            for _, outcome in format_outcomes(analysis["tensors"], name)
            if math.isfinite(cost := saturation_cost(outcome))
        ]
        for name in format_names(analysis)
        if name not in casts
    }
    costs = {name: values for name, values in costs.items() if any(values)}
    costs = dict(sorted(costs.items(), key=lambda item: -float(np.median(item[1]))))
    if not costs:
        return None
    name, values = next(iter(costs.items()))
    title = (
        f"By design {name} owes {percent(float(np.median(values)) / 100)} of its squared error to "
        f"saturation, in the median of {counted(len(values), 'tensor')}"
    )
    page, axes = shapes.single(title, 9, charts.height_for(len(costs), 0.36, 2.7))
    paint = list(charts.format_colors(costs).values())
    charts.boxes_of(axes, list(costs.values()), range(len(costs)), paint)
    axes.set_xlim(-2, 102)
    charts.name_rows(axes, [format_label(analysis, name) for name in costs])
    dress(
        axes, title="quartiles of the tensors, whiskers to the least and most",
        x="part of the squared error that saturated values have (%)", grid="x",
    )  # fmt: skip
    return page


# Gradients ---------------------------------------------------------------------------------------


def gradient_flush(analysis: DumpAnalysis) -> Sheet | None:
    gradients = [tensor for tensor in analysis["tensors"] if is_gradient(tensor)]
    shares = {}
    for name in format_names(analysis):
        share = share_in(gradients, name, flushed)
        parts = [
            (part, t)
            for t, outcome in format_outcomes(gradients, name)
            if (part := flushed(outcome)) >= 0
        ]
        if parts and math.isfinite(share):
            shares[name] = (share, *max(parts, key=lambda item: item[0]))
    shares = dict(sorted(shares.items(), key=lambda item: -item[1][0]))
    if not shares or max(most for _, most, _ in shares.values()) == 0:
        return None
    name, (share, most, tensor) = next(iter(shares.items()))
    title = (
        f"{percent(share)} of the gradients become zero in {name}, {percent(most)} in "
        f"{tensor_title(tensor)}"
    )
    page, axes = shapes.single(title, 9.5, charts.height_for(len(shares), 0.36, 2.7))
    low = min(part for *parts, _ in shares.values() for part in parts if part > 0) / 3
    for row, (share, most, _) in enumerate(shares.values()):
        color = COLORS[0] if share > 0 else "none"
        axes.barh([row], [share if share > 0 else low], height=0.62, color=color)
        if most > 0:
            axes.plot([most], [row], "D", color=WARN, markersize=6, clip_on=False)
        text = percent(share) if share > 0 else "none"
        shapes.beside(axes, text, max(share, most, low), row, 9, size=TICK)
    axes.set_xlim(low, 6)
    charts.share_axis(axes)
    axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= 1])
    charts.name_rows(axes, list(shares))
    words = "share of gradients that become zero: cast as they are, or with the format's own scales"
    dress(axes, x=words, grid="x")
    diamond = charts.line(WARN, "D", linestyle="none")
    charts.legend(page, {"all gradients": charts.patch(COLORS[0]), "worst tensor": diamond})
    return page


def loss_scale(analysis: DumpAnalysis) -> Sheet | None:
    scales = analysis["loss_scales"]
    if not scales:
        return None
    narrow = [scale for scale in scales if scale["least"] > scale["largest"]]
    most = narrow[0] if narrow else max(scales, key=lambda scale: figure_of(scale, "flush"))
    after = percent(figure_of(most, "at_best"))
    title = (
        f"{most['format']} has no loss scale that saves all gradients: at the best one {after} "
        "still become zero"
        if narrow
        else f"Loss scale 2^{most['advised']} for {most['format']}: gradients that become zero "
        f"fall from {percent(figure_of(most, 'flush'))} to {after}"
    )
    page, axes = shapes.single(title, 9.5, charts.height_for(len(scales), 0.42, 2.7))
    for row, scale in enumerate(scales):
        low, high = sorted((scale["least"], scale["largest"]))
        color, alpha = (WARN, 0.35) if scale in narrow else (COLORS[2], 0.6)
        axes.barh([row], [max(high - low, 0.15)], left=[low], height=0.5, color=color, alpha=alpha)
        axes.plot([scale["advised"]], [row], "D", color=BLACK, markersize=7)
        text = (
            f"advised 2^{scale['advised']}: zeros {percent(figure_of(scale, 'flush'))} to "
            f"{percent(figure_of(scale, 'at_best'))}"
        )
        shapes.beside(axes, text, max(high, scale["advised"]), row, 9, size=SMALL)
    ends = [scale[key] for scale in scales for key in ("least", "largest", "advised")]
    low, high = min(ends), max(ends)
    axes.set_xlim(low - 1, high + 0.62 * max(high - low, 6) + 1)
    charts.name_rows(axes, [scale["format"] for scale in scales])
    charts.whole_numbers(axes, "x", 14)
    axes.set_xticks([tick for tick in axes.get_xticks() if low - 1 <= tick <= high + 1])
    dress(axes, x="exponent of the loss scale (a power of two)", grid="x")
    entries = {"at most 0.1 % become zero, none saturates": charts.patch(COLORS[2], alpha=0.6)}
    if narrow:
        entries["both at once is not possible"] = charts.patch(WARN, alpha=0.35)
    charts.legend(page, {**entries, "advised": charts.line(BLACK, "D", linestyle="none")})
    return page
