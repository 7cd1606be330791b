"""What qgate adds to the page of pytest-html: columns, the head of the run, plots of gates.

pytest-html puts names of tests and what hooks return into its page as they are, so all of it is
escaped here. Its tables sort by the text of a cell, so numbers have a hidden text before them that
sorts as they do. Everything is drawn in the process that writes the page, also under pytest-xdist.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from qgate.metrics import METRICS
from qgate.plugin.options import value
from qgate.text import for_html, one_line

if TYPE_CHECKING:
    from qgate.page.plots.panels import Panel
    from qgate.page.runs import RecordedGate, Run
    from qgate.plugin.reporting import Reports
    from qgate.results.summary import Finding

_COLUMNS = ("mode", "layer", "metric", "value", "limit", "margin", "change")
# After the result and the name of the test.
_PLACE = 2
# Gates with plots: each is some 30 kB on a page that has to open.
_MOST_DRAWN = 100
_NEAREST = 3
_MOST_CELLS = 1500
_TITLES = {"margin": "how many times its limit the value is"}
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


def is_wanted(config: pytest.Config) -> bool:
    """Whether this process writes a page of pytest-html."""
    there = config.pluginmanager.hasplugin("html")
    worker = hasattr(config, "workerinput")
    return there and not worker and bool(config.getoption("htmlpath", None))


class HtmlColumns:
    """Hooks of pytest-html; only registered where it writes a page."""

    def __init__(self, config: pytest.Config, reports: Reports) -> None:
        self._config, self._reports = config, reports
        self._plots = value(config, "plots")
        self._whole = bool(config.getoption("self_contained_html", False))
        self._drawn = 0
        self._left_out = 0
        self._texts: dict[str, list[str]] = {}

    # Rows -----------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Plots on the report of the call, before pytest-html sees it: it drops all others."""
        if report.when == "setup":
            self._texts.pop(report.nodeid, None)
        if hasattr(report, "context"):
            if report.failed:
                # Of several reports with one outcome pytest-html keeps the last: a failed subtest
                # would leave no text.
                self._texts.setdefault(report.nodeid, []).append(report.longreprtext)
            return
        if report.when == "call" and self._plots != "none":
            worst = worst_row(report)
            if worst is not None and not worst["passed"] and worst.get("pictures"):
                report.extras = [*getattr(report, "extras", []), *self._extras(worst)]  # type: ignore[attr-defined]

    def _extras(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._drawn >= _MOST_DRAWN:
            self._left_out += 1
            return []
        self._drawn += 1
        panels, problems = _panels(record)
        told = "".join(f"<p>Not drawn: {for_html(problem)}</p>" for problem in problems)
        told += _figures(panels) if self._whole and panels else ""
        made = [_extra("html", told)] if told else []
        if self._whole:
            return made
        return made + [_extra("image", _encoded(each), one_line(each.title)) for each in panels]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_header(self, cells: list[str]) -> None:
        cells[_PLACE:_PLACE] = [
            f'<th class="sortable" data-column-type="{name}"{_title(name)}>{name.capitalize()}</th>'
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
        cells[_PLACE:_PLACE] = _cells(worst_row(report))

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
        """The verdict above the counts of pytest, and what is worth a look below them."""
        prefix.append(f"<style>{_STYLE}</style>")
        run = self._reports.shown()
        if run is None:
            return
        from qgate.page.pages import map_fragment, summary_head

        summary.append(summary_head(run))
        if self._left_out:
            summary.append(
                f"<p>{self._left_out} more failing gates are not drawn here: they are in "
                "qgate-out/report.html.</p>"
            )
        postfix.append(map_fragment(run, _address, _MOST_CELLS))
        if self._plots in ("worst", "all"):
            postfix.append(_nearest(run))


def worst_row(report: pytest.TestReport) -> Mapping[str, Any] | None:
    """The comparison that decided a gate or came nearest to its limit."""
    rows = getattr(report, "qgate", None)
    if not rows or report.when != "call":
        return None
    from qgate.results import worst_first

    return worst_first(rows)[0]


def _cells(record: Mapping[str, Any] | None) -> list[str]:
    shown = dict.fromkeys(_COLUMNS, ("", ""))
    if record is not None:
        from qgate.page.tables import far_text, limit_text, value_text
        from qgate.results.summary import change_text, finding_of

        found = finding_of(record)
        check = found.check or {"metric": "", "value": None, "bound": None}
        beyond = math.inf if not found.passed and found.times is None else found.times
        shown |= {
            "mode": (found.mode, ""),
            "layer": (found.layer, ""),
            "metric": (f"{check['metric']} {found.site} ({found.scope})".strip(), ""),
            "value": (value_text(found), _key(check["value"])),
            "limit": (limit_text(found), _key(check["bound"])),
            "margin": (far_text(found), _key(beyond)),
            "change": (change_text(found), _key(_change(found))),
        }
    return [
        f'<td class="col-{name}">{_hidden(key)}{for_html(text)}</td>'
        for name, (text, key) in shown.items()
    ]


def _change(found: Finding) -> float | None:
    """What the change is sorted by: how many times the accepted value."""
    now = found.check["value"] if found.check else None
    if now is None or not math.isfinite(now) or found.accepted is None:
        return None
    if found.check and METRICS.find(str(found.check["metric"])).logarithm == "log2":
        return float(now - found.accepted)
    if not found.accepted:
        return math.inf if now else 0.0
    return math.log2(abs(now / found.accepted)) if now else -math.inf


def _key(number: float | None) -> str:
    """A text that sorts as the number does; nothing sorts before all of them."""
    if number is None or math.isnan(number):
        return ""
    bits = struct.unpack(">Q", struct.pack(">d", number))[0]
    return f"{bits ^ (2**64 - 1) if bits >> 63 else bits | 1 << 63:016x}"


def _hidden(key: str) -> str:
    return f"<span hidden>{key}</span>" if key else ""


def _title(name: str) -> str:
    return f' title="{_TITLES[name]}"' if name in _TITLES else ""


def _extra(kind: str, content: str, name: str = "") -> dict[str, Any]:
    """What `pytest_html.extras` makes: an image is stored as a file, or put into the page."""
    image = {"mime_type": "image/svg+xml", "extension": "svg"}
    other = {"mime_type": None, "extension": None}
    about = image if kind == "image" else other
    return {"name": name, "format_type": kind, "content": content, **about}


# Plots ------------------------------------------------------------------------------------------


def _panels(record: Mapping[str, Any]) -> tuple[list[Panel], list[str]]:
    """What can be drawn of a record, and what cannot; a suite of its own may put anything there."""
    from qgate.page.plots.panels import panels_of

    try:
        panels, problems = panels_of(record)
    except Exception as error:
        return [], [f"{type(error).__name__}: {error}"]
    return list(panels), list(problems)


def _encoded(panel: Panel) -> str:
    from qgate.page.plots.svg import standalone

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
    from qgate.results.ranking import check_text

    drawn = []
    for gate in [gate for gate in run.gates if gate.passed][:_NEAREST]:
        panels, _ = _panels(gate.record)
        if panels and gate.check is not None:
            told = f"{gate.node}: {check_text(gate.check)}"
            drawn.append(f'<p class="qgate-nearest">{for_html(told)}</p>')
            drawn.append(_figures(panels))
    return f"<h2>Passed, and nearest to their limits</h2>{''.join(drawn)}" if drawn else ""


def _address(gate: RecordedGate) -> str:
    """The row of a gate on a page of pytest-html, whose ids are names of tests."""
    return f"#{quote(gate.node, safe='')}"
