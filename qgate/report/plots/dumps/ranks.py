"""Which rank differs from the others, and in which tensors."""

from __future__ import annotations

import math

import numpy as np

from qgate.report.dumps._reading import (
    brief,
    counted,
    figure_of,
    none_stands_out,
    tensor_title,
    worst,
)
from qgate.report.plots._figure import SMALL, TICK, dress
from qgate.report.plots._sheet import (
    MOST_ROWS,
    Drawing,
    Sheet,
    color_bar,
    panels,
    plain,
    sheet,
    whole_numbers,
)
from qgate.report.plots.palette import BLACK, COLORS, DIVERGING, GRAY, WARN, WHITE
from qgate.results.portraits import DumpAnalysis

_MOST_RANKS = 256


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
        f"Rank {first['farthest']} is farthest from the others: {factor} times at "
        f"{tensor_title(first)}"
    )
    if len(usable) > len(shown):
        title += f"; the {len(shown)} most different of {counted(len(usable), 'tensor')}"
    made = sheet(min(15.0, 7.5 + 0.3 * len(ranks)), max(2.8, 1.7 + 0.24 * len(shown)), title)
    axes = made.figure.subplots()
    far = max(float(np.nanmax(np.abs(cells))), 0.05)
    image = axes.imshow(
        cells, aspect="auto", interpolation="nearest", cmap=DIVERGING, vmin=-far, vmax=far
    )
    axes.set_yticks(range(len(shown)), [plain(t["title"], 46) for t in shown], fontsize=SMALL)
    step = -(-len(ranks) // 32)
    axes.set_xticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
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


def _build_scores(analysis: DumpAnalysis) -> Sheet | None:
    told = analysis["ranks"]
    if told is None or len(told["rows"]) < 2:
        return None
    rows = sorted(told["rows"], key=lambda row: row["rank"])
    out = told["stands_out"]
    columns = [
        ("distance from the median rank", "distance"),
        ("score: distance in spreads of all ranks", "score"),
        ("tensors with NaN or Inf", "nonfinite"),
    ]
    columns = [
        (label, name)
        for label, name in columns
        if any(math.isfinite(figure_of(row, name)) and figure_of(row, name) > 0 for row in rows)
    ]
    if not columns:
        return None
    score = next((figure_of(row, "score") for row in rows if row["rank"] == out), math.nan)
    title = none_stands_out(len(rows))
    if out is not None:
        title = f"Rank {out} stands out of {len(rows)}"
        title += f": score {brief(score)}" if math.isfinite(score) else ""
    if told["unequal_weights"]:
        title += f"; {counted(len(told['unequal_weights']), 'weight')} not equal on all ranks"
    made = sheet(max(3.8 * len(columns), 6.4), 3.4, title)
    ranks = [row["rank"] for row in rows]
    for axes, (label, name) in zip(panels(made, len(columns), len(columns)), columns, strict=True):
        values = [max(figure_of(row, name), 0) for row in rows]
        if len(ranks) <= 64:
            colors = [WARN if rank == out else COLORS[0] for rank in ranks]
            axes.bar(ranks, values, color=colors, width=0.75)
        else:
            axes.vlines(ranks, 0, values, color=GRAY, linewidth=0.6)
            axes.plot(ranks, values, "o", color=COLORS[0], markersize=2.5)
        if out in ranks and values[ranks.index(out)] > 0:
            axes.annotate(
                f"rank {out}", (out, values[ranks.index(out)]), (0, 3), ha="center", fontsize=TICK,
                textcoords="offset points", color=WARN,
            )  # fmt: skip
        axes.set_ylim(0, 1.18 * max(values))
        if name == "nonfinite":
            whole_numbers(axes, "y", 6)
        dress(axes, x="rank", y=label, grid="y")
        whole_numbers(axes, "x", 10)
    return made


draw_rank_tensors = Drawing(_build_tensors)
draw_rank_scores = Drawing(_build_scores)
