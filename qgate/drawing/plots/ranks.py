"""Which rank differs from the others, and in which tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import BLACK, COLORS, DIVERGING, GRAY, MAP, WARN, WHITE
from qgate.charts.sheet import (
    MOST_ROWS,
    Drawing,
    Sheet,
    color_bar,
    panels,
    plain,
    sheet,
    whole_numbers,
)
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


def _build_tensors(analysis: DumpAnalysis) -> Sheet | None:
    told = analysis["ranks"]
    if told is None:
        return None
    usable = [t for t in told["tensors"] if sum(v > 0 for v in t["rms"].values()) > 1]
    shown = [t for t, _ in worst(usable, lambda tensor: figure_of(tensor, "factor"), MOST_ROWS)]
    ranks = sorted({int(rank) for tensor in shown for rank in tensor["rms"]})[:_MOST_RANKS]
    if len(ranks) < 2:
        return None
    cells = np.full((len(shown), len(ranks)), np.nan)
    for row, tensor in enumerate(shown):
        sizes = np.array([figure_of(tensor["rms"], str(rank)) for rank in ranks])
        sizes[~(sizes > 0)] = np.nan
        cells[row] = np.log2(sizes / np.nanmedian(sizes))
    first = shown[0]
    factor = brief(figure_of(first, "factor"))
    title = (
        f"{_verdict(told)}; the largest factor between ranks is {factor}, rank {first['farthest']} "
        f"at {tensor_title(first)}"
    )
    if len(usable) > len(shown):
        title += f"; the {len(shown)} most different of {counted(len(usable), 'tensor')}"
    made = sheet(min(15.0, 8.5 + 0.3 * len(ranks)), max(2.8, 1.7 + 0.24 * len(shown)), title)
    axes = made.figure.subplots()
    far = max(float(np.nanmax(np.abs(cells))), 0.05)
    image = axes.imshow(
        cells, aspect="auto", interpolation="nearest", cmap=DIVERGING, vmin=-far, vmax=far
    )
    names = row_titles(shown, 66)
    axes.set_yticks(range(len(shown)), [plain(name, 70) for name in names], fontsize=SMALL)
    _rank_ticks(axes, ranks)
    dress(axes, x="rank", grid="")
    axes.tick_params(length=0, axis="both")
    if len(ranks) <= 10:
        for (row, column), value in np.ndenumerate(cells):
            if math.isfinite(value):
                axes.text(
                    column, row, f"{value:+.2f}", ha="center", va="center", fontsize=SMALL,
                    color=WHITE if abs(value) > 0.6 * far else BLACK,
                )  # fmt: skip
    color_bar(made, image, axes, "log2 of the rms over the median rank's")
    return made


def _rank_ticks(axes: Axes, ranks: Sequence[int]) -> None:
    step = -(-len(ranks) // 32)
    axes.set_xticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])


def _verdict(told: Ranks) -> str:
    """Which rank stands out, as a whole or in which layers."""
    out, count = told["stands_out"], len(told["rows"])
    cells = told.get("cells") or []
    if out is not None:
        score = next((figure_of(row, "score") for row in told["rows"] if row["rank"] == out), 0.0)
        where = layers_apart(cells, out)
        return f"Rank {out} of {count} stands out{where}: score {brief(score)}"
    apart = apart_by_member(cells)
    if not apart:
        return none_stands_out(count)
    layers = layers_named({cell["layer"] for mine in apart.values() for cell in mine})
    if count == 2:
        return f"Two ranks differ in {layers}"
    names = [str(member) for member in list(apart)[:4]]
    if len(names) == 1:
        return f"Rank {names[0]} of {count} stands out in {layers}"
    return f"Ranks {' and '.join(names)} of {count} stand out in {layers}"


def _build_scores(analysis: DumpAnalysis) -> Sheet | None:
    """Each rank against the limit, and each layer of each rank against tensors of its kind."""
    told = analysis["ranks"]
    if told is None or len(told["rows"]) < 2:
        return None
    rows = sorted(told["rows"], key=lambda row: row["rank"])[:_MOST_RANKS]
    cells = told.get("cells") or []
    scored = any(math.isfinite(figure_of(row, "score")) for row in rows)
    if not (scored or cells):
        return None
    title = _verdict(told)
    if told["unequal_weights"]:
        title += f"; {counted(len(told['unequal_weights']), 'weight')} not equal on all ranks"
    layers = {cell["layer"] for cell in cells}
    height = max(3.4, min(1.8 + 0.24 * len(layers), 12.0))
    made = sheet(5.2 * (scored + bool(cells)) + 1.2, height, title)
    drawn = panels(made, scored + bool(cells), scored + bool(cells))
    if scored:
        _draw_scores(drawn[0], rows, told["stands_out"])
    if cells:
        _draw_cells(made, drawn[-1], cells, [row["rank"] for row in rows])
    return made


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
    axes.text(
        0.99, _LIMIT, "stands out above", transform=axes.get_yaxis_transform(), fontsize=SMALL,
        color=WARN, ha="right", va="bottom",
    )  # fmt: skip
    axes.set_ylim(0, 1.2 * max([*values, _LIMIT]))
    dress(axes, title="whole ranks", x="rank", y="distance from the others, in spreads", grid="y")
    whole_numbers(axes, "x", 10)


def _draw_cells(made: Sheet, axes: Axes, cells: Sequence[PeerCell], ranks: Sequence[int]) -> None:
    """How far a layer of a rank is from the others, in units of what is usual."""
    from matplotlib.colors import LogNorm

    found = {cell["layer"] for cell in cells}
    layers = [*sorted(layer for layer in found if layer is not None), *([None] * (None in found))]
    grid = np.full((len(layers), len(ranks)), np.nan)
    for cell in cells:
        if cell["member"] in ranks:
            at = layers.index(cell["layer"]), ranks.index(cell["member"])
            grid[at] = cell["ratio"]
            if cell["stands_out"]:
                axes.plot(at[1], at[0], "s", color=WARN, markersize=17, fillstyle="none",
                          markeredgewidth=2)  # fmt: skip
    top = max(float(np.nanmax(grid)), 4.0)
    norm = LogNorm(0.5, top, clip=True)
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap=MAP, norm=norm)
    step = -(-len(layers) // 30)
    names = ["none" if layer is None else str(layer) for layer in layers]
    axes.set_yticks(range(0, len(layers), step), names[::step], fontsize=SMALL)
    _rank_ticks(axes, ranks)
    if len(ranks) <= 10 and len(layers) <= 40:
        for (row, column), value in np.ndenumerate(grid):
            if math.isfinite(value):
                axes.text(
                    column, row, f"{value:.1f}", ha="center", va="center", fontsize=SMALL,
                    color=BLACK if norm(value) > 0.55 else WHITE,
                )  # fmt: skip
    dress(axes, title="layers; framed: stands out", x="rank", y="layer", grid="")
    axes.tick_params(length=0, axis="both")
    color_bar(made, image, axes, "distance over the usual of its kind")


draw_rank_tensors = Drawing(_build_tensors)
draw_rank_scores = Drawing(_build_scores)
