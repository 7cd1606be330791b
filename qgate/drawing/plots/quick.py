"""The one-page overview: what is wrong, how values are spread, what the dump is made of."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qgate.charts.figure import LABEL, PANEL, SMALL, TICK, dress
from qgate.charts.palette import BLACK, BROWN, COLORS, GRAY, INK, WARN, format_color
from qgate.charts.sheet import (
    Drawing,
    Sheet,
    bars,
    colors_for,
    line,
    patch,
    plain,
    rows_named,
    sheet,
    whole_numbers,
)
from qgate.drawing.findings import Said, said_of, summary_line
from qgate.drawing.plots.distributions import border_formats, draw_borders, span_of, stacked_binades
from qgate.drawing.worst import worst_tensors
from qgate.summaries.reading import FINE_DB, grouped, quant_type_of, row_titles
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import decibels, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = {"fail": WARN, "warn": BROWN, "info": BLACK}
_MARK = {"fail": "BROKEN", "warn": "LOSS", "info": "note"}
_SENTENCES, _TENSORS, _PARTS = 7, 5, 8


def _build_quick(analysis: DumpAnalysis) -> Sheet | None:
    said = said_of(analysis)
    if not analysis["tensors"]:
        return None
    made = sheet(13, 9.6, said.findings[0].text.rstrip("."))
    grid = made.figure.add_gridspec(3, 3, height_ratios=(1.05, 1.25, 1.0))
    _write_findings(made.figure.add_subplot(grid[0, :]), analysis, said)
    groups = {
        name: mine
        for name, mine in sorted(
            grouped(analysis["groups"], lambda g: g["operation"]).items(), reverse=True
        )
        if any(group.get("binades") for group in mine)
    }
    ranks = len({tensor["rank"] for tensor in analysis["tensors"]}) > 1
    if groups:
        width = 2 if said.formats else 3
        _draw_values(made.figure.add_subplot(grid[1, :width]), analysis, groups)
    if said.formats:
        _draw_losses(made.figure.add_subplot(grid[1, 2 if groups else slice(None)]), said.formats)
    fields: list[tuple[str, Callable[[TensorPortrait], str]]] = [
        ("quant type", quant_type_of),
        ("type of layer and direction", lambda t: f"{t['layer_type']} {t['operation']}"),
    ]
    if ranks:
        fields.append(("rank", lambda t: f"rank {t['rank']}"))
    else:
        fields.append(("name", lambda t: str(t["name"])))
    for column, (label, field) in enumerate(fields):
        _draw_parts(made.figure.add_subplot(grid[2, column]), analysis, label, field)
    return made


def _write_findings(axes: Axes, analysis: DumpAnalysis, said: Said) -> None:
    """Sentences left, the worst tensors right."""
    axes.axis("off")
    axes.set_xlim(0, 1)
    rows = 0.0
    step = 0.092
    axes.text(0, 1, plain(summary_line(analysis), 120), fontsize=LABEL, color=GRAY, va="top")
    for finding in said.findings[1 : 1 + _SENTENCES]:
        lines = textwrap.wrap(shortened(finding.text, 240), 84)[:3]
        if rows + len(lines) > 10:
            break
        y = 1 - step * (rows + 1.25)
        axes.text(
            0,
            y,
            _MARK[finding.level],
            fontsize=TICK,
            color=_INK[finding.level],
            va="top",
            weight="bold",
        )
        axes.text(
            0.058, y, "\n".join(plain(part, 100) for part in lines), fontsize=LABEL, va="top",
            color=_INK[finding.level], linespacing=1.15,
        )  # fmt: skip
        rows += len(lines) + 0.2
    bad = worst_tensors(analysis, _TENSORS)
    if bad:
        axes.text(0.63, 1, "Worst tensors", fontsize=PANEL, weight="bold", va="top")
    titles = row_titles([found.tensor for found in bad], 58)
    for row, (found, name) in enumerate(zip(bad, titles, strict=True)):
        y = 1 - 2 * step * (row + 0.65)
        axes.text(0.63, y, plain(name, 58), fontsize=LABEL, va="top")
        axes.text(
            0.645, y - step * 0.92, plain(found.reason, 58), fontsize=TICK, va="top",
            color=WARN if found.rank[0] >= 2 else INK,
        )  # fmt: skip
    for text in axes.texts:
        text.set_in_layout(False)


def _draw_values(axes: Axes, analysis: DumpAnalysis, groups: dict) -> None:  # type: ignore[type-arg]
    groups = dict(list(groups.items())[:4])
    colors, borders = colors_for(groups), border_formats(analysis)
    stacked_binades(axes, groups, colors)
    axes.set_xlim(*span_of([group for mine in groups.values() for group in mine]))
    draw_borders(axes, borders)
    dress(
        axes, title="all values, and where formats are normal (solid) and subnormal (pale)",
        x="log2 of the magnitude", y="values (%)",
    )  # fmt: skip
    whole_numbers(axes, "x", 14)
    entries = {name: line(colors[name], linewidth=2) for name in groups}
    entries |= {name: patch(format_color(name)) for name in borders}
    axes.legend(
        list(entries.values()), [f" {plain(name, 20)}" for name in entries], fontsize=SMALL,
        frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.17), ncols=7, columnspacing=1.2,
        handlelength=1.4,
    )  # fmt: skip


def _draw_losses(axes: Axes, told: list[dict[str, Any]]) -> None:
    least = {row["format"]: min(row["worst_db"], row["worst_rest_db"]) for row in told}
    rows = [row for row in told if least[row["format"]] <= FINE_DB][:10]
    if not rows:
        axes.axis("off")
        axes.text(0, 0.9, f"no format loses more than {FINE_DB:g} dB", fontsize=LABEL, va="top")
        return
    ends = [min(row["median_rest_db"], FINE_DB) for row in rows]
    worst = [least[row["format"]] for row in rows]
    y = range(len(rows))
    axes.hlines(y, worst, ends, color=COLORS[4], linewidth=4)
    axes.plot(worst, y, "D", color=WARN, markersize=5.5, label=" worst tensor")
    axes.plot(ends, y, "o", color=COLORS[0], markersize=6, label=" median tensor")
    for row, value in zip(y, worst, strict=True):
        axes.annotate(
            decibels(value), (value, row), (-8, 0), textcoords="offset points", va="center",
            ha="right", fontsize=SMALL,
        )  # fmt: skip
    low, high = min(worst), max(*ends, *worst)
    axes.set_xlim(low - 0.28 * max(high - low, 10), high + 0.06 * max(high - low, 10))
    rows_named(axes, [row["label"] for row in rows], 18)
    dress(
        axes, title="what formats lose", x="SQNR, without massive elements if worse (dB)", grid="x"
    )
    axes.legend(fontsize=SMALL, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.17), ncols=2)


def _draw_parts(
    axes: Axes, analysis: DumpAnalysis, label: str, field: Callable[[TensorPortrait], str]
) -> None:
    """How many values each part has, the largest first; one row for the rest."""
    sizes: dict[str, int] = {}
    for tensor in analysis["tensors"]:
        sizes[field(tensor)] = sizes.get(field(tensor), 0) + int(tensor.get("elements") or 0)
    told = sorted(sizes.items(), key=lambda item: -item[1])
    if len(told) > _PARTS:
        rest = sum(size for _, size in told[_PARTS - 1 :])
        told = [*told[: _PARTS - 1], (f"{len(told) - _PARTS + 1} more", rest)]
    total = sum(size for _, size in told) or 1
    shares = [100 * size / total for _, size in told]
    bars(axes, shares, range(len(told)), COLORS[0], 0.66)
    for row, share in enumerate(shares):
        axes.annotate(
            f"{share:.3g} %",
            (share, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )
    axes.set_xlim(0, max(shares) * 1.25 or 1)
    axes.set_xticks(
        [tick for tick in axes.get_xticks() if 0 <= tick <= min(100, axes.get_xlim()[1])]
    )
    rows_named(axes, [name for name, _ in told], 22)
    if len(told) < 4:
        axes.set_ylim(3.45, -0.55)
    dress(axes, title=f"values by {label}", x="share of values (%)", grid="x")


draw_quick = Drawing(_build_quick)
