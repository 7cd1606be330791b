"""A comparison of runs in words: on a terminal, and as Markdown for pull requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qgate.page.comparisons import EQUAL, Cell, Group, Row, RunComparison
from qgate.page.tables import clipped, middle_cut, short, shown_width, site_text, table, widest
from qgate.page.terminal import NARROWEST, TerminalLine, plain
from qgate.results.ranking import times_figure
from qgate.text import for_markdown, one_line

TITLES: dict[Group, str] = {
    "broke": "Broke: passed before, fails now",
    "fixed": "Fixed: failed before, passes now",
    "worse": "Worse",
    "better": "Better",
    "new": "New: not in the first run",
    "gone": "Gone: in the first run only",
}
_ROWS = 10
_MARKDOWN_ROWS = 15
_LEAST_SITE = 24


def counts_text(comparison: RunComparison) -> str:
    """`1 broke, 0 fixed, 2 worse, 0 better, 0 new, 0 gone, 9 equal (within 2 %)`."""
    counts = comparison.counts
    parts = [f"{counts[group]:,} {group}" for group in TITLES]
    still = comparison.still_failing
    failing = f"; {still:,} of them fail{'s' if still == 1 else ''}" if still else ""
    return f"{', '.join(parts)}, {counts['equal']:,} equal (within {EQUAL:.0%}{failing})".replace(
        "%", " %"
    )


def headline(comparison: RunComparison) -> str:
    """Which runs are compared with which."""
    first, *later = (
        f"{one_line(name)}{_modes(comparison, place)}"
        for place, name in enumerate(comparison.names)
    )
    return f"{', '.join(later)} compared with {first}"


def _modes(comparison: RunComparison, place: int) -> str:
    """The modes of a run, where they are what is compared."""
    rows = [row for row in comparison.rows if not row.mode]
    found = dict.fromkeys(cell.mode for row in rows if (cell := row.cells[place]))
    return f" (mode {', '.join(map(one_line, found))})" if found else ""


def cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell.value is None or not math.isfinite(cell.value):
        return "not finite" if not cell.passed else "-"
    return short(cell.value)


def ratio_text(row: Row) -> str:
    """That of the run that moved most; empty where there is none."""
    known = [each for each in row.ratios if each is not None]
    if not known:
        return ""
    most = max(known, key=lambda each: abs(math.log(each)) if each > 0 else math.inf)
    return f"{most:.4g}x" if 0.5 <= most < 2 else f"{times_figure(most)}x"


def verdict_text(row: Row, names: Sequence[str]) -> str:
    """`passed`, `failed`, or in which of the runs it fails."""
    there = [(n, cell) for n, cell in zip(names, row.cells, strict=True) if cell is not None]
    failed = [one_line(name) for name, cell in there if not cell.passed]
    if not failed:
        return "passed"
    return "failed" if len(failed) == len(there) else f"failed in {', '.join(failed)}"


def mode_text(row: Row) -> str:
    """The modes, each once, where they are what is compared."""
    if row.mode:
        return row.mode
    return " / ".join(dict.fromkeys(cell.mode for cell in row.cells if cell is not None))


# Terminal ----------------------------------------------------------------------------------------


def comparison_lines(
    comparison: RunComparison, width: int, rows: int = _ROWS
) -> list[TerminalLine]:
    """What differs in the headers, the counts, and a table for each group that has rows."""
    width = max(width, NARROWEST)
    lines = plain([headline(comparison)], width)
    for each in comparison.differences:
        said = f"{'warning: ' if each.warning else ''}{each.text(comparison.names)}"
        lines += plain([said], width, "yellow" if each.warning else "")
    lines += plain([counts_text(comparison)], width, "" if comparison.is_clean else "red")
    for group, title in TITLES.items():
        found = comparison.of(group)
        if found:
            lines += [TerminalLine(""), TerminalLine(title, "red" if group == "broke" else "")]
            lines += [TerminalLine(each) for each in _table(found[:rows], comparison.names, width)]
            if len(found) > rows:
                lines.append(TerminalLine(f"+{len(found) - rows} more"))
    return lines


def _table(found: Sequence[Row], names: Sequence[str], width: int) -> list[str]:
    longest = max(shown_width(one_line(row.site)) for row in found)
    site = longest
    lines = _one_line(found, names, site)
    if widest(lines) <= width:
        return lines
    lines = _two_lines(found, names, site)
    while widest(lines) > width and site > min(longest, _LEAST_SITE):
        site = max(min(longest, _LEAST_SITE), site - (widest(lines) - width))
        lines = _two_lines(found, names, site)
    return [clipped(each, width) for each in lines]


def _heads(names: Sequence[str]) -> list[str]:
    return [middle_cut(one_line(name), 12) for name in names]


def _one_line(found: Sequence[Row], names: Sequence[str], site: int) -> list[str]:
    rows = [
        [
            site_text(row.site, row.layer, site),
            one_line(row.scope),
            one_line(f"{row.model} {mode_text(row)}"),
            one_line(row.metric),
            *map(cell_text, row.cells),
            ratio_text(row) or "-",
            verdict_text(row, names),
        ]
        for row in found
    ]
    heads = ["site", "scope", "mode", "metric", *_heads(names), "ratio", "verdict"]
    return table(heads, rows, numbers=range(4, 5 + len(names)))


def _two_lines(found: Sequence[Row], names: Sequence[str], site: int) -> list[str]:
    """Metric, scope and mode under the site."""
    room = max(site, _LEAST_SITE)
    rows = []
    for row in found:
        told = f"{row.metric} {row.scope}{f', {row.mode}' if row.mode else ''}"
        where = f"{site_text(row.site, row.layer, room)}\n  {middle_cut(one_line(told), room - 2)}"
        rows.append([where, *map(cell_text, row.cells), ratio_text(row) or "-"])
    return table(["site", *_heads(names), "ratio"], rows, numbers=range(1, 2 + len(names)))


# Markdown ----------------------------------------------------------------------------------------


def comparison_markdown(
    comparison: RunComparison, rows: int = _MARKDOWN_ROWS, most: int = 18_000
) -> str:
    """A section under the summary of the run; tables end where it would get longer than `most`."""
    lines = [f"## Comparison: {for_markdown(headline(comparison))}", ""]
    for each in comparison.differences:
        said = for_markdown(each.text(comparison.names))
        lines.append(f"* {'**warning**: ' if each.warning else ''}{said}")
    lines += ["", counts_text(comparison)]
    room = most - sum(len(line.encode()) + 1 for line in lines)
    for group, title in TITLES.items():
        found = comparison.of(group)
        if not found:
            continue
        names = [for_markdown(middle_cut(one_line(name), 24)) for name in comparison.names]
        heads = ["site", "scope", "mode", "metric", *names, "ratio", "verdict"]
        lines += ["", f"**{title}**", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        shown = 0
        for row in found[:rows]:
            made = _markdown_row(row, comparison.names)
            room -= len(made.encode()) + 1
            if room < 0:
                break
            lines.append(made)
            shown += 1
        if len(found) > shown:
            lines += ["", f"+{len(found) - shown} more"]
    return "\n".join(lines) + "\n"


def _markdown_row(row: Row, names: Sequence[str]) -> str:
    cells = [row.site, row.scope, f"{row.model} {mode_text(row)}", row.metric]
    cells += [*map(cell_text, row.cells), ratio_text(row), verdict_text(row, names)]
    return f"| {' | '.join(for_markdown(each) for each in cells)} |"
