"""The section of the page that compares runs."""

from __future__ import annotations

from collections.abc import Sequence

from qgate.charts.pages import Cell, margin_step, number, render
from qgate.page._gates import headline_parts, natural
from qgate.page.comparison_texts import (
    cell_texts,
    change_text,
    counts_text,
    headline,
    mode_text,
    verdict_text,
)
from qgate.page.comparisons import GROUPS, Row, RunComparison, RunValue
from qgate.page.pages import HtmlSection
from qgate.page.runs import Run
from qgate.page.terminal import cut_middle
from qgate.text import distinct, one_line, shortened
from qgate.text.findings import Finding

_ROWS = 2000
_RUN_HEAD = ("run", "verdict", "device", "commit", "started", "failed", "gates")
# In rem, so that the table is laid out at once: change, site (what is left), scope, mode, metric;
# the value of each run; ratio and verdict.
_WIDTHS, _VALUE, _LAST, _SITE = (4.5, 0, 6, 8, 10), 7, (5, 9), 14


def comparison_section(comparison: RunComparison, runs: Sequence[Run]) -> HtmlSection:
    """Render the runs, the differences of their headers, and all rows in one table to filter."""
    names = comparison.names
    several = len({row.model for row in comparison.rows}) > 1
    differences = [
        Finding("warn" if difference.warning else "info", difference.text(names))
        for difference in comparison.differences
    ]
    heads = distinct([cut_middle(one_line(name), 30) for name in names])
    rows = comparison.rows[:_ROWS]
    groups = {row.group for row in rows}
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
        head=["change", "site", "scope", "mode", "metric", *heads, "moved", "verdict"],
        words=5,
        widths=[*_WIDTHS, *([_VALUE] * len(heads)), *_LAST],
        least=sum(_WIDTHS) + _VALUE * len(heads) + sum(_LAST) + _SITE,
        rows=[_row(row, heads, several) for row in rows],
        more=len(comparison.rows) - len(rows),
    )
    return HtmlSection("comparison", "Comparison", html)


def _run_row(name: str, run: Run) -> list[Cell]:
    failed = sum(not gate.is_new for gate in run.failed)
    words = (name, headline_parts(run)[0], run.header.get("device"), run.header.get("commit"))
    started = str(run.header.get("started") or "")[:16].replace("T", " ")
    counts = (number(failed, f"{failed:,}", bad=failed > 0), number(run.tally.gates))
    return [*(Cell(shortened(word or "–", 60)) for word in words), Cell(started), *counts]


def _mode(row: Row, several: bool) -> str:
    return shortened(f"{row.model} {mode_text(row)}" if several else mode_text(row), 80)


def _row(row: Row, names: Sequence[str], several: bool) -> dict[str, object]:
    return {
        "group": row.group,
        "site": shortened(row.site, 120),
        "words": [shortened(row.scope, 40), _mode(row, several), shortened(row.metric, 60)],
        "cells": [
            (_number(cell, text), _step(cell))
            for cell, text in zip(row.cells, cell_texts(row), strict=True)
        ],
        # Sorted by how far it moved, in the direction that is worse.
        "change": Cell(change_text(row) or "–", repr(row.moved)),
        "verdict": verdict_text(row, names),
    }


def _step(cell: RunValue | None) -> str:
    """Return the classes of a value: its color by how near to its limit it is, and a failure."""
    if cell is None:
        return ""
    step = "" if cell.times is None else f"h{margin_step(cell.times)}"
    return step if cell.passed else f"{step} bad".strip()


def _number(cell: RunValue | None, text: str) -> Cell:
    """Return a cell; a value that is not finite sorts as the largest, a missing one last."""
    if cell is None:
        return Cell("–", "nan")
    if cell.value is None:
        return Cell(text, "inf" if not cell.passed else "nan")
    return number(cell.value, text)
