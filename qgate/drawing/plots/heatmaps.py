"""Maps of the network: magnitudes by layer and kind, losses by layer and format, single tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qgate.charts.figure import LABEL, SMALL, TICK, dress
from qgate.charts.palette import BLACK, GROUND, MAP, WARN, WHITE
from qgate.charts.sheet import (
    MOST_ROWS,
    Drawing,
    Sheet,
    color_bar,
    columns_for,
    panels,
    plain,
    sheet,
    wrapped,
)
from qgate.summaries.reading import (
    Floats,
    by_kind,
    cast_names,
    fates,
    figure_of,
    flushed,
    format_names,
    grouped,
    kind_title,
    layer_of,
    nonfinite,
    row_titles,
    saturated,
    tensor_title,
    worst,
)
from qgate.summaries.record import DumpAnalysis, Map, TensorPortrait
from qgate.text import brief, counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Layer = int | None
_MOST_TICKS, _MOST_WRITTEN = 40, 14


def layers_of(tensors: Sequence[TensorPortrait]) -> list[Layer]:
    """Those known in ascending order, and the unknown one last."""
    found = {layer_of(tensor) for tensor in tensors}
    known = sorted(layer for layer in found if layer is not None)
    return [*known, None] if None in found else [*known]


def draw_map(
    axes: Axes, cells: Floats, rows: Sequence[str], layers: Sequence[Layer], *, log_low: float = 0.0
) -> AxesImage:
    """Cells by color, NaN left white; the columns are layers, few enough of them named."""
    from matplotlib.colors import LogNorm

    shown = np.ma.masked_invalid(np.where(cells > 0, cells, np.nan))
    low = float(shown.min()) if shown.count() else 1.0
    high = float(shown.max()) if shown.count() else 1.0
    low = max(low, log_low, high * 1e-12)
    norm = LogNorm(low if low < high else high / 10, high)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=MAP, norm=norm)
    step = -(-len(layers) // _MOST_TICKS)
    places = range(0, len(layers), step)
    names = ["none" if layers[i] is None else str(layers[i]) for i in places]
    small = len(names) > 20
    axes.set_xticks(places, names, fontsize=SMALL if small else 8.5)
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows], fontsize=TICK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def write_cells(axes: Axes, image: AxesImage, cells: Floats, name: Callable[[float], str]) -> None:
    """Figures in the cells of a small map, in the ink that shows."""
    rows, columns = cells.shape
    if columns > _MOST_WRITTEN or rows > 30:
        return
    for i in range(rows):
        for j in range(columns):
            value = cells[i, j]
            if math.isfinite(value):
                dark = value <= 0 or float(np.ma.filled(image.norm(value), 1.0)) >= 0.55
                axes.text(
                    j, i, name(float(value)), ha="center", va="center", fontsize=SMALL,
                    color=BLACK if dark else WHITE,
                )  # fmt: skip


def _build_amax(analysis: DumpAnalysis) -> Sheet | None:
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
    layers = layers_of(tensors)
    places = {layer: place for place, layer in enumerate(layers)}
    cells = np.full((len(names), len(layers)), np.nan)
    broken: set[tuple[int, int]] = set()
    for row, kind in enumerate(names):
        for tensor in kinds[kind]:
            at = row, places[layer_of(tensor)]
            cells[at] = np.fmax(cells[at], figure_of(tensor, "amax"))
            if nonfinite(tensor):
                broken.add(at)
    title = f"The largest magnitude is {brief(top[0][1])}, in {tensor_title(top[0][0])}"
    if broken:
        title += f"; NaN or Inf in {counted(len(broken), 'cell')} (crossed)"
    made = sheet(*_size(len(names), len(layers)), title)
    axes = made.figure.subplots()
    image = draw_map(axes, cells, [kind_title(kind) for kind in names], layers)
    write_cells(axes, image, cells, brief)
    if broken:
        y, x = zip(*sorted(broken), strict=True)
        # At the edge of the cell, beside its figure.
        axes.plot(
            np.asarray(x) - 0.42, y, "x", color=WARN, markersize=8, markeredgewidth=2, clip_on=False
        )
    axes.set_xlabel(_layer_label(layers), fontsize=LABEL)
    color_bar(made, image, axes, "largest magnitude")
    return made


def _layer_label(layers: Sequence[Layer]) -> str:
    return "layer (none: modules outside layers)" if None in layers else "layer"


def _size(rows: int, columns: int) -> tuple[float, float]:
    return min(16.0, max(7.5, 4.6 + 0.42 * columns)), max(3.2, 1.7 + 0.3 * rows)


def _lost(
    analysis: DumpAnalysis,
    formats: Sequence[str],
    what: Callable[[Mapping[str, Any]], float],
    verb: str,
) -> Sheet | None:
    """The worst tensor of each layer under each format."""
    tensors = [tensor for tensor in analysis["tensors"] if tensor.get("formats")]
    layers = layers_of(tensors)
    places = {layer: place for place, layer in enumerate(layers)}
    names = list(formats)[:MOST_ROWS]
    cells = np.full((len(names), len(layers)), np.nan)
    found: list[tuple[float, str, TensorPortrait]] = []
    for row, name in enumerate(names):
        for tensor, fate in fates(tensors, name):
            share = what(fate)
            at = row, places[layer_of(tensor)]
            cells[at] = np.fmax(cells[at], share)
            if share > 0:
                found.append((share, name, tensor))
    if not found:
        return None
    share, name, tensor = max(found, key=lambda item: item[0])
    title = f"{percent(share)} {verb} in {name} at {tensor_title(tensor)}, the most"
    made = sheet(*_size(len(names), len(layers)), title)
    axes = made.figure.subplots()
    image = draw_map(axes, cells * 100, names, layers, log_low=1e-4)
    axes.set_facecolor(GROUND)
    write_cells(axes, image, cells * 100, lambda value: "0" if value == 0 else _two(value))
    axes.set_xlabel(_layer_label(layers), fontsize=LABEL)
    color_bar(made, image, axes, "share in the worst tensor (%)")
    return made


def _two(value: float) -> str:
    """Two digits fit a cell."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}" if value >= 1e-3 else "<.001"


