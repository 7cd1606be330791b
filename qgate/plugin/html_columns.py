"""Additions to the page of pytest-html: columns, the head of the run, plots of gates.

pytest-html puts names of tests and what hooks return into its page as they are, so all of it is
escaped here. Its tables sort by the text of a cell, so numbers have a hidden text before them that
sorts as they do. Everything is drawn in the process that writes the page, also under pytest-xdist.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import pytest

from qgate.charts.svg import standalone
from qgate.page.pages import map_fragment, summary_head
from qgate.page.plots.panels import Panel, panels_of
from qgate.page.runs import Run
from qgate.plugin.runs import SuiteRun
from qgate.plugin.summary import page_run
from qgate.results import worst_first
from qgate.results.checks import view_of
from qgate.results.summary import ComparisonSummary, summarize_comparison
from qgate.text import for_html, one_line

_COLUMNS = ("mode", "layer", "metric", "value", "limit", "margin", "change")
# After the result and the name of the test.
_PLACE = 2
# Gates with plots: each is some 30 kB on a page that has to open.
_MOST_DRAWN = 100
_NEAREST = 3
_MOST_CELLS = 1500
_STYLE = """
.qgate-plots { display: flex; flex-wrap: wrap; gap: 8px; margin: 8px 0; }
.qgate-plots figure { margin: 0; max-width: 460px; }
.qgate-plots img { max-width: 100%; display: block; background: #fff; }
.qgate-plots figcaption, .qgate-nearest { color: #1b1f24; font-size: 13px; }
td:is(.col-mode, .col-layer, .col-metric, .col-value, .col-limit, .col-margin, .col-change) {
  color: #1b1f24; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
td:is(.col-layer, .col-value, .col-limit, .col-margin, .col-change) {
  overflow-wrap: normal; white-space: nowrap; }
.additional-summary { color: #1b1f24; }
"""


class HtmlColumns:
    """Hooks of pytest-html; only registered where it writes a page."""

    def __init__(self, run: SuiteRun) -> None:
        self._run = run
        self._plots = run.options.run.plots
        self._whole = bool(run.options.config.getoption("self_contained_html", False))
        self._drawn = 0
        self._texts: dict[str, list[str]] = {}

    # Rows -----------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Put plots on the report of the call, before pytest-html sees it: it drops all others."""
        if report.when == "setup":
            self._texts.pop(report.nodeid, None)
        if hasattr(report, "context"):
            if report.failed:
                # Of several reports with one outcome pytest-html keeps the last: a failed subtest
                # would leave no text.
                self._texts.setdefault(report.nodeid, []).append(report.longreprtext)
            return
        worst = _worst_row(report) if self._plots != "none" else None
        if worst is not None and not worst["passed"] and worst.get("pictures"):
            self._drawn += 1
            if self._drawn <= _MOST_DRAWN:
                report.extras = [*getattr(report, "extras", []), *self._extras(worst)]  # type: ignore[attr-defined]

    def _extras(self, record: Mapping[str, Any]) -> list[dict[str, str | None]]:
        """Make extras as `pytest_html.extras` does: images as files, or within the page."""
        panels, problems = _panels(record)
        text = "".join(f"<p>Not drawn: {for_html(problem)}</p>" for problem in problems)
        text += _figures(panels) if self._whole and panels else ""
        html = {"name": "", "format_type": "html", "content": text, "mime_type": None}
        extras = [{**html, "extension": None}] if text else []
        image = {"format_type": "image", "mime_type": "image/svg+xml", "extension": "svg"}
        return extras + [
            {"name": one_line(panel.title), "content": _encoded(panel), **image}
            for panel in panels
            if not self._whole
        ]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_header(self, cells: list[str]) -> None:
        titles = {"margin": ' title="how many times its limit the value is"'}
        cells[_PLACE:_PLACE] = [
            f'<th class="sortable" data-column-type="{name}"{titles.get(name, "")}>'
            f"{name.capitalize()}</th>"
            for name in _COLUMNS
        ]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_row(self, report: pytest.TestReport, cells: list[str]) -> None:
        """Other tests get empty cells; a row that somebody took out stays out."""
        if len(cells) < _PLACE:
            return
        if hasattr(report, "qgate_gate"):
            raw = report.nodeid if report.when == "call" else f"{report.nodeid}::{report.when}"
            if cells[1] == f'<td class="col-testId">{raw}</td>':
                cells[1] = f'<td class="col-testId">{for_html(raw)}</td>'
        worst = _worst_row(report)
        texts = _cells(summarize_comparison(worst)) if worst is not None else {}
        cells[_PLACE:_PLACE] = [
            f'<td class="col-{name}">{f"<span hidden>{key}</span>" if key else ""}'
            f"{for_html(text)}</td>"
            for name in _COLUMNS
            for text, key in [texts.get(name, ("", ""))]
        ]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_html(self, report: pytest.TestReport, data: list[str]) -> None:
        if report.when == "call":
            texts = self._texts.get(report.nodeid, ())
            data[:0] = [for_html(text, lines=True) + "\n" for text in texts]

    # The head -------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_summary(
        self, prefix: list[str], summary: list[str], postfix: list[str]
    ) -> None:
        """Put the verdict above the counts of pytest, and what is worth a look below them."""
        prefix.append(f"<style>{_STYLE}</style>")
        run = page_run(self._run)
        if run is None:
            return
        summary.append(summary_head(run))
        if self._drawn > _MOST_DRAWN:
            summary.append(
                f"<p>{self._drawn - _MOST_DRAWN} more failing gates are not drawn here: they are "
                "in qgate-out/report.html.</p>"
            )
        # The ids of rows on a page of pytest-html are names of tests.
        map_html = map_fragment(run, lambda gate: f"#{quote(gate.node, safe='')}", _MOST_CELLS)
        postfix.append(map_html)
        if self._plots in ("worst", "all"):
            postfix.append(_nearest(run))


def _worst_row(report: pytest.TestReport) -> Mapping[str, Any] | None:
    """The comparison that decided a gate or came nearest to its limit."""
    rows = getattr(report, "qgate", None)
    return worst_first(rows)[0] if rows and report.when == "call" else None


def _cells(finding: ComparisonSummary) -> dict[str, tuple[str, str]]:
    """The text of each column, and what it is sorted by."""
    view, check = finding.view, finding.check or {}
    return {
        "mode": (finding.mode, ""),
        "layer": (finding.layer, ""),
        "metric": (f"{view.metric} {finding.site} ({finding.scope})".strip(), ""),
        "value": (view.now, _key(check.get("value"))),
        "limit": (view.most, _key(check.get("bound"))),
        "margin": (view.far, _key(view.times)),
        "change": (view.change, _key(view.moved)),
    }


def _key(number: float | None) -> str:
    """A text that sorts as the number does; nothing sorts before all of them."""
    if number is None or math.isnan(number):
        return ""
    bits = struct.unpack(">Q", struct.pack(">d", number))[0]
    return f"{bits ^ (2**64 - 1) if bits >> 63 else bits | 1 << 63:016x}"


# Plots ------------------------------------------------------------------------------------------


def _panels(record: Mapping[str, Any]) -> tuple[list[Panel], list[str]]:
    """Split a record's panels into those that can be drawn and those that cannot."""
    try:
        panels, problems = panels_of(record)
    except Exception as error:
        return [], [f"{type(error).__name__}: {error}"]
    return list(panels), list(problems)


def _encoded(panel: Panel) -> str:
    return base64.b64encode(standalone(panel.svg).encode("utf-8")).decode("ascii")


def _figures(panels: Sequence[Panel]) -> str:
    """Side by side, each an image of its own: nothing of the page reaches into it."""
    figures = [
        f'<figure><img alt="{for_html(panel.title)}" '
        f'src="data:image/svg+xml;base64,{_encoded(panel)}"></figure>'
        for panel in panels
    ]
    return f'<div class="qgate-plots">{"".join(figures)}</div>'


def _nearest(run: Run) -> str:
    """The gates that passed and came nearest to their limits."""
    drawn = []
    for gate in [gate for gate in run.gates if gate.passed][:_NEAREST]:
        panels, _ = _panels(gate.record)
        if panels and gate.check is not None:
            text = for_html(f"{gate.node}: {view_of(gate.check).text()}")
            drawn += [f'<p class="qgate-nearest">{text}</p>', _figures(panels)]
    return f"<h2>Passed, and nearest to their limits</h2>{''.join(drawn)}" if drawn else ""
