"""Gates on a page: texts and next commands, blocks of those that failed, the table, the map."""

from __future__ import annotations

import dataclasses
import math
import os.path
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

from qgate.charts.pages import margin_legend, margin_step, render
from qgate.gate.checks import Check
from qgate.gate.texts import finding, hint
from qgate.page.plots.errors import error_growth
from qgate.page.plots.panels import Panel, panels_of
from qgate.page.runs import EVERYWHERE, Growth, LayerError, RecordedGate, Run
from qgate.project.gate_kinds import gate_kinds
from qgate.results.checks import NOTHING, CheckView, severity, view_of
from qgate.results.failure_causes import FailureCause, cause_of, is_one_fault, suspect_of
from qgate.results.pictures import Plots
from qgate.results.schema import Record
from qgate.results.summary import verdict_texts
from qgate.text import counted, listed, one_line, shortened

FAILED, NEW, UNKNOWN, PASSED, IMPROVED = "failed", "new", "no verdict", "passed", "improved"
VERDICTS = (FAILED, NEW, UNKNOWN, PASSED, IMPROVED)
_FIELDS = frozenset(field.name for field in dataclasses.fields(Check))
# Options that say what a run is about; a gate is run again with those it was run with.
_ABOUT = (
    "mode", "model", "format", "layers", "reference", "baselines", "device",
    "samples", "seqlen", "calib-samples", "calib-seqlen", "percentile-alpha", "calibration",
)  # fmt: skip


def verdict_of(gate: RecordedGate, run: Run) -> str:
    """Return the verdict of a gate; one that passed and then broke has none."""
    if not gate.passed:
        return NEW if gate.is_new else FAILED
    if gate.node in run.broken:
        return UNKNOWN
    return IMPROVED if gate.improved else PASSED


def _check_fields(record: Record, index: int) -> Mapping[str, Any]:
    """Return the fields of a stored check, with the numbers that JSON cannot hold."""
    fields = dict(record["checks"][index])
    lost = record.get("reason") or {}
    for name in ("value", "bound", "against", "times"):
        if fields.get(name) is None and (word := lost.get(f"/checks/{index}/{name}")):
            fields[name] = float(word)
    return fields


def _check_of(record: Record, index: int) -> Check:
    fields = _check_fields(record, index)
    base = {"site": record["site"], "layer": record["layer"], "scope": record["scope"], "order": 0}
    return Check(**{**base, **{name: value for name, value in fields.items() if name in _FIELDS}})


def failed_checks(record: Record) -> list[Check]:
    """Return the failed checks of a record, worst first."""
    indices = [i for i, check in enumerate(record["checks"]) if not check["passed"]]
    indices.sort(key=lambda i: severity(record["checks"][i]), reverse=True)
    return [_check_of(record, index) for index in indices]


def binding_of(gate: RecordedGate) -> Mapping[str, Any] | None:
    """Return the fields of the check that decided a gate or came nearest to its limit."""
    if gate.check is None:
        return None
    return _check_fields(gate.record, gate.record["checks"].index(gate.check))


def gate_line(gate: RecordedGate) -> str:
    """Return `layers.0:output (mode 2-1) is worse than accepted: relative_mse 9.2e-04 > …`."""
    where = f"at {_place(gate.record)}"
    check = binding_of(gate)
    if check is None:
        return f"nothing compared {where}: a gate that compared nothing does not pass"
    if check["passed"]:
        return f"{check['metric']} {view_of(check).now} {where}: {nearness_text(gate)}"
    beyond = gate.failures - 1
    more = f" (+{counted(beyond, 'more failed check')})" if beyond else ""
    site_text, figures = fault_texts(gate.record)
    return f"{site_text}: {figures}{more}"


def fault_texts(record: Record) -> tuple[str, str]:
    """Return `layers.0:output (mode 2-1) is worse than accepted`, and the figures.

    Files of earlier versions have the words of none of their records.
    """
    checks = best_first(record)
    words = record.get("finding") or (finding(checks[0]) if checks else {})
    fault = words.get("fault", "is out of its limit")
    return f"{_place(record)} {fault}", str(words.get("figures", ""))


def _place(record: Record) -> str:
    by_format = {suite for kind in gate_kinds() for suite in kind.by_format}
    label = "format" if record["suite"] in by_format else "mode"
    return f"{record['site']} ({label} {record['mode']})"