def _build_saturated(analysis: DumpAnalysis) -> Sheet | None:
    return _lost(analysis, cast_names(analysis), saturated, "of the values saturate")


def _build_flushed(analysis: DumpAnalysis) -> Sheet | None:
    return _lost(analysis, format_names(analysis), flushed, "of the values become zero")


def maps_of(analysis: DumpAnalysis, kind: str, most: int = 6) -> list[tuple[Map, Floats]]:
    """Maps of a kind with any finite cell."""
    found = []
    for told in analysis["maps"]:
        cells = told.get("cells") or []
        if told["kind"] != kind or not cells or len({len(row) for row in cells}) != 1:
            continue
        values = np.array(
            [[math.nan if v is None else v for v in row] for row in cells], dtype=float
        )
        if values.size and np.isfinite(values).any():
            found.append((told, values))
    return found[:most]


def _build_tokens(analysis: DumpAnalysis) -> Sheet | None:
    shown = [(told, cells) for told, cells in maps_of(analysis, "tokens") if (cells > 0).any()]
    if not shown:
        return None
    stripes = [_stripe(told, cells) for told, cells in shown]
    far = max(range(len(shown)), key=lambda i: stripes[i][1])
    title = (
        f"Channel {stripes[far][0]} of {tensor_title(shown[far][0])} is {brief(stripes[far][1])} "
        "times the median channel"
    )
    columns = columns_for(len(shown))
    rows = -(-len(shown) // columns)
    made = sheet(max(4.2 * columns, 6.4), 3.1 * rows + 0.9, title)
    from matplotlib.colors import LogNorm

    titles = row_titles([told for told, _ in shown], 80)
    drawn = panels(made, len(shown), columns)
    for axes, name, (told, cells) in zip(drawn, titles, shown, strict=True):
        positive = cells[np.isfinite(cells) & (cells > 0)]
        low, high = float(np.quantile(positive, 0.02)), float(positive.max())
        image = axes.imshow(
            cells, aspect="auto", interpolation="nearest", cmap=MAP,
            norm=LogNorm(low if low < high else high / 2, high),
            extent=(0, told["columns"], told["rows"], 0),
        )  # fmt: skip
        dress(axes, title=wrapped(name, 44), x="channel", y="token", grid="")
        color_bar(made, image, axes, "largest magnitude")
    return made


def _stripe(told: Map, cells: Floats) -> tuple[int, float]:
    """The channel that stands out, as far as the cells tell, and how far."""
    columns = np.nanmax(np.where(np.isfinite(cells), cells, np.nan), axis=0)
    middle = float(np.nanmedian(columns))
    place = int(np.nanargmax(columns))
    channel = place * told["columns"] // cells.shape[1]
    return channel, float(columns[place]) / middle if middle > 0 else 1.0


def map_layers(analysis: DumpAnalysis, maps: Sequence[Map]) -> dict[int, Layer]:
    """The layer of each map, by its place among them."""
    known = grouped(analysis["tensors"], lambda tensor: (tensor["rank"], tensor["order"]))
    return {
        place: layer_of(known[told["rank"], told["order"]][0])
        for place, told in enumerate(maps)
        if (told["rank"], told["order"]) in known
    }


draw_amax = Drawing(_build_amax)
draw_saturated = Drawing(_build_saturated)
draw_flushed = Drawing(_build_flushed)
draw_tokens = Drawing(_build_tokens)
