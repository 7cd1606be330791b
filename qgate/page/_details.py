"""What is told of a single gate that failed: where, how much, what it looks like, what to type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qgate.charts.page_parts import scroll, section, wrapping
from qgate.gate.checks import Check
from qgate.page._panels import Panels
from qgate.page._words import (
    NEW,
    UNKNOWN,
    accepting,
    again,
    failed_checks,
    first_of,
    gate_line,
    near,
    plain_cells,
    times_cell,
    verdict_of,
)
from qgate.page.runs import RecordedGate, Run
from qgate.text import for_html as text
from qgate.text import shortened

# The text of details, plots apart: with thousands of failing gates the table has to do.
BUDGET = 2_000_000
_ROWS, _FEW_ROWS, _OPEN, _BROKEN, _WORST = 40, 5, 3, 50, 6
_HEAD = ("site", "scope", "metric", "value", "limit", "accepted / ideal", "change", "how far",
         "reason")  # fmt: skip
STYLE = """
details.gate { position: relative; border: 1px solid var(--line);
  border-left: 4px solid var(--fail); border-radius: 6px; margin: 10px 0; padding: 0 12px;
  background: var(--card); }
details.gate.new { border-left-color: var(--warn); }
details.gate > summary { cursor: pointer; padding: 9px 0; overflow-wrap: anywhere; }
details.gate > summary::marker { color: var(--dim); }
details.gate[open] { padding-bottom: 12px; } details.gate p { margin: 0 0 8px; }
button.unfold { font: inherit; font-size: .9rem; color: var(--ink); background: var(--card);
  border: 1px solid var(--dim); border-radius: 6px; padding: 4px 10px; cursor: pointer; }
