"""Blocks of the failed gates, the table of all gates, and plots of the gates nearest to a limit."""

from __future__ import annotations

import os.path
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from qgate.charts.heat import margin_step
from qgate.charts.pages import render
from qgate.gate.checks import Check
from qgate.page._heat import natural
from qgate.page._texts import (
    FAILED,
    IMPROVED,
    NEW,
    PASSED,
    UNKNOWN,
    VERDICTS,
    accept_command,
    best_first,
    binding_of,
    evidence,
    fault_texts,
    gate_line,
    nearness_text,
    rerun_command,
    verdict_of,
    view_texts,
)
from qgate.page.plots.growth import error_growth
from qgate.page.plots.panels import Panel, panels_of
from qgate.page.runs import RecordedGate, Run
from qgate.results.check_views import NOTHING
from qgate.results.failure_causes import FailureCause, cause_of, is_one_fault
from qgate.results.pictures import Plots
from qgate.text import listed, one_line, shortened

# Bytes of details without plots: with thousands of failing gates the table has to do.
DETAILS_BUDGET = 2_000_000
PLOTS_BUDGET = 5_500_000
_ROWS, _FEW_ROWS, _OPEN, _NEAREST = 40, 5, 3, 6
_GROWTH_WIDTH = 640.0
# What is drawn of gates that passed.
_SMALL = ("error_histogram", "density", "sweep", "magnitudes")
_CHECK_HEAD = ("site", "scope", "metric", "value", "limit", "accepted / ideal", "change", "how far",
               "reason")  # fmt: skip
_MOST_ALSO = 4
_CLASSES = {FAILED: "f", NEW: "n", UNKNOWN: "u", PASSED: "p", IMPROVED: "p"}
# Columns of the table of all gates and their widths in rem; the first eight are words.
_COLUMNS = {
    "verdict": 5.8, "suite": 8.2, "model": 7.6, "mode": 6.8, "layer": 5.2, "site": 14.4, "scope": 6,
    "metric": 8.8, "value": 5, "limit": 5.8, "change": 5.6, "margin": 4.6, "seconds": 4.6,
}  # fmt: skip
# Those that a phone shows, in percent: what failed, its value and its limit.
_NARROW = {"verdict": 17, "mode": 13, "site": 21, "value": 15, "limit": 20, "margin": 14}
_WORDS, _MOST_REM = 8, 9.0
_LONGEST = 80


class Panels:
    """Plots of gates, drawn while the page has room for them; the worst gates come first."""

    def __init__(self, plots: Plots) -> None:
        self.plots = plots
        self.remaining = PLOTS_BUDGET
        self.problems: list[str] = []

    def of_gate(self, gate: RecordedGate, kinds: Collection[str] = ()) -> list[Panel] | None:
        """Draw the plots of a gate's worst comparison, all or some kinds; None without room."""
        if self.plots == "none" or not gate.record.get("pictures"):
            return []
        if self.remaining <= 0:
            return None
        try:
            panels, problems = panels_of(gate.record)
        # A record of a stranger may hold anything; a plot less is no reason to have no page.
        except Exception as error:
            self.problems.append(f"{gate.node}: {type(error).__name__}: {error}")
            return []
        self.problems += [f"{gate.node}: {problem}" for problem in problems]
        panels = [panel for panel in panels if not kinds or panel.kind in kinds]
        size = sum(len(panel.svg.encode()) for panel in panels)
        if size > self.remaining:
            self.remaining = 0
            return None
        self.remaining -= size
        return panels

    def growth(self, run: Run) -> list[tuple[str, str]]:
        """Draw the error over depth, one figure per model, whatever room is left."""
        figures = []
        for model in dict.fromkeys(line.model for line in run.growth):
            lines = [line for line in run.growth if line.model == model]
            try:
                figures.append((model, error_growth(lines, width=_GROWTH_WIDTH)))
            except Exception as error:
                self.problems.append(f"error over depth: {type(error).__name__}: {error}")
        self.remaining -= sum(len(svg.encode()) for _, svg in figures)
        return figures


# Those that failed --------------------------------------------------------------------------------


