"""Differences between ranks: by tensor, by rank, and by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import COLORS, DIVERGING, GRAY, WARN
from qgate.charts.sheet import MOST_ROWS, Sheet, plain
from qgate.drawing.plots.maps import sorted_layers
from qgate.summaries.reading import (
    apart_by_member,
    figure_of,
    layers_apart,
    layers_named,
    none_stands_out,
    row_titles,
    tensor_title,
    worst,
)
from qgate.summaries.record import DumpAnalysis, PeerCell, RankRow, Ranks
from qgate.text import brief, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_RANKS = 256
_LIMIT = 5.0


def tensors(analysis: DumpAnalysis) -> Sheet | None:
    ranks = analysis["ranks"]
    if ranks is None:
        return None
    usable = [t for t in ranks["tensors"] if sum(v > 0 for v in t["rms"].values()) > 1]
    rows = [t for t, _ in worst(usable, lambda tensor: figure_of(tensor, "factor"), MOST_ROWS)]
    numbers = sorted({int(rank) for tensor in rows for rank in tensor["rms"]})[:_MOST_RANKS]
    if len(numbers) < 2:
        return None
    cells = np.full((len(rows), len(numbers)), np.nan)
    for row, tensor in enumerate(rows):
        sizes = np.array([figure_of(tensor["rms"], str(rank)) for rank in numbers])
        sizes[~(sizes > 0)] = np.nan
        cells[row] = np.log2(sizes / np.nanmedian(sizes))
    first = rows[0]
    factor = brief(figure_of(first, "factor"))
    title = (
        f"{_verdict(ranks)}; the largest factor between ranks is {factor}, rank "
        f"{first['farthest']} at {tensor_title(first)}"
    )
    if len(usable) > len(rows):
        title += f"; the {len(rows)} most different of {counted(len(usable), 'tensor')}"
    size = min(15.0, 8.5 + 0.3 * len(numbers)), max(2.8, 1.7 + 0.24 * len(rows))
    page, axes = shapes.single(title, *size)
    far = max(float(np.nanmax(np.abs(cells))), 0.05)
    image = shapes.cell_map(axes, cells, cmap=DIVERGING, vmin=-far, vmax=far)
    names = [plain(name, 70) for name in row_titles(rows, 66)]
    axes.set_yticks(range(len(rows)), names, fontsize=SMALL)
    _rank_ticks(axes, numbers)
    dress(axes, x="rank", grid="")
    if len(numbers) <= 10:
        shapes.write_cells(
            axes, cells, lambda value: f"{value:+.2f}", lambda value: abs(value) <= 0.6 * far
        )
    charts.color_bar(page, image, axes, "log2 of the rms over the median rank's")
    return page


def _rank_ticks(axes: Axes, ranks: Sequence[int]) -> None:
    step = -(-len(ranks) // 32)
    axes.set_xticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
    axes.tick_params(length=0, axis="both")


def _verdict(ranks: Ranks) -> str:
    """Say which rank stands out, as a whole or in which layers."""
    out, count = ranks["stands_out"], len(ranks["rows"])
    cells = ranks.get("cells") or []
    if out is not None:
        score = next((figure_of(row, "score") for row in ranks["rows"] if row["rank"] == out), 0.0)
        return f"Rank {out} of {count} stands out{layers_apart(cells, out)}: score {brief(score)}"
    members = apart_by_member(cells)
    if not members:
        return none_stands_out(count)
    layers = layers_named({cell["layer"] for mine in members.values() for cell in mine})
    if count == 2:
        return f"Two ranks differ in {layers}"
    names = [str(member) for member in list(members)[:4]]
    if len(names) == 1:
        return f"Rank {names[0]} of {count} stands out in {layers}"
    return f"Ranks {' and '.join(names)} of {count} stand out in {layers}"


def scores(analysis: DumpAnalysis) -> Sheet | None:
    """Draw each rank against the limit, and each layer of each rank against its kind."""
    ranks = analysis["ranks"]
    if ranks is None or len(ranks["rows"]) < 2:
        return None
    rows = sorted(ranks["rows"], key=lambda row: row["rank"])[:_MOST_RANKS]
    cells = ranks.get("cells") or []
    scored = any(math.isfinite(figure_of(row, "score")) for row in rows)
    if not (scored or cells):
        return None
    title = _verdict(ranks)
    if ranks["unequal_weights"]:
        title += f"; {counted(len(ranks['unequal_weights']), 'weight')} not equal on all ranks"
    layers = {cell["layer"] for cell in cells}
    height = max(3.4, min(1.8 + 0.24 * len(layers), 12.0))
    count = scored + bool(cells)
    page = charts.sheet(5.2 * count + 1.2, height, title)
    panels = charts.panels(page, count, count)
    if scored:
        _draw_scores(panels[0], rows, ranks["stands_out"])
    if cells:
        _draw_cells(page, panels[-1], cells, [row["rank"] for row in rows])
    return page


def _draw_scores(axes: Axes, rows: Sequence[RankRow], out: int | None) -> None:
    ranks = [row["rank"] for row in rows]
    values = [max(figure_of(row, "score"), 0.0) for row in rows]
    if len(ranks) <= 64:
        axes.bar(ranks, values, color=[WARN if r == out else COLORS[0] for r in ranks], width=0.75)
        for rank, value in zip(ranks, values, strict=True) if len(ranks) <= 16 else ():
            axes.annotate(
                brief(round(value, 1)), (rank, value), (0, 2), textcoords="offset points",
                ha="center", fontsize=SMALL,
            )  # fmt: skip
    else:
        axes.vlines(ranks, 0, values, color=GRAY, linewidth=0.6)
        axes.plot(ranks, values, "o", color=COLORS[0], markersize=2.5)
    axes.axhline(_LIMIT, color=WARN, linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.2 * max([*values, _LIMIT]))
    title = f"whole ranks; above the dashed line, {_LIMIT:g}: stands out"
    dress(axes, title=title, x="rank", y="distance from the others, in spreads", grid="y")
    charts.whole_numbers(axes, "x", 10)


def _draw_cells(page: Sheet, axes: Axes, cells: Sequence[PeerCell], ranks: Sequence[int]) -> None:
    """Draw how far each layer of each rank is from the others, in units of its kind."""
    layers = sorted_layers(cell["layer"] for cell in cells)
    grid = np.full((len(layers), len(ranks)), np.nan)
    for cell in cells:
        if cell["member"] in ranks:
            row, column = layers.index(cell["layer"]), ranks.index(cell["member"])
            grid[row, column] = cell["ratio"]
            if cell["stands_out"]:
                axes.plot(
                    column, row, "s", color=WARN, markersize=17, fillstyle="none", markeredgewidth=2
                )
    norm = shapes.log_norm(0.5, max(float(np.nanmax(grid)), 4.0), clip=True)
    image = shapes.cell_map(axes, grid, norm=norm)
    step = -(-len(layers) // 30)
    names = ["none" if layer is None else str(layer) for layer in layers]
    axes.set_yticks(range(0, len(layers), step), names[::step], fontsize=SMALL)
    _rank_ticks(axes, ranks)
    if len(ranks) <= 10 and len(layers) <= 40:
        shapes.write_cells(
            axes, grid, lambda value: f"{value:.1f}", lambda value: float(norm(value)) > 0.55
        )
    dress(axes, title="layers; framed: stands out", x="rank", y="layer", grid="")
    charts.color_bar(page, image, axes, "distance over the usual of its kind")