table.checks { font-size: .85rem; background: var(--paper); }
table.checks :is(td, th) { min-width: 4.5rem; text-align: left; overflow-wrap: break-word; }
table.checks thead th { overflow-wrap: normal; position: static; }
table.checks thead th:nth-child(n+4):nth-child(-n+7) { text-align: right; }
table.checks tbody th { min-width: 13rem; } table.checks td:nth-child(3) { min-width: 7rem; }
table.checks td:nth-child(n+4):nth-child(-n+7) { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
table.checks td:last-child { min-width: 12rem; }
dl.next { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; margin: 10px 0 0; }
dl.next dt { color: var(--dim); } dl.next dd { margin: 0; min-width: 0; }
code { font: .85rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
dl.next code { user-select: all; background: var(--paper); border: 1px solid var(--line);
  border-radius: 4px; padding: 2px 6px; display: inline-block; max-width: 100%; }
ul.broken { list-style: none; padding: 0; } ul.broken li { border-left: 4px solid var(--warn);
  background: var(--card); padding: 6px 10px; margin: 4px 0; }
ul.broken summary { cursor: pointer; }
ul.near { list-style: none; padding: 0; }
ul.near li { content-visibility: auto; contain-intrinsic-size: auto 270px; }
@media (max-width: 500px) { dl.next { grid-template-columns: 1fr; } }
@media print { button.unfold { display: none; } details.gate { background: none; }
  ul.near li { content-visibility: visible; }
  table.checks :is(td, th), table.checks tbody th, table.checks td:last-child { min-width: 0;
    padding: 2px 4px; }
  table.checks { font-size: 7.5pt; } table.checks td:nth-child(n) { white-space: normal; } }
"""


def failing(run: Run, panels: Panels) -> str:
    """A block per failing gate, worst first, those that are only new after the others."""
    gates = sorted(run.failed, key=lambda gate: gate.is_new)
    if not gates:
        return ""
    rows = _ROWS if len(gates) <= 50 else _FEW_ROWS
    blocks, size = [], 0
    for place, gate in enumerate(gates):
        block = _block(run, gate, panels, rows, is_open=place < _OPEN)
        plain = _size_without_plots(block)
        if size + plain > BUDGET:
            break
        size += plain
        blocks.append(block)
    more = len(gates) - len(blocks)
    if more:
        blocks.append(
            f"<p class='about'>{more:,} more failing gates are in the table of all gates, without "
            "details: run some of them alone.</p>"
        )
    if len(blocks) - bool(more) > _OPEN:
        # Needs a script, which also shows it.
        button = "<p><button type='button' class='unfold' hidden>Open all</button></p>"
        blocks.insert(0, button)
    return section("failing", "Failing gates", "\n".join(blocks))


def _size_without_plots(block: str) -> int:
    """Plots have a budget of their own."""
    start, end = block.find("<div class='panels'>"), block.rfind("</svg>")
    return len(block.encode()) if start < 0 else len((block[:start] + block[end:]).encode())


def _block(run: Run, gate: RecordedGate, panels: Panels, rows: int, *, is_open: bool) -> str:
    verdict = verdict_of(gate, run)
    record = gate.record
    tone = "warn" if verdict == NEW else "fail"
    about = (
        f"{record['suite']} · {record['model']} · {record['mode']} · {record['layer']}: "
        f"{gate.failures:,} of {gate.comparisons:,} comparisons failed, "
        f"{float(record['seconds'] or 0):.3g} s"
    )
    return (
        f"<details class='gate{' new' if verdict == NEW else ''}' id='details-{gate.number}'"
        f"{' open' if is_open else ''}>\n<summary><b class='{tone}'>{verdict}</b> "
        f"{text(gate_line(gate))}</summary>\n<p class='about'>{text(about)} "
        f"(<a href='#{gate.anchor}'>in the table</a>)</p>\n{_table(gate, rows)}\n"
        f"{panels.of_gate(gate)}\n{_next(run, gate)}\n</details>"
    )


def _table(gate: RecordedGate, rows: int) -> str:
    checks = [check for record in gate.failed for check in failed_checks(record)]
    lines = "\n".join(_cells(check) for check in checks[:rows])
    heads = "".join(f"<th scope='col'>{name}</th>" for name in _HEAD)
    beyond = len(checks) - rows
    unread = gate.failures - len(gate.failed)
    more = f"<p class='about'>{beyond:,} more rows in results.csv.</p>" if beyond > 0 else ""
    if unread > 0:
        more = f"<p class='about'>{unread:,} more places in results.csv.</p>"
    table = (
        f"<table class='checks'>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n"
        "</table>"
    )
    return f"{scroll(table, f'failed comparisons of gate {gate.number}')}\n{more}"


def _cells(check: Check) -> str:
    site, scope, metric, against, now, moved, limit, kind = plain_cells(check)
    far = times_cell(check)[0]
    how = f"{far} ({kind})" if far != "–" else kind
    shown = (scope, metric, now, limit, against, moved, how, check.reason or _why(check))
    return f"<tr><th scope='row'>{wrapping(site)}</th>" + "".join(
        f"<td>{wrapping(each, '_@') if place < 2 else text(each)}</td>"
        for place, each in enumerate(shown)
    )


def _why(check: Check) -> str:
    """What the kind of limit means, where the check gives no reason of its own."""
    words = {
        "budget": f"more than {check.allowed or 0:g} dB over an ideal {check.quantizer} quantizer",
        "regression": f"at most {100 * (check.allowed or 0):g} % from what was accepted",
        "absolute": "an absolute limit",
        "missing": "no error was accepted yet",
    }
    where = f" ({check.source})" if check.source and check.source != "default" else ""
    return words.get(check.kind, "") + where


def _next(run: Run, gate: RecordedGate) -> str:
    command, why = accepting(run, gate)
    rows = [("test", gate.node, True), ("run it again", again(run, gate), True)]
    if command:
        rows.append(("if intended", command, True))
    elif why:
        rows.append(("what to do", why, False))
    items = "".join(
        f"<dt>{name}</dt><dd>{f'<code>{text(said)}</code>' if code else text(said)}</dd>"
        for name, said, code in rows
    )
    return f"<dl class='next'>{items}</dl>"


# Without a verdict --------------------------------------------------------------------------------


def unknown(run: Run) -> str:
    """Errors and broken set-ups: they have no verdict, and are told before all that has one."""
    rows = [f"<li><b class='fail'>error</b> {text(error)}</li>" for error in run.errors[:_BROKEN]]
    causes: dict[str, list[str]] = {}
    for node, why in run.broken.items():
        causes.setdefault(_first(why), []).append(node)
    rows += [_cause(why, nodes) for why, nodes in list(causes.items())[:_BROKEN]]
    if not rows:
        return ""
    more = len(run.errors) + len(causes) - len(rows)
    rest = f"<p class='about'>{more:,} more, see the table of all gates.</p>" if more > 0 else ""
    html = f"<ul class='broken'>\n{chr(10).join(rows)}\n</ul>{rest}"
    return section("unknown", "Errors: no verdict", html)


def _cause(why: str, nodes: Sequence[str]) -> str:
    """One cause fails many tests: it is said once, and the tests are there to be opened."""
    if len(nodes) == 1:
        return (
            f"<li><b class='warn'>{UNKNOWN}</b> <code>{text(nodes[0])}</code><br>{text(why)}</li>"
        )
    names = "<br>".join(f"<code>{text(node)}</code>" for node in nodes)
    said = f"<b class='warn'>{UNKNOWN} for {len(nodes):,} tests</b><br>{text(why)}"
    return f"<li><details class='cases'><summary>{said}</summary>\n{names}</details></li>"


def _first(why: str) -> str:
    return shortened(first_of(why), 600)


# Those that passed --------------------------------------------------------------------------------


def passing(run: Run, panels: Panels) -> str:
    """Small plots of the passing gates that are nearest to their limits, or of all of them."""
    kept = []
    for gate in _wanted(run, panels.plots):
        html = panels.of_gate(gate, small=True)
        if "<svg" not in html:
            continue
        kept.append(
            f"<li><h3><a href='#{gate.anchor}'>{text(shortened(gate.record['site'], 90))}</a> "
            f"<span class='about'>{text(gate.record['mode'])}, {text(near(gate))}</span></h3>"
            f"{html}</li>"
        )
    if not kept:
        return ""
    few = (
        "Those nearest to their limits." if panels.plots == "worst" else "As far as the page goes."
    )
    body = f"<p class='about'>{few}</p>\n<ul class='near'>{chr(10).join(kept)}</ul>"
    return section("passing", "Passing gates", body)


def _wanted(run: Run, plots: str) -> Iterator[RecordedGate]:
    if plots not in ("worst", "all"):
        return
    passed: Sequence[RecordedGate] = [g for g in run.gates if g.passed and g.record.get("pictures")]
    yield from passed if plots == "all" else passed[:_WORST]
