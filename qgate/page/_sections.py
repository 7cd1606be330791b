"""The parts of a page that are about several runs: their comparison, and trends over a history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from qgate.charts.page_parts import Cell, drawing, empty, figures, finding_list, number, sortable
from qgate.page.comparison_texts import (
    TITLES,
    cell_text,
    counts_text,
    headline,
    mode_text,
    ratio_text,
    verdict_text,
)
from qgate.page.comparisons import Cell as Compared
from qgate.page.comparisons import Row, RunComparison
from qgate.page.history import ModePoint, Point
from qgate.page.pages import Section
from qgate.page.plots.trends import Trend, TrendPoint, trend_lines
from qgate.page.tables import middle_cut
from qgate.results.ranking import times_figure
from qgate.text import for_html as text

# Values below these say nothing, and would stretch an axis over many decades.
_QUIET = {"margin": 0.01, "error": 1e-9}
_ROWS = 200
_RUNS = 50


def comparison_section(comparison: RunComparison) -> Section:
    """What differs in the headers first, then a table for each group that has rows."""
    told = [
        ("warn" if each.warning else "info", each.text(comparison.names))
        for each in comparison.differences
    ]
    parts = [
        f"<p class='about'>{text(headline(comparison))}: {text(counts_text(comparison))}</p>",
        finding_list(told, {"warn": "warning", "info": "differs"}) if told else "",
    ]
    for group, title in TITLES.items():
        found = comparison.of(group)
        if found:
            parts.append(f"<h3 id='comparison-{group}'>{text(title)} ({len(found):,})</h3>")
            parts.append(_rows(found[:_ROWS], comparison.names, title))
            if len(found) > _ROWS:
                rest = f"{len(found) - _ROWS:,} more are in the CSV and JSON of this report."
                parts.append(f"<p class='about'>{text(rest)}</p>")
    return Section("comparison", "Comparison", "\n".join(part for part in parts if part))


def _rows(found: Sequence[Row], names: Sequence[str], label: str) -> str:
    several = len({row.model for row in found}) > 1
    heads = ["site", "scope", "mode", "metric", "verdict"]
    heads += [*(middle_cut(name, 30) for name in names), "ratio"]
    rows: list[list[Cell]] = []
    for row in found:
        mode = f"{row.model} {mode_text(row)}" if several else mode_text(row)
        words = (row.site, row.scope, mode, row.metric, verdict_text(row, names))
        cells: list[Cell] = [(each, None) for each in words]
        cells += [_number(cell) for cell in row.cells]
        # Sorted by how far it moved, in the direction that is worse.
        cells.append((ratio_text(row) or "–", repr(row.moved)))
        rows.append(cells)
    return sortable(heads, rows, 5, label)


def _number(cell: Compared | None) -> Cell:
    """A value; one that is not finite sorts as the largest, one that is not there last."""
    if cell is None:
        return "–", "nan"
    if cell.value is None:
        return cell_text(cell), "inf" if not cell.passed else "nan"
    return number(cell.value, cell_text(cell))


def trend_section(points: Sequence[Point]) -> Section:
    """Curves of margins, errors and failures over runs, and the latest runs as a table."""
    if len(points) < 2:
        told = "One run so far: a trend starts with the next one." if points else "No runs yet."
        return Section("trend", "Trend", f"{empty(told)}\n{_runs(points)}")
    drawn = [
        drawing(trend_lines(_trends(points, "margin"), measure="times the limit")),
        drawing(trend_lines(_trends(points, "error"), measure="relative MSE")),
        drawing(trend_lines([_failures(points)], measure="failed gates", counts=True)),
    ]
    about = f"{len(points):,} runs, {points[0].started} to {points[-1].started}"
    parts = [f"<p class='about'>{text(about)}</p>", figures(drawn), _runs(points)]
    return Section("trend", "Trend", "\n".join(parts))


def _trends(points: Sequence[Point], what: str) -> list[Trend]:
    """One line per mode of a model; a run that did not have it has no point, nor has a value that
    is next to nothing."""
    found: dict[tuple[str, str], list[TrendPoint]] = {}
    for point in points:
        for mode in point.modes:
            value = getattr(mode, what)
            loud = value if value is not None and value >= _QUIET[what] else None
            told = _trend_point(point, loud, mode.failed > 0)
            found.setdefault((mode.model, mode.mode), []).append(told)
    shared = [mode for _, mode in found]
    return [
        Trend(f"{model} {mode}" if shared.count(mode) > 1 else mode, tuple(told))
        for (model, mode), told in sorted(found.items())
        if any(each.failed or each.value is not None for each in told)
    ]


def _failures(points: Iterable[Point]) -> Trend:
    told = (_trend_point(point, float(point.failed), point.red) for point in points)
    return Trend("failed gates", tuple(told))


def _trend_point(point: Point, value: float | None, failed: bool) -> TrendPoint:
    return TrendPoint(point.name, point.started, point.commit or "", value, failed)


def _runs(points: Sequence[Point]) -> str:
    """The latest runs, newest first."""
    heads = ["started", "commit", "run", "device", "nearest to its limit", "gates", "failed",
             "x limit"]  # fmt: skip
    rows: list[list[Cell]] = []
    others = any(point.other_failed for point in points)
    heads += ["other failed"] if others else []
    for point in reversed(points[-_RUNS:]):
        worst = max(point.modes, key=_rank, default=None)
        where = f"{worst.model} {worst.mode}" if worst else ""
        margin = math.nan if worst is None or worst.margin is None else worst.margin
        rows.append(
            [
                (point.started, None),
                ((point.commit or "none")[:12], None),
                (point.name, None),
                (point.device, None),
                (where, None),
                number(float(point.gates), f"{point.gates:,}"),
                number(float(point.failed), f"{point.failed:,}"),
                number(margin, times_figure(margin)),
                *([number(point.other_failed, f"{point.other_failed:,}")] if others else []),
            ]
        )
    table = sortable(heads, rows, 5, "runs of the history") if rows else ""
    rest = len(points) - _RUNS
    more = f"<p class='about'>{rest:,} earlier runs are in the history.</p>" if rest > 0 else ""
    return f"{table}\n{more}" if more else table


def _rank(mode: ModePoint) -> tuple[bool, float]:
    return mode.failed > 0, math.inf if mode.failed and mode.margin is None else mode.margin or 0.0
