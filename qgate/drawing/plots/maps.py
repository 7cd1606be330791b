"""Maps of the network: magnitudes and losses by layer, single tensors, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import LABEL, SMALL, TICK, dress
from qgate.charts.palette import COLORS, GROUND, WARN
from qgate.charts.sheet import MOST_ROWS, Sheet, plain
from qgate.summaries.reading import (
    Floats,
    by_kind,
    figure_of,
    format_outcomes,
    grouped,
    kind_title,
    layer_of,
    nonfinite,
    row_titles,
    tensor_title,
    worst,
)
from qgate.summaries.record import DumpAnalysis, Map, TensorSummary
from qgate.text import brief, counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Layer = int | None
_MOST_TICKS, _MOST_WRITTEN, _MOST_MAPS = 40, 14, 6
_ALIKE = 0.9


# By layer ----------------------------------------------------------------------------------------


def sorted_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Sort layers, None for modules outside layers last."""
    return sorted(set(layers), key=lambda layer: (layer is None, layer))


def _layer_map(
    title: str, names: Sequence[str], layers: Sequence[Layer], cells: Floats, label: str,
    text: Callable[[float], str], log_low: float = 0.0,
) -> tuple[Sheet, Axes]:  # fmt: skip
    """Draw cells by row and layer, with figures in them if there are few."""
    rows, columns = cells.shape
    size = min(16.0, max(7.5, 4.6 + 0.42 * columns)), max(3.2, 1.7 + 0.3 * rows)
    page, axes = shapes.single(title, *size)
    positive = np.ma.masked_invalid(np.where(cells > 0, cells, np.nan))
    low, high = (float(positive.min()), float(positive.max())) if positive.count() else (1.0, 1.0)
    low = max(low, log_low, high * 1e-12)
    norm = shapes.log_norm(low if low < high else high / 10, high)
    image = shapes.cell_map(axes, positive, norm=norm)
    positions = range(0, columns, -(-columns // _MOST_TICKS))
    ticks = ["none" if layers[i] is None else str(layers[i]) for i in positions]
    axes.set_xticks(positions, ticks, fontsize=SMALL if len(ticks) > 20 else 8.5)
    axes.set_yticks(range(rows), [plain(name) for name in names], fontsize=TICK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if columns <= _MOST_WRITTEN and rows <= 30:
        shapes.write_cells(
            axes, cells, text,
            lambda value: value <= 0 or float(np.ma.filled(norm(value), 1.0)) >= 0.55, is_log=True,
        )  # fmt: skip
    unknown = "layer (none: modules outside layers)" if None in layers else "layer"
    axes.set_xlabel(unknown, fontsize=LABEL)
    charts.color_bar(page, image, axes, label)
    return page, axes


def amax(analysis: DumpAnalysis) -> Sheet | None:
    """Map the largest magnitude of each kind of tensor; cells with NaN or Inf are crossed."""
    tensors = [
        t for t in analysis["tensors"] if math.isfinite(figure_of(t, "amax")) or nonfinite(t)
    ]
    kinds = by_kind(tensors)
    top = worst(tensors, lambda tensor: figure_of(tensor, "amax"))
    if not top:
        return None
    names = list(kinds)
    if len(names) > MOST_ROWS:
        most = worst(names, lambda k: max(figure_of(t, "amax") for t in kinds[k]), MOST_ROWS)
        names = [kind for kind, _ in most]
    layers = sorted_layers(map(layer_of, tensors))
    columns = {layer: column for column, layer in enumerate(layers)}
    cells = np.full((len(names), len(layers)), np.nan)
    broken: set[tuple[int, int]] = set()
    for row, kind in enumerate(names):
        for tensor in kinds[kind]:
            at = row, columns[layer_of(tensor)]
            cells[at] = np.fmax(cells[at], figure_of(tensor, "amax"))
            if nonfinite(tensor):
                broken.add(at)
    title = f"The largest magnitude is {brief(top[0][1])}, in {tensor_title(top[0][0])}"
    if broken:
        title += f"; NaN or Inf in {counted(len(broken), 'cell')} (crossed)"
    rows = [kind_title(kind) for kind in names]
    page, axes = _layer_map(title, rows, layers, cells, "largest magnitude", brief)
    if broken:
        y, x = zip(*sorted(broken), strict=True)
        # At the edge of the cell, beside its figure.
        axes.plot(
            np.asarray(x) - 0.42, y, "x", color=WARN, markersize=8, markeredgewidth=2, clip_on=False
        )
    return page


def lost(
    formats: Callable[[DumpAnalysis], Sequence[str]],
    share_of: Callable[[Mapping[str, Any]], float],
    verb: str,
) -> Callable[[DumpAnalysis], Sheet | None]:
    """Draw a share of the values in the worst tensor of each layer under each format."""

    def build(analysis: DumpAnalysis) -> Sheet | None:
        tensors = [tensor for tensor in analysis["tensors"] if tensor.get("formats")]
        layers = sorted_layers(map(layer_of, tensors))
        columns = {layer: column for column, layer in enumerate(layers)}
        names = list(formats(analysis))[:MOST_ROWS]
        cells = np.full((len(names), len(layers)), np.nan)
        most: tuple[float, str, TensorSummary] | None = None
        for row, name in enumerate(names):
            for tensor, outcome in format_outcomes(tensors, name):
                share = share_of(outcome)
                at = row, columns[layer_of(tensor)]
                cells[at] = np.fmax(cells[at], share)
                if share > (most[0] if most else 0):
                    most = share, name, tensor
        if not most:
            return None
        title = f"{percent(most[0])} {verb} in {most[1]} at {tensor_title(most[2])}, the most"
        label = "share in the worst tensor (%)"
        page, axes = _layer_map(title, names, layers, cells * 100, label, _two_digits, log_low=1e-4)
        axes.set_facecolor(GROUND)
        return page

    return build


def _two_digits(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}" if value >= 1e-3 else "<.001"


# Single tensors ----------------------------------------------------------------------------------


def _maps(analysis: DumpAnalysis, kind: str) -> list[tuple[Map, Floats]]:
    """Return the maps of a kind that have a positive cell, with their cells."""
    maps = []
    for record in analysis["maps"]:
        cells = record.get("cells") or []
        if record["kind"] == kind and cells and len({len(row) for row in cells}) == 1:
            values = np.array(cells, dtype=float)  # None becomes NaN
            if np.isfinite(values).any():
                maps.append((record, values))
    return [item for item in maps[:_MOST_MAPS] if (item[1] > 0).any()]


def tokens(analysis: DumpAnalysis) -> Sheet | None:
    maps = _maps(analysis, "tokens")
    if not maps:
        return None
    stripes = [(*_stripe(*item), item[0]) for item in maps]
    channel, ratio, record = max(stripes, key=lambda stripe: stripe[1])
    title = (
        f"Channel {channel} of {tensor_title(record)} is {brief(ratio)} times the median channel"
    )
    columns = charts.columns_for(len(maps))
    page, panels = shapes.tiles(title, len(maps), (4.2, 3.1), columns=columns, extra=0.9)
    titles = row_titles([record for record, _ in maps], 80)
    for axes, name, (record, cells) in zip(panels, titles, maps, strict=True):
        positive = cells[np.isfinite(cells) & (cells > 0)]
        low, high = float(np.quantile(positive, 0.02)), float(positive.max())
        norm = shapes.log_norm(low if low < high else high / 2, high)
        extent = (0, record["columns"], record["rows"], 0)
        image = shapes.cell_map(axes, cells, norm=norm, extent=extent)
        dress(
            axes,
            title=charts.two_lines(name, 44),
            x="channel",
            y=record.get("row_name", "token"),
            grid="",
        )
        charts.color_bar(page, image, axes, "largest magnitude")
    return page


def _stripe(record: Map, cells: Floats) -> tuple[int, float]:
    """Return the first channel of the largest column of cells, and its ratio to the median."""
    columns = np.nanmax(np.where(np.isfinite(cells), cells, np.nan), axis=0)
    middle = float(np.nanmedian(columns))
    largest = int(np.nanargmax(columns))
    channel = largest * record["columns"] // cells.shape[1]
    return channel, float(columns[largest]) / middle if middle > 0 else 1.0


def attention(analysis: DumpAnalysis) -> Sheet | None:
    maps = _maps(analysis, "attention")
    if not maps:
        return None
    title = f"Where attention goes in {len(maps)} maps"
    if sinks := worst([record for record, _ in maps], lambda m: figure_of(m, "first_key")):
        share = percent(sinks[0][1])
        title = f"{share} of attention goes to the first key in {tensor_title(sinks[0][0])}"
    columns = charts.columns_for(len(maps))
    page, panels = shapes.tiles(title, len(maps), (3.9, 3.8), columns=columns, extra=0.7)
    norm = shapes.log_norm(1e-4, 1.0, clip=True)
    names = row_titles([record for record, _ in maps], 90)
    for axes, name, (record, cells) in zip(panels, names, maps, strict=True):
        extent = (0, record["columns"], record["rows"], 0)
        positive = np.where(cells > 0, cells, np.nan)
        image = shapes.cell_map(axes, positive, norm=norm, extent=extent)
        bits, first = figure_of(record, "entropy_bits"), figure_of(record, "first_key")
        words = [f"entropy {brief(bits)} bits"] if math.isfinite(bits) else []
        words += [f"first key {percent(first)}"] if math.isfinite(first) else []
        title = "\n".join(filter(None, [charts.two_lines(name, 42), ", ".join(words)]))
        dress(axes, title=title, x="key", y="query", grid="")
    charts.color_bar(page, image, panels, "attention weight, largest of a cell", extend="min")
    return page


def focus(analysis: DumpAnalysis) -> Sheet | None:
    maps = [record for record in analysis["maps"] if record["kind"] == "attention"]
    layers: dict[tuple[int, int], Layer] = {}
    for tensor in analysis["tensors"]:
        layers.setdefault((tensor["rank"], tensor["order"]), layer_of(tensor))
    points = {
        name: sorted(
            (layer, value)
            for record in maps
            if (layer := layers.get((record["rank"], record["order"]))) is not None
            and math.isfinite(value := figure_of(record, name))
        )
        for name in ("entropy_bits", "first_key")
    }
    if any(len({layer for layer, _ in mine}) < 2 for mine in points.values()):
        return None
    entropy = points["entropy_bits"]
    (low, bits), (_, most) = (end(entropy, key=lambda point: point[1]) for end in (min, max))
    title = f"Attention is narrowest in layer {low}: {brief(bits)} bits of entropy"
    if bits > _ALIKE * most:
        over = counted(len({layer for layer, _ in entropy}), "layer")
        title = f"Attention is alike in {over}: {brief(bits)} to {brief(most)} bits of entropy"
    page, panels = shapes.tiles(title, 2, (4.5, 3.4), extra=0)
    columns = (
        (entropy, "entropy (bits)", 1.0),
        (points["first_key"], "share on the first key (%)", 100.0),
    )
    for axes, (mine, label, factor) in zip(panels, columns, strict=True):
        medians = {
            layer: factor * float(np.median([value for _, value in group]))
            for layer, group in grouped(mine, lambda point: point[0]).items()
        }
        axes.plot(list(medians), list(medians.values()), color=COLORS[0], linewidth=1.2)
        x, y = zip(*mine, strict=True)
        axes.plot(x, np.asarray(y) * factor, "o", color=COLORS[0])
        axes.set_ylim(0, max(1.15 * factor * max(y), 1e-3))
        dress(axes, x="layer", y=label)
        charts.whole_numbers(axes, "x", 10)
    dot = charts.line(COLORS[0], "o", linestyle="none")
    charts.legend(page, {"one map": dot, "median of the layer": charts.line(COLORS[0])})
    return page
