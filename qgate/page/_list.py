"""The table of all gates: small rows, since ten thousand of them have to open."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from os.path import commonprefix

from qgate.charts.page_parts import empty, head_cells, scroll, section, wrapping
from qgate.page._heat import natural
from qgate.page._words import (
    FAILED,
    IMPROVED,
    NEW,
    PASSED,
    UNKNOWN,
    VERDICTS,
    binding_of,
    factor,
    plain_cells,
    times_cell,
    verdict_of,
)
from qgate.page.runs import RecordedGate, Run
from qgate.text import for_html as text
from qgate.text import one_line, shortened

_LONGEST = 80
# Larger tables are laid out when one comes to them.
_FEW = 100
_CLASS = {FAILED: "f", NEW: "n", UNKNOWN: "u", PASSED: "p", IMPROVED: "p"}
# Name of a column and its width in rem.
_COLUMNS = (
    ("verdict", 5.8), ("suite", 8.2), ("model", 7.6), ("mode", 6.8), ("layer", 5.2), ("site", 14.4),
    ("scope", 6), ("metric", 8.8), ("value", 5), ("limit", 5.8), ("change", 4.8),
    ("margin", 4.6), ("seconds", 5.4),
)  # fmt: skip
_WORDS = 8
STYLE = """
.scroll.all { max-height: min(85vh, 70rem); content-visibility: auto;
  contain-intrinsic-size: auto min(85vh, 70rem); }