def failing_blocks(run: Run, panels: Panels) -> dict[int, str]:
    """Render blocks by the numbers of failing gates: causes open, what follows folded, new last."""
    causes = {cause.suspect.node: number for number, cause in enumerate(run.causes)}
    beyond = len(causes)
    gates = sorted(run.failed, key=lambda gate: (gate.is_new, causes.get(gate.node, beyond)))
    rows = _ROWS if len(gates) <= 50 else _FEW_ROWS
    blocks: dict[int, str] = {}
    budget = DETAILS_BUDGET
    for gate in gates:
        plots = panels.of_gate(gate)
        is_cause = gate.node in causes or not causes
        view = _block(run, gate, rows, is_open=is_cause and len(blocks) < _OPEN)
        block = render("page/gate", gate=view, head=_CHECK_HEAD, panels=plots)
        budget -= len(block.encode()) - sum(len(panel.svg.encode()) for panel in plots or ())
        if budget < 0:
            break
        blocks[gate.number] = block
    return blocks


def _block(run: Run, gate: RecordedGate, rows: int, *, is_open: bool) -> dict[str, object]:
    verdict, record = verdict_of(gate, run), gate.record
    failed = evidence(gate)
    unread = gate.failures - min(len(failed), rows)
    line, figures = fault_texts(failed[0]) if failed else (gate_line(gate), "")
    command, why = accept_command(run, gate)
    steps = [("test", gate.node, True), ("run it again", rerun_command(run, gate), True)]
    script_folder = next((r["reproduction"] for r in gate.failed if "reproduction" in r), "")
    cause = cause_of(run.causes, gate.node)
    if cause is not None and cause.suspect.node == gate.node:
        steps.insert(0, ("enters at", cause.place, True))
        if cause.suspect.code:
            steps.insert(1, ("code", cause.suspect.code, True))
    if script_folder:
        steps.append(
            ("compare the tensors again", f"python qgate-out/repro/{script_folder}/run.py", True)
        )
    if command or why:
        label = "if intended" if command else "what to do"
        steps.append((label, command or why, bool(command)))
    return {
        "number": gate.number,
        "anchor": gate.anchor,
        "verdict": verdict,
        "is_new": verdict == NEW,
        "open": is_open,
        "line": line,
        "figures": figures,
        "cause": _cause_words(gate, line, cause),
        "about": f"{record['suite']} · {record['model']} · {record['mode']} · {record['layer']}: "
        f"{gate.failures:,} of {gate.comparisons:,} comparisons failed, "
        f"{float(record['seconds'] or 0):.3g} s",
        "rows": [_site_row(checks) for record in failed[:rows] if (checks := best_first(record))],
        "more": f"{unread:,} more places in results.csv." if unread > 0 else "",
        "next": steps,
    }


def _cause_words(gate: RecordedGate, line: str, cause: FailureCause | None) -> str:
    """Write what a gate follows from, or where the same fault is that it has."""
    if cause is None or cause.suspect.node == gate.node:
        return ""
    is_same = is_one_fault(line.partition(") ")[2], cause.suspect.fault)
    return f"{'the same as at' if is_same else 'follows from'} {cause.place}"


def _site_row(checks: Sequence[Check]) -> tuple[Any, ...]:
    """Return the cells of a place: its best evidence, and what else failed there in few words.

    The kind of limit explains a check where it has no reason.
    """
    check, *further_checks = checks
    view = view_texts(vars(check))
    allowed = check.allowed or 0
    limit_text = check.limit.page_words.format(
        allowed=allowed, percent=100 * allowed, quantizer=check.quantizer
    )
    where = f" ({check.source})" if check.source and check.source != "default" else ""
    reason = check.reason or limit_text + where
    if check.accepted_on:
        reason += f"; accepted on {check.accepted_on}"
    also = [f"{other.metric} {view_texts(vars(other)).how_far}" for other in further_checks]
    step = f"h{margin_step(view.times)}" if check.limit.has_number else ""
    return (
        one_line(check.site) or "–",
        (check.scope, check.metric or "–"),
        (view.now, view.limit, view.against, view.change),
        (view.how_far, step),
        reason,
        listed(also, _MOST_ALSO),
    )


# All of them --------------------------------------------------------------------------------------


def gate_table(run: Run) -> dict[str, object]:
    """Return the heads, widths and filters of the table, and rows of tests without a verdict."""
    columns = {n: width for n, width in _COLUMNS.items() if n != "model" or _has_models(run)}
    parts = [part for gate in run.gates for part in _short(gate.record["layer"]).split(".")]
    columns["layer"] = max(columns["layer"], min(_MOST_REM, max(map(len, parts), default=0) * 0.75))
    total = sum(columns.values())
    ran = {gate.node for gate in run.gates}
    broken = [node for node in run.broken if node not in ran]
    return {
        "head": list(columns),
        "words": _WORDS - ("model" not in columns),
        "widths": [f"{100 * width / total:.1f}" for width in columns.values()],
        "narrow": _NARROW,
        "filters": _filters(run, list(columns), bool(broken)),
        "broken": [(node, *_suite_and_name(node)) for node in broken],
        "count": len(run.gates) + len(broken),
    }