def evidence(gate: RecordedGate) -> list[Record]:
    """Sort the failed comparisons of a gate: the place where the error is made comes first."""
    suspects = [(suspect_of(record), index) for index, record in enumerate(gate.failed)]
    suspects.sort(key=lambda pair: (pair[0] is None, pair[0] and pair[0][:2], pair[1]))
    return [gate.failed[index] for _, index in suspects]


def best_first(record: Record) -> list[Check]:
    """Sort the failed checks of a record: limits that need no accepted value first, then worst."""
    return sorted(failed_checks(record), key=lambda check: check.limit.needs_accepted)


def nearness_text(gate: RecordedGate) -> str:
    """Return `0.98x its limit (budget)`."""
    return view_of(gate.check).distance


def headline(run: Run) -> str:
    """Return the first line of a run: what broke, and how much of it."""
    first, details = headline_parts(run)
    return f"{first}: {details}" if details else first


def headline_parts(run: Run) -> tuple[str, str]:
    """Return `2 of 111 gates failed, 1 fault in int8`, and place and fault."""
    first, also = verdict_texts(run.tally, run.header, run.errors)
    return first, "; ".join(filter(None, [_first_problem(run), *also]))


def headline_figures(run: Run) -> str:
    """Return the figures of a single fault, which stand below a headline that has its place."""
    has_failed = any(not gate.is_new for gate in run.failed)
    return run.causes[0].figures() if has_failed and len(run.causes) == 1 else ""


def _first_problem(run: Run) -> str:
    """Name the fault of a run, or the first two of several, or else what went wrong first."""
    failed = sorted(run.failed, key=lambda gate: gate.is_new)
    if failed and not failed[0].is_new:
        titles = [cause.title() for cause in run.causes[:2]] or [gate_line(failed[0])]
        more = [f"and {len(run.causes) - 2} more"] * (len(run.causes) > 2)
        return "; ".join([*titles, *more])
    if failed:
        return gate_line(failed[0])
    if run.broken:
        node, why = next(iter(run.broken.items()))
        return f"{first_line(why)} ({node})"
    if run.errors:
        return run.errors[0]
    if run.other["failed"]:
        node, why = next(iter(run.other["failures"].items()), ("", ""))
        return f"{node}: {why}".strip(": ")
    changed = updated_text(run.header.get("update"))
    return f"baselines: {changed}" if changed else ""


def updated_text(update: Mapping[str, Any] | None) -> str:
    """Return `37 entries written (failed)`, empty without an update."""
    if not update:
        return ""
    count = update.get("entries", 0)
    entries = f"{count:,} {'entry' if count == 1 else 'entries'}"
    did = "would change" if update.get("dry_run") else "written"
    return f"{f'{entries} {did}' if update.get('done') else 'nothing written'} ({update['which']})"


def first_line(why: object) -> str:
    return (str(why).strip().splitlines() or [""])[0]


def view_texts(check: Mapping[str, Any] | None) -> CheckView:
    """Return the texts of a check with the signs of a page."""
    view = view_of(check)
    return view._replace(
        now=_typeset(view.now), limit=_typeset(view.limit), against=_typeset(view.against),
        change=_typeset(view.change), far=_times_sign(view.far),
    )  # fmt: skip


def _typeset(text: str) -> str:
    if text in (NOTHING, ""):
        return "–"
    return _times_sign(text).replace("<=", "≤").replace(">=", "≥")


def _times_sign(text: str) -> str:
    return f"{text[:-1]}×" if text.endswith("x") and text[-2:-1].isdigit() else text


# What to type next --------------------------------------------------------------------------------


def rerun_command(run: Run, gate: RecordedGate) -> str:
    """Return the command that runs one gate again.

    A file of an earlier version has none: then options are taken from the command of the run.
    """
    if commands := gate.record.get("commands"):
        return str(commands["again"])
    return shlex.join(["pytest", gate.node, *_options(run.header.get("command") or ())])