.scroll.few { contain-intrinsic-size: none; content-visibility: visible; }
table.gates { table-layout: fixed; min-width: 75rem; font-size: .85rem; }
table.gates :is(td, th) { min-width: 0; padding: 3px 7px; line-height: 1.35; }
table.gates tbody th { text-align: left; }
table.gates td:nth-last-child(-n+5) { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
table.gates tr > :first-child { position: sticky; left: 0; background: var(--paper); }
table.gates thead tr > :first-child { z-index: 2; background: var(--card); }
table.gates .f td:first-child { color: var(--fail); font-weight: 600; }
table.gates :is(.n, .u) td:first-child { color: var(--warn); font-weight: 600; }
table.gates .p td:first-child { color: var(--good); }
table.gates td:first-child a { color: inherit; }
table.gates tr:target > * { background: var(--mark); }
table.gates tr:focus { outline: 2px solid var(--link); outline-offset: -2px; }
@media print { .scroll.all { content-visibility: visible; }
  table.gates { min-width: 0; font-size: 6.5pt; }
  table.gates :is(td, th) { padding: 1px 3px; } table.gates tr > :first-child { position: static; }
  table.gates thead button::after { content: none; } }
"""


def gate_table(run: Run, detailed: Collection[int]) -> str:
    """Filters and rows; `detailed` are the numbers of gates that have a block of details."""
    models = list(dict.fromkeys(one_line(gate.record["model"]) for gate in run.gates))
    left_out = () if len(models) > 1 else ("model",)
    columns = [each for each in _COLUMNS if each[0] not in left_out]
    ran = {gate.node for gate in run.gates}
    broken = [node for node in run.broken if node not in ran]
    if not (run.gates or broken):
        return section("gates", "All gates", empty("No gate ran: there is nothing to show."))
    several = len(models) > 1
    rows = [_broken_row(node, several) for node in broken]
    rows += [_row(gate, run, several, gate.number in detailed) for gate in run.gates]
    names = [name for name, _ in columns]
    total = sum(width for _, width in columns)
    cols = "".join(f"<col style='width:{100 * width / total:.1f}%'>" for _, width in columns)
    words = _WORDS - len(left_out)
    table = (
        "<table class='sortable gates' id='all-gates'><caption class='unseen'>All gates, worst "
        f"first</caption>\n<colgroup>{cols}</colgroup>\n"
        f"<thead><tr>{head_cells(names, words)}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n"
        "</table>"
    )
    kind = "scroll all few" if len(rows) < _FEW else "scroll all"
    box = scroll(table, "all gates").replace("class='scroll'", f"class='{kind}'", 1)
    about = (
        "<p class='about'>One row per test: the comparison that decided it or came nearest to its "
        "limit. Change is against the accepted value or the ideal quantizer; margin is how many "
        "times the limit the value is.</p>"
    )
    return section("gates", "All gates", f"{about}\n{_filters(run, names, broken)}\n{box}")


def _filters(run: Run, names: Sequence[str], broken: Sequence[str]) -> str:
    found: dict[str, set[str]] = {name: set() for name in ("mode", "layer", "model", "suite")}
    for gate in run.gates:
        for name, values in found.items():
            values.add(_short(gate.record[name]))
    verdicts = {verdict_of(gate, run) for gate in run.gates} | ({UNKNOWN} if broken else set())
    choices = [
        ("verdict", [word for word in VERDICTS if word in verdicts]),
        *((name, sorted(found[name], key=natural)) for name in ("mode", "layer")),
        *((n, sorted(found[n], key=natural)) for n in ("suite", "model") if len(found[n]) > 1),
    ]
    selects = "\n".join(
        f"<label>{name} <select name='{name}' data-column='{names.index(name)}'>"
        f"<option value=''>all</option>{''.join(_option(value) for value in values)}"
        "</select></label>"
        for name, values in choices
        if name in names
    )
    return (
        "<form class='filters' data-table='all-gates' hidden>\n<label>text "
        "<input type='search' name='text' size='18' autocomplete='off'></label>\n"
        f"{selects}\n<button type='reset'>Show all, worst first</button>\n"
        "<output aria-live='polite'></output>\n</form>"
    )


def _option(value: str) -> str:
    return f"<option value='{text(value)}'>{text(value)}</option>"


def _short(name: object) -> str:
    return shortened(name, _LONGEST)


def _row(gate: RecordedGate, run: Run, several: bool, detailed: bool) -> str:
    record, check = gate.record, binding_of(gate)
    verdict = verdict_of(gate, run)
    word = f"<a href='#details-{gate.number}'>{verdict}</a>" if detailed else verdict
    model = [record["model"]] if several else []
    names = [record["suite"], *model, record["mode"], record["layer"]]
    shown, times = times_cell(check)
    now, moved, limit, change = "–", "–", "–", math.nan
    metric = wrapping(_short((check and check.metric) or "–"), "_@")
    if check is not None:
        _, _, _, _, now, moved, limit, _ = plain_cells(check)
        change = factor(check)
    return (
        f"<tr id={gate.anchor} class={_CLASS[verdict]} title='{text(gate.node)}'"
        f"{_searched(gate)}><td>{word}"
        + "".join(f"<td>{wrapping(_short(name), '._')}" for name in names)
        + f"<th scope=row>{wrapping(_short(record['site']))}<td>{text(_short(record['scope']))}"
        f"<td>{metric}<td>{text(now)}<td>{text(limit)}"
        f"{_keyed(moved, change)}{_keyed(shown, times)}<td>{float(record['seconds'] or 0):.2g}\n"
    )


def _searched(gate: RecordedGate) -> str:
    """What the filter finds a row by besides its cells: where else it failed, and in what.

    A row names one comparison, and who looks for another that failed has to find its gate.
    """
    sites = {_short(record["site"]): None for record in gate.failed}
    words: dict[str, None] = {}
    for record in gate.failed:
        words[_short(record["scope"])] = None
        words.update((_short(c["metric"]), None) for c in record["checks"] if not c["passed"])
    own = {_short(gate.record["site"]), _short(gate.record["scope"])}
    own.add(_short((gate.check and gate.check["metric"]) or ""))
    names = [each for each in sites if each not in own]
    others = [each for each in words if each and each not in own]
    if not (names or others):
        return ""
    # What all names begin with is there once: thousands of gates may fail in forty places each.
    start = commonprefix(names)  # noqa: RUF071, names are no paths
    told = "|".join([start, *(name.removeprefix(start) for name in names), *others])
    return f" data-search='{text(told)}'"


def _keyed(shown: str, key: float) -> str:
    """A cell that sorts by a number that it does not show."""
    return f"<td data-key={key:.6g}>{text(shown)}"


def _broken_row(node: str, several: bool) -> str:
    suite = node.partition("::")[0].rpartition("/")[2].removesuffix(".py").removeprefix("test_")
    blank = "<td>–"
    name = wrapping(_short(node.partition("::")[2]), "._")
    return (
        f"<tr class=u title='{text(node)}'><td>{UNKNOWN}<td>{wrapping(_short(suite), '_')}"
        f"{blank * (3 if several else 2)}<th scope=row>{name}"
        f"{blank * 5}<td data-key=inf>–{blank}\n"
    )
