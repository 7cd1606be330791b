"""Quant types by the statistics of their tensors and by what formats lose on them."""

from __future__ import annotations

import math

import numpy as np

from qgate.charts.figure import dress
from qgate.charts.palette import COLORS
from qgate.charts.sheet import (
    Drawing,
    Sheet,
    boxes_of,
    format_colors,
    height_for,
    legend,
    log_axis,
    patch,
    rows_named,
    sheet,
    signed_log,
    type_colors,
)
from qgate.drawing.plots.comparisons import losses_of, worst_loss
from qgate.summaries.reading import (
    cast_names,
    fates,
    figure_of,
    format_label,
    format_names,
    grouped,
    quant_type_of,
    saturation_cost,
    tensor_title,
    value_tensors,
    worst,
)
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import brief, counted, decibels, percent

_MOST_TYPES = 12
_COLUMNS = (("mean", "mean"), ("standard deviation", "std"), ("largest magnitude", "amax"))


def _types(tensors: list[TensorPortrait]) -> dict[str, list[TensorPortrait]]:
    return dict(list(grouped(tensors, quant_type_of).items())[:_MOST_TYPES])


def _build_boxes(analysis: DumpAnalysis) -> Sheet | None:
    """Rows are quant types and directions: gradients and activations do not mix."""
    tensors = value_tensors(analysis)
    types = _types(tensors)
    told = {
        (name, operation): mine
        for name, found in types.items()
        for operation, mine in grouped(found, lambda t: t["operation"]).items()
    }
    told = {key: mine for key, mine in told.items() if any(figure_of(t, "std") > 0 for t in mine)}
    if not told:
        return None
    top, amax = worst(tensors, lambda tensor: figure_of(tensor, "amax"))[0]
    title = (
        f"{quant_type_of(top)} holds the largest magnitude of {len(types)} quant types: "
        f"{brief(amax)} in {tensor_title(top)}"
    )
    if len(types) == 1:
        title = f"Largest magnitude {brief(amax)}, in {tensor_title(top)}"
    made = sheet(12, height_for(len(told), 0.45), title)
    drawn = made.figure.subplots(1, 3, sharey=True)
    colors = type_colors(types)
    for place, (axes, (label, name)) in enumerate(zip(drawn, _COLUMNS, strict=True)):
        rows, values, paint = [], [], []
        for row, ((kind, _), mine) in enumerate(told.items()):
            found = [figure_of(t, name) for t in mine]
            found = [v for v in found if math.isfinite(v) and (place == 0 or v > 0)]
            if found:
                rows.append(row)
                values.append(found)
                paint.append(colors[kind])
        boxes_of(axes, values, rows, paint)
        axes.margins(x=0.06)
        dress(axes, x=label, grid="x")
        if place == 0:
            sizes = [abs(v) for found in values for v in found if v]
            unit = 10.0 ** math.floor(
                math.log10(max(float(np.median(sizes)) if sizes else 1.0, 1e-300))
            )
            signed_log(axes, "x", unit)
            rows_named(axes, [f"{kind}, {operation}" for kind, operation in told])
        else:
            log_axis(axes, "x")
            axes.tick_params(labelleft=False)
    return made


def _build_losses(analysis: DumpAnalysis) -> Sheet | None:
    losses = losses_of(analysis)
    if not losses:
        return None
    name, tensor, value = worst_loss(losses)
    title = f"Worst of all: {decibels(value)} in {name}, {tensor_title(tensor)}"
    told = {n: [(t, v) for t, v in pairs if math.isfinite(v)] for n, pairs in losses.items()}
    told = {n: pairs for n, pairs in told.items() if pairs}
    if not told:
        return None
    types = list(_types([t for pairs in told.values() for t, _ in pairs]))[: len(COLORS)]
    colors = type_colors(types)
    made = sheet(10, min(height_for(len(told) * len(types), 0.26, 3.0), 11.0), title)
    axes = made.figure.subplots()
    height = 0.8 / len(types)
    rows, values, paint = [], [], []
    for row, pairs in enumerate(told.values()):
        for place, kind in enumerate(types):
            found = [v for t, v in pairs if quant_type_of(t) == kind]
            if found:
                rows.append(row + (place - (len(types) - 1) / 2) * height)
                values.append(found)
                paint.append(colors[kind])
    boxes_of(axes, values, rows, paint, width=0.85 * height)
    rows_named(axes, list(told))
    dress(
        axes,
        title="quartiles of the tensors, whiskers to the worst and best; exact ones left out",
        x="SQNR, or without massive elements if worse (dB)",
        grid="x",
    )
    legend(made, {kind: patch(colors[kind]) for kind in types})
    return made


def _build_saturation(analysis: DumpAnalysis) -> Sheet | None:
    """The part of the squared error that saturation has, in formats whose scale rule leaves the
    largest of a block out; of a healthy tensor too."""
    casts = cast_names(analysis)
    told = {
        name: [
            100 * cost
            for _, fate in fates(analysis["tensors"], name)
            if math.isfinite(cost := saturation_cost(fate))
        ]
        for name in format_names(analysis)
        if name not in casts
    }
    told = {name: found for name, found in told.items() if any(found)}
    told = dict(sorted(told.items(), key=lambda item: -float(np.median(item[1]))))
    if not told:
        return None
    name, found = next(iter(told.items()))
    middle = percent(float(np.median(found)) / 100)
    title = (
        f"By design {name} owes {middle} of its squared error to saturation, in the median of "
        f"{counted(len(found), 'tensor')}"
    )
    made = sheet(9, height_for(len(told), 0.36, 2.7), title)
    axes = made.figure.subplots()
    colors = format_colors(told)
    boxes_of(axes, list(told.values()), range(len(told)), [colors[n] for n in told])
    axes.set_xlim(-2, 102)
    rows_named(axes, [format_label(analysis, n) for n in told])
    dress(
        axes,
        title="quartiles of the tensors, whiskers to the least and most",
        x="part of the squared error that saturated values have (%)",
        grid="x",
    )
    return made


draw_saturation = Drawing(_build_saturation)
draw_type_boxes = Drawing(_build_boxes)
draw_losses = Drawing(_build_losses)
