"""A comparison of two runs as text: on a terminal, and as Markdown for pull requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qgate.page.comparisons import Group, Row, RunComparison
from qgate.page.terminal import (
    NARROWEST,
    TerminalLine,
    cut_middle,
    fit_table,
    site_text,
    table,
    wrapped_lines,
)
from qgate.results.checks import is_number
from qgate.results.ci import MarkdownPage, markdown_head, markdown_row
from qgate.results.movements import EQUAL
from qgate.text import change_figure, counted, figures_apart, for_markdown, one_line

TITLES: dict[Group, str] = {
    "broke": "Broke: passed before, fails now",
    "fixed": "Fixed: failed before, passes now",
    "worse": "Worse",
    "better": "Better",
    "new": "New: not in the first run",
    "gone": "Gone: in the first run only",
}
_ROWS = 10
_MARKDOWN_ROWS, _MOST_BYTES = 15, 18_000
_LEAST_SITE = 24


def counts_text(comparison: RunComparison) -> str:
    """Return `1 broke, 0 fixed, 2 worse, 0 better, 0 new, 0 gone, 9 equal (within 2 %)`."""
    counts = comparison.counts
    parts = [f"{counts[group]:,} {group}" for group in TITLES]
    still = comparison.still_failing
    failing = f"; {still:,} of them fail{'s' if still == 1 else ''}" if still else ""
    return f"{', '.join(parts)}, {counts['equal']:,} equal (within {EQUAL:.0%}{failing})".replace(
        "%", " %"
    )


def headline(comparison: RunComparison) -> str:
    """Name the run that is compared, and the run it is compared with."""
    rows = [row for row in comparison.rows if not row.mode]
    labels = []
    for number, name in enumerate(comparison.names):
        modes = dict.fromkeys(cell.mode for row in rows if (cell := row.cells[number]))
        label = f" (mode {', '.join(map(one_line, modes))})" if modes else ""
        labels.append(f"{one_line(name)}{label}")
    return f"{labels[1]} compared with {labels[0]}"


def diagnosis(comparison: RunComparison) -> tuple[str, str]:
    """Say in words what changed, and its tone, for the headline of a page."""
    counts, names = comparison.counts, list(map(one_line, comparison.names))
    if counts["broke"]:
        first = comparison.of("broke")[0]
        where_text, later = f"{one_line(first.site)} ({mode_text(first)})", names[1]
        if counts["broke"] == 1:
            return f"{where_text} passed in {names[0]} and fails in {later}", "fail"
        many = f"{counts['broke']:,} places that passed in {names[0]} fail in {later}"
        return f"{many}, first {where_text}", "fail"
    if counts["worse"]:
        row = comparison.of("worse")[0]
        change = f", {row.metric} {change_text(row)}" if change_text(row) else ""
        places = counted(counts["worse"], "place")
        return f"{places} got worse, most {one_line(row.site)} ({mode_text(row)}{change})", "warn"
    if counts["gone"] or counts["new"]:
        verb = "is" if counts["gone"] == 1 else "are"
        others = f"{counted(counts['gone'], 'place')} {verb} gone, {counts['new']:,} new"
        is_apart = counts["gone"] + counts["new"] == len(comparison.rows)
        return f"{'Nothing can be compared' if is_apart else 'Nothing got worse'}; {others}", ""
    better = f", {counted(counts['better'], 'place')} got better" if counts["better"] else ""
    return f"Nothing got worse{better}", "good"


def cell_texts(row: Row) -> list[str]:
    """Write the values of both runs, with digits enough to look different."""
    values = [cell.value if cell else None for cell in row.cells]
    texts = figures_apart(*values)
    return [
        text if cell is None or is_number(cell.value) else "-" if cell.passed else "not finite"
        for cell, text in zip(row.cells, texts, strict=True)
    ]


def change_text(row: Row) -> str:
    """Write the change from the first run to the second, empty where there is none."""
    return "" if row.ratio is None else change_figure(row.ratio)


def verdict_text(row: Row, names: Sequence[str]) -> str:
    """Return `passed`, `failed`, or the runs in which a row fails."""
    present = [(n, cell) for n, cell in zip(names, row.cells, strict=True) if cell is not None]
    failed = [one_line(name) for name, cell in present if not cell.passed]
    if not failed:
        return "passed"
    return "failed" if len(failed) == len(present) else f"failed in {', '.join(failed)}"


def mode_text(row: Row) -> str:
    """Return the mode of a row, or all modes where modes are compared."""
    if row.mode:
        return row.mode
    return " / ".join(dict.fromkeys(cell.mode for cell in row.cells if cell is not None))


# Terminal ----------------------------------------------------------------------------------------


def comparison_lines(
    comparison: RunComparison, width: int, rows: int = _ROWS
) -> list[TerminalLine]:
    """Return the differences of the headers, the counts, and a table for each group with rows."""
    width = max(width, NARROWEST)
    lines = wrapped_lines([headline(comparison)], width)
    for difference in comparison.differences:
        text = f"{'warning: ' if difference.warning else ''}{difference.text(comparison.names)}"
        lines += wrapped_lines([text], width, "yellow" if difference.warning else "")
    lines += wrapped_lines([counts_text(comparison)], width, "" if comparison.is_clean else "red")
    for group, title in TITLES.items():
        if group_rows := comparison.of(group):
            lines += [TerminalLine(""), TerminalLine(title, "red" if group == "broke" else "")]
            lines += map(TerminalLine, _table(group_rows[:rows], comparison.names, width))
            lines += [TerminalLine(f"+{len(group_rows) - rows} more")] * (len(group_rows) > rows)
    return lines


def _table(rows: Sequence[Row], names: Sequence[str], width: int) -> list[str]:
    layouts = [
        (sys.maxsize, lambda site: _one_line(rows, names, site)),
        (_LEAST_SITE, lambda site: _two_lines(rows, names, site)),
    ]
    return fit_table(layouts, width, [row.site for row in rows])


def _heads(names: Sequence[str]) -> list[str]:
    return ["site", "scope", "mode", "metric", *names, "change", "verdict"]


def _cells(row: Row, names: Sequence[str], nothing: str = "") -> list[str]:
    words = [row.site, row.scope, f"{row.model} {mode_text(row)}", row.metric]
    change = change_text(row) or nothing
    return [*words, *cell_texts(row), change, verdict_text(row, names)]


def _one_line(compared: Sequence[Row], names: Sequence[str], site: int) -> list[str]:
    rows = [
        [site_text(row.site, row.layer, site), *map(one_line, _cells(row, names, "-")[1:])]
        for row in compared
    ]
    heads = _heads([cut_middle(one_line(name), 12) for name in names])
    return table(heads, rows, numbers=range(4, 5 + len(names)))


def _two_lines(compared: Sequence[Row], names: Sequence[str], site: int) -> list[str]:
    """Put metric, scope and mode under the site."""
    room = max(site, _LEAST_SITE)
    rows = []
    for row in compared:
        label = f"{row.metric} {row.scope}{f', {row.mode}' if row.mode else ''}"
        where = f"{site_text(row.site, row.layer, room)}\n  {cut_middle(one_line(label), room - 2)}"
        rows.append([where, *cell_texts(row), change_text(row) or "-"])
    heads = ["site", *(cut_middle(one_line(name), 12) for name in names), "change"]
    return table(heads, rows, numbers=range(1, 2 + len(names)))


# Markdown ----------------------------------------------------------------------------------------


def comparison_markdown(comparison: RunComparison, rows: int = _MARKDOWN_ROWS) -> str:
    """Return a section for a summary; tables end before it gets longer than 18,000 bytes."""
    page, names = MarkdownPage(_MOST_BYTES), comparison.names
    page.add(f"## Comparison: {for_markdown(headline(comparison))}", "")
    for difference in comparison.differences:
        text = for_markdown(difference.text(names))
        page.add(f"* {'**warning**: ' if difference.warning else ''}{text}")
    page.add("", counts_text(comparison))
    heads = _heads([for_markdown(cut_middle(one_line(name), 24)) for name in names])
    for group, title in TITLES.items():
        if group_rows := comparison.of(group):
            page.add("", f"**{title}**", "", *markdown_head(*heads))
            lines = [markdown_row(_cells(row, names)) for row in group_rows[:rows]]
            page.add_list(lines, rows, lambda count: ["", f"+{count} more"], len(group_rows))
    return page.text()