def gate_rows(run: Run, detailed: Collection[int]) -> Iterator[tuple[Any, ...]]:
    """Yield small rows, ten thousand of which open; `detailed` gates have a block."""
    several = _has_models(run)
    return (_row(gate, run, several, detailed) for gate in run.gates)


def _has_models(run: Run) -> bool:
    return len({one_line(gate.record["model"]) for gate in run.gates}) > 1


def _filters(
    run: Run, columns: Sequence[str], broken: bool
) -> Iterator[tuple[str, int, Sequence[str]]]:
    verdicts = {verdict_of(gate, run) for gate in run.gates} | ({UNKNOWN} if broken else set())
    yield "verdict", columns.index("verdict"), [word for word in VERDICTS if word in verdicts]
    for name in ("mode", "layer", "suite", "model"):
        values = {_short(gate.record[name]) for gate in run.gates}
        if name in ("mode", "layer") or len(values) > 1:
            yield name, columns.index(name), sorted(values, key=natural)


@lru_cache(maxsize=1 << 12)
def _short(name: object) -> str:
    """Shorten a name; most stand in many rows."""
    return shortened(name, _LONGEST)


def _row(gate: RecordedGate, run: Run, several: bool, detailed: Collection[int]) -> tuple[Any, ...]:
    """Return plain values in the order of the template: lookups by name take longer."""
    record, check = gate.record, binding_of(gate)
    verdict = verdict_of(gate, run)
    names = ("suite", "model", "mode", "layer") if several else ("suite", "mode", "layer")
    view = view_texts(check)
    margin = "–" if view.far in (NOTHING, view.kind) or not view.kind else view.far
    return (
        gate.anchor,
        _CLASSES[verdict],
        gate.node,
        _searched(gate),
        verdict,
        gate.number if gate.number in detailed else None,
        [_short(record[name]) for name in names],
        _short(record["site"]),
        _short(record["scope"]),
        _short((check and check["metric"]) or "–"),
        (view.now if check is not None else "–", view.limit),
        # Cells that sort by a number that they do not show.
        ((view.change, f"{view.moved:.6g}", ""), (margin, f"{view.times:.6g}", _color(gate))),
        f"{float(record['seconds'] or 0):.2g}",
    )


def _color(gate: RecordedGate) -> str:
    """Return the class that colors a margin; none for a gate without a limit yet."""
    return "" if gate.is_new or gate.check is None else f"h{margin_step(gate.margin)}"


def _searched(gate: RecordedGate) -> str:
    """Return further words by which the filter finds a row: the other failures of the gate.

    A row names one comparison, and a search for another failed one has to find its gate.
    """
    own = {_short(gate.record["site"]), _short(gate.record["scope"])}
    own.add(_short((gate.check and gate.check["metric"]) or ""))
    sites = dict.fromkeys(_short(record["site"]) for record in gate.failed)
    words: dict[str, None] = {}
    for record in gate.failed:
        words[_short(record["scope"])] = None
        words.update((_short(c["metric"]), None) for c in record["checks"] if not c["passed"])
    names = [name for name in sites if name not in own]
    failed_words = [word for word in words if word and word not in own]
    if not (names or failed_words):
        return ""
    # What all names begin with is there once: thousands of gates may fail in forty places each.
    start = os.path.commonprefix(names)  # noqa: RUF071, names are no paths
    return "|".join([start, *(name.removeprefix(start) for name in names), *failed_words])


def _suite_and_name(node: str) -> tuple[str, str]:
    file, _, name = node.partition("::")
    return file.rpartition("/")[2].removesuffix(".py").removeprefix("test_"), name


# Those that passed --------------------------------------------------------------------------------


def passing_gates(run: Run, panels: Panels) -> list[Mapping[str, Any]]:
    """Draw small plots of the passing gates nearest to their limits, or of all passing gates."""
    most = {"worst": _NEAREST, "all": len(run.gates)}.get(panels.plots, 0)
    passed = [gate for gate in run.gates if gate.passed and gate.record.get("pictures")]
    return [
        {
            "anchor": gate.anchor,
            "site": gate.record["site"],
            "about": f"{gate.record['mode']}, {nearness_text(gate)}",
            "panels": plots,
        }
        for gate in passed[:most]
        if (plots := panels.of_gate(gate, _SMALL))
    ]
