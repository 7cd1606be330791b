"""Sections of the page about several runs: their comparison, and trends over a history."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qgate.charts.heat import margin_step
from qgate.charts.pages import Cell, number, render
from qgate.page._heat import natural
from qgate.page._texts import headline_parts
from qgate.page.comparison_texts import (
    cell_text,
    counts_text,
    headline,
    mode_text,
    ratio_text,
    verdict_text,
)
from qgate.page.comparisons import GROUPS, Row, RunComparison, RunValue
from qgate.page.history import ModePoint, Point
from qgate.page.pages import Section
from qgate.page.plots.trends import Trend, TrendPoint, trend_lines
from qgate.page.runs import Run
from qgate.page.tables import cut_middle
from qgate.text import distinct, one_line, shortened, times_figure
from qgate.text.findings import Finding

# Values below these say nothing, and would stretch an axis over many decades.
_QUIET = {"margin": 0.01, "error": 1e-9}
_ROWS = 2000
_RUN_HEAD = ("run", "verdict", "device", "commit", "started", "failed", "gates")
_RUNS = 50
# In rem, so that the table is laid out at once: change, site (what is left), scope, mode, metric;
# the value of each run; ratio and verdict.
_WIDTHS, _VALUE, _LAST, _SITE = (4.5, 0, 6, 8, 10), 7, (5, 9), 14


def comparison_section(comparison: RunComparison, runs: Sequence[Run]) -> Section:
    """Render the runs, the differences of their headers, and all rows in one table to filter."""
    names = comparison.names
    several = len({row.model for row in comparison.rows}) > 1
    differences = [
        Finding("warn" if difference.warning else "info", difference.text(names))
        for difference in comparison.differences
    ]
    heads = distinct([cut_middle(one_line(name), 30) for name in names])
    rows = comparison.rows[:_ROWS]
    groups = {change.group for row in rows for change in row.changes}
    html = render(
        "page/comparison",
        about=f"{headline(comparison)}: {counts_text(comparison)}",
        run_head=_RUN_HEAD,
        runs=[_run_row(name, run) for name, run in zip(heads, runs, strict=True)],
        differences=differences,
        filters=[
            ("change", 0, [group for group in GROUPS if group in groups]),
            ("mode", 3, sorted({_mode(row, several) for row in rows}, key=natural)),
            ("verdict", 5 + len(names) + 1, sorted({verdict_text(row, heads) for row in rows})),
        ],
        bases=heads,
        head=["change", "site", "scope", "mode", "metric", *heads, "ratio", "verdict"],
        words=5,
        widths=[*_WIDTHS, *([_VALUE] * len(heads)), *_LAST],
        least=sum(_WIDTHS) + _VALUE * len(heads) + sum(_LAST) + _SITE,
        rows=[_row(row, heads, several) for row in rows],
        more=len(comparison.rows) - len(rows),
    )
    return Section("comparison", "Comparison", html)


def _run_row(name: str, run: Run) -> list[Cell]:
    failed = sum(not gate.is_new for gate in run.failed)
    words = (name, headline_parts(run)[0], run.header.get("device"), run.header.get("commit"))
    started = str(run.header.get("started") or "")[:16].replace("T", " ")
    counts = (number(failed, f"{failed:,}", bad=failed > 0), number(len(run.gates)))
    return [*(Cell(shortened(word or "–", 60)) for word in words), Cell(started), *counts]


def _mode(row: Row, several: bool) -> str:
    return shortened(f"{row.model} {mode_text(row)}" if several else mode_text(row), 80)


def _row(row: Row, names: Sequence[str], several: bool) -> dict[str, object]:
    """Return the cells of a row; `changes` are those against each run, which a script shows."""
    changes = [
        f"{change.group}|{ratio_text(change) or '–'}|{change.moved!r}" for change in row.changes
    ]
    return {
        "group": row.group,
        "site": shortened(row.site, 120),
        "words": [shortened(row.scope, 40), _mode(row, several), shortened(row.metric, 60)],
        "cells": [(_number(cell), _step(cell)) for cell in row.cells],
        # Sorted by how far it moved, in the direction that is worse.
        "ratio": Cell(ratio_text(row) or "–", repr(row.moved)),
        "verdict": verdict_text(row, names),
        "changes": ";".join(changes),
    }


def _step(cell: RunValue | None) -> str:
    """Return the classes of a value: its color by how near to its limit it is, and a failure."""
    if cell is None:
        return ""
    step = "" if cell.times is None else f"h{margin_step(cell.times)}"
    return step if cell.passed else f"{step} bad".strip()


def _number(cell: RunValue | None) -> Cell:
    """Return a cell; a value that is not finite sorts as the largest, a missing one last."""
    if cell is None:
        return Cell("–", "nan")
    if cell.value is None:
        return Cell(cell_text(cell), "inf" if not cell.passed else "nan")
    return number(cell.value, cell_text(cell))


def trend_section(points: Sequence[Point]) -> Section:
    """Render margins, errors and failures over runs, and a table of runs, newest first."""
    charts = []
    if len(points) > 1:
        failures = [_trend_point(point, float(point.failed), point.red) for point in points]
        charts = [
            trend_lines(_trends(points, "margin"), measure="times the limit"),
            trend_lines(_trends(points, "error"), measure="relative MSE"),
            trend_lines(
                [Trend("failed gates", tuple(failures))], measure="failed gates", counts=True
            ),
        ]
    head = ["started", "commit", "run", "device", "nearest to its limit", "gates", "failed",
            "x limit"]  # fmt: skip
    has_other_failures = any(point.other_failed for point in points)
    html = render(
        "page/trend",
        about=f"{len(points):,} runs, {points[0].started} to {points[-1].started}"
        if charts
        else "",
        drawn=charts,
        head=[*head, "other failed"] if has_other_failures else head,
        rows=[_run_cells(point, has_other_failures) for point in reversed(points[-_RUNS:])],
        earlier=len(points) - _RUNS,
    )
    return Section("trend", "Trend", html)


def _trends(points: Sequence[Point], field: str) -> list[Trend]:
    """Return one line per mode of a model.

    Runs without the mode, and values that are next to nothing, have no point.
    """
    lines: dict[tuple[str, str], list[TrendPoint]] = {}
    for point in points:
        for mode in point.modes:
            value = getattr(mode, field)
            drawn_value = value if value is not None and value >= _QUIET[field] else None
            line = lines.setdefault((mode.model, mode.mode), [])
            line.append(_trend_point(point, drawn_value, mode.failed > 0))
    shared = [mode for _, mode in lines]
    return [
        Trend(f"{model} {mode}" if shared.count(mode) > 1 else mode, tuple(line))
        for (model, mode), line in sorted(lines.items())
        if any(point.failed or point.value is not None for point in line)
    ]


def _trend_point(point: Point, value: float | None, failed: bool) -> TrendPoint:
    return TrendPoint(point.name, point.started, point.commit or "", value, failed)


def _run_cells(point: Point, has_other_failures: bool) -> list[Cell]:
    worst = max(point.modes, key=_rank, default=None)
    margin = math.nan if worst is None or worst.margin is None else worst.margin
    where = f"{worst.model} {worst.mode}" if worst else ""
    words = (point.started, (point.commit or "none")[:12], point.name, point.device, where)
    counts = [point.gates, point.failed, *([point.other_failed] if has_other_failures else [])]
    cells = [number(count, f"{count:,}") for count in counts]
    return [*map(Cell, words), *cells[:2], number(margin, times_figure(margin)), *cells[2:]]


def _rank(mode: ModePoint) -> tuple[bool, float]:
    return mode.failed > 0, math.inf if mode.failed and mode.margin is None else mode.margin or 0.0
