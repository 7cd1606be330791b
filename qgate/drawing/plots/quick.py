"""The one-page overview: findings, the distribution of values, losses, and parts of the dump."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import LABEL, PANEL, SMALL, TICK, dress
from qgate.charts.palette import BLACK, BROWN, COLORS, INK, WARN, format_color
from qgate.charts.sheet import Sheet, plain
from qgate.drawing.findings import DumpFindings, findings_of, summary_line, worst_tensors
from qgate.drawing.losses import FormatSummary
from qgate.drawing.plots.magnitudes import border_formats, draw_magnitudes
from qgate.summaries.reading import FINE_DB, grouped, quant_type_of, row_titles
from qgate.summaries.record import DumpAnalysis, GroupSummary, TensorSummary
from qgate.text import decibels, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = {"fail": WARN, "warn": BROWN, "info": BLACK}
_SENTENCES, _TENSORS, _PARTS = 7, 5, 8
_BELOW: Mapping[str, Any] = {
    "fontsize": SMALL, "frameon": False, "loc": "upper left", "bbox_to_anchor": (0, -0.17),
}  # fmt: skip


def overview(analysis: DumpAnalysis) -> Sheet | None:
    findings = findings_of(analysis)
    if not analysis["tensors"]:
        return None
    page = charts.sheet(13, 9.6, findings.findings[0].text.rstrip("."))
    grid = page.figure.add_gridspec(3, 3, height_ratios=(1.05, 1.25, 1.0))
    _write_findings(page.figure.add_subplot(grid[0, :]), analysis, findings)
    groups = {
        name: mine
        for name, mine in sorted(
            grouped(analysis["groups"], lambda group: group["operation"]).items(), reverse=True
        )
        if any(group.get("binades") for group in mine)
    }
    if groups:
        width = 2 if findings.formats else 3
        _draw_values(page.figure.add_subplot(grid[1, :width]), analysis, groups)
    if findings.formats:
        _draw_losses(
            page.figure.add_subplot(grid[1, 2 if groups else slice(None)]), findings.formats
        )
    fields: dict[str, Callable[[TensorSummary], str]] = {
        "quant type": quant_type_of,
        "type of layer and direction": lambda t: f"{t['layer_type']} {t['operation']}",
    }
    if len({tensor["rank"] for tensor in analysis["tensors"]}) > 1:
        fields["rank"] = lambda tensor: f"rank {tensor['rank']}"
    else:
        fields["name"] = lambda tensor: str(tensor["name"])
    for column, (label, field) in enumerate(fields.items()):
        _draw_parts(page.figure.add_subplot(grid[2, column]), analysis, label, field)
    return page


def _write_findings(axes: Axes, analysis: DumpAnalysis, findings: DumpFindings) -> None:
    """Write findings on the left, the worst tensors on the right."""
    axes.axis("off")
    axes.set_xlim(0, 1)
    rows = 0.0
    step = 0.092

    def write(x: float, y: float, text: str, size: float, **more: Any) -> None:
        axes.text(x, y, text, fontsize=size, va="top", **more).set_in_layout(False)

    write(0, 1, plain(summary_line(analysis), 120), LABEL, color=INK)
    for finding in findings.findings[1 : 1 + _SENTENCES]:
        lines = textwrap.wrap(shortened(finding.text, 240), 84)[:3]
        if rows + len(lines) > 10:
            break
        y, color = 1 - step * (rows + 1.25), _INK[finding.level]
        write(0, y, finding.mark.strip(), TICK, color=color, weight="bold")
        text = "\n".join(plain(part, 100) for part in lines)
        write(0.058, y, text, LABEL, color=color, linespacing=1.15)
        rows += len(lines) + 0.2
    bad = worst_tensors(analysis, _TENSORS)
    if bad:
        write(0.63, 1, "Worst tensors", PANEL, weight="bold")
    titles = row_titles([item.tensor for item in bad], 58)
    for row, (item, name) in enumerate(zip(bad, titles, strict=True)):
        y = 1 - 2 * step * (row + 0.65)
        write(0.63, y, plain(name, 58), LABEL)
        color = WARN if item.rank[0] >= 2 else INK
        write(0.645, y - step * 0.92, plain(item.reason, 58), TICK, color=color)


def _draw_values(axes: Axes, analysis: DumpAnalysis, groups: dict[str, list[GroupSummary]]) -> None:
    groups = dict(list(groups.items())[:4])
    colors, borders = charts.colors_for(groups), border_formats(analysis)
    title = "all values, and where formats are normal (solid) and subnormal (pale)"
    draw_magnitudes(axes, groups, colors, borders, title=title, ticks=14)
    entries = shapes.keys(colors, linewidth=2)
    entries |= shapes.patches({name: format_color(name) for name in borders})
    names = [f" {plain(name, 20)}" for name in entries]
    axes.legend(
        list(entries.values()), names, ncols=7, columnspacing=1.2, handlelength=1.4, **_BELOW
    )


def _draw_losses(axes: Axes, formats: Sequence[FormatSummary]) -> None:
    rows = [row for row in formats if row.least_db <= FINE_DB][:10]
    if not rows:
        axes.axis("off")
        axes.text(0, 0.9, f"no format loses more than {FINE_DB:g} dB", fontsize=LABEL, va="top")
        return
    ends = [min(row.median_db[1], FINE_DB) for row in rows]
    worst = [row.least_db for row in rows]
    y = range(len(rows))
    axes.hlines(y, worst, ends, color=COLORS[4], linewidth=4)
    axes.plot(worst, y, "D", color=WARN, markersize=5.5, label=" worst tensor")
    axes.plot(ends, y, "o", color=COLORS[0], markersize=6, label=" median tensor")
    for row, value in zip(y, worst, strict=True):
        shapes.beside(axes, decibels(value), value, row, -8, ha="right")
    low, high = min(worst), max(*ends, *worst)
    axes.set_xlim(low - 0.28 * max(high - low, 10), high + 0.06 * max(high - low, 10))
    charts.name_rows(axes, [row.label for row in rows], 18)
    dress(
        axes, title="what formats lose", x="SQNR, without massive elements if worse (dB)", grid="x"
    )
    axes.legend(ncols=2, **_BELOW)


def _draw_parts(
    axes: Axes, analysis: DumpAnalysis, label: str, field: Callable[[TensorSummary], str]
) -> None:
    """Draw the share of values of each part, the largest first, and the smallest as one."""
    sizes: dict[str, int] = {}
    for tensor in analysis["tensors"]:
        sizes[field(tensor)] = sizes.get(field(tensor), 0) + int(tensor.get("elements") or 0)
    parts = sorted(sizes.items(), key=lambda item: -item[1])
    if len(parts) > _PARTS:
        more = sum(size for _, size in parts[_PARTS - 1 :])
        parts = [*parts[: _PARTS - 1], (f"{len(parts) - _PARTS + 1} more", more)]
    total = sum(size for _, size in parts) or 1
    shares = [100 * size / total for _, size in parts]
    shapes.bars(axes, shares, [f"{share:.3g} %" for share in shares], COLORS[0], height=0.66)
    axes.set_xlim(0, max(shares) * 1.25 or 1)
    most = min(100, axes.get_xlim()[1])
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= most])
    charts.name_rows(axes, [name for name, _ in parts], 22)
    if len(parts) < 4:
        axes.set_ylim(3.45, -0.55)
    dress(axes, title=f"values by {label}", x="share of values (%)", grid="x")