def accept_command(run: Run, gate: RecordedGate) -> tuple[str, str]:
    """Return the command that accepts the values of a gate, or the reason that none does."""
    failed = [check for record in gate.failed for check in failed_checks(record)]
    cause = cause_of(run.causes, gate.node)
    if cause is not None and gate.node != cause.suspect.node and not cause.is_acceptable:
        return "", f"mend {cause.place} first: this gate follows from it"
    if why := hint(tuple(failed)):
        return "", why
    if not any(check.limit.is_acceptable for check in failed):
        return "", ""
    if commands := gate.record.get("commands"):
        return str(commands["accept"]), ""
    options = _options(run.header.get("command") or ())
    prefix = "qgate-" if any(option.startswith("--qgate-") for option in options) else ""
    return f"{rerun_command(run, gate)} --{prefix}update-baselines", ""


def _options(command: Iterable[object]) -> list[str]:
    subjects = {name: option for kind in gate_kinds() for name, option in kind.settings.items()
                if option.about == "subject"}  # fmt: skip
    options: list[str] = []
    awaited = 0
    for word in map(str, command):
        name, equals, _ = word.partition("=")
        option = name[2:].removeprefix("qgate-")
        if awaited:
            options.append(word)
            awaited -= 1
        elif word.startswith("--") and option in (*_ABOUT, *subjects):
            options.append(word)
            awaited = 0 if equals else subjects[option].length or 1 if option in subjects else 1
    return options


# Plots --------------------------------------------------------------------------------------------

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


# The map of modes and layers ----------------------------------------------------------------------


Link = Callable[[RecordedGate], str]


def heat_view(run: Run, link: Link | None = None) -> dict[str, object] | None:
    """Return one map per model, colored by margins; `link` returns the address of a gate.

    On the page of the run itself, where there is no `link`, a mode leads to its rows.
    """
    if not run.layer_errors:
        return None
    address = link or (lambda gate: f"#{gate.anchor}")
    maps = []
    for model in dict.fromkeys(error.model for error in run.layer_errors):
        errors = [error for error in run.layer_errors if error.model == model]
        growth = [line for line in run.growth if line.model == model]
        layers = _layers_in_order({error.layer for error in errors}, growth)
        at = {(error.mode, error.layer): _map_cell(error, address) for error in errors}
        modes = sorted({error.mode for error in errors}, key=natural)
        rows = [
            (
                mode,
                "" if link else f"#show&{urlencode({'mode': one_line(mode)})}",
                [at.get((mode, layer)) for layer in layers],
            )
            for mode in modes
        ]
        # A number says enough of `layers.12`.
        numbers = [re.fullmatch(r"layers\.(\d+)", layer) for layer in layers]
        heads = [
            (layer, number[1] if number else shortened(layer, 22))
            for layer, number in zip(layers, numbers, strict=True)
        ]
        maps.append({"model": model, "heads": heads, "rows": rows})
    return {"legend": margin_legend(), "maps": maps}


def _map_cell(cell: LayerError, link: Link) -> dict[str, str]:
    state = "" if not cell.failed else "open" if cell.gate.is_new else "bad"
    error = ""
    step = "" if cell.gate.is_new else f"h{margin_step(cell.gate.margin)}"
    text = "" if state else "✓"
    if cell.error is not None:
        error = f"{cell.scope} relative MSE {cell.error:.1e}"
        text = "∞" if cell.error == 0 else f"{round(-10 * math.log10(cell.error))}"
    gates = f"{cell.failed} of {cell.gates} failed" if cell.failed else f"{cell.gates} passed"
    return {
        "kinds": f"{step} {state}".strip(),
        "link": link(cell.gate),
        "title": f"{error or 'no error'}; {nearness_text(cell.gate)}; {gates}",
        "text": text.replace("-", "−"),
        "heard": {"": "", "bad": "failed", "open": "new"}[state],
    }


def _layers_in_order(layers: set[str], growth: Sequence[Growth]) -> list[str]:
    """Sort layers as they were executed where that is known, then by number and name."""
    executed = max((line.layers for line in growth), key=len, default=())
    positions = {layer: number for number, layer in reversed([*enumerate(executed)])}
    end = len(executed)
    last = (EVERYWHERE, "")
    return sorted(
        layers, key=lambda layer: (layer in last, positions.get(layer, end), natural(layer))
    )


def natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return a sort key: `layers.10` after `layers.9`, names without a number last."""
    parts = re.split(r"(\d{1,18})", name)
    keys = [(int(p), "") if p.isascii() and p.isdigit() else (-1, p) for p in parts]
    return len(parts) == 1, keys
