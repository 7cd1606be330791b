"""A comment for a pull request: the verdict, and what moved, by how much, since when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qgate.page.comparison_texts import headline
from qgate.page.comparisons import Row, RunComparison
from qgate.page.reports import LoadedRun, about
from qgate.results.ci import MarkdownPage, markdown_head, markdown_row
from qgate.results.coverage import partial_text
from qgate.results.files import read
from qgate.results.movements import EQUAL, Movement, Movements, movement
from qgate.results.run_facts import other_test_lines
from qgate.results.summary import verdict_text
from qgate.text import counted, figures_apart, for_markdown

MARK = "<!-- qgate report --format comment -->"
"""First line of a comment, by which the next run finds it and writes it anew."""
_ROWS, _LINES = 15, 5
# A comment of GitHub takes 65,536 characters; its writer may add a link.
_MOST_BYTES = 60_000
_HEADS = ("what moved", "mode", "metric", "before", "now", "change", "", "since")
_MOVED = ("failed", "worse", "better", "moved")
_Since = Mapping[tuple[str, str], str]


def comment(loaded: Sequence[LoadedRun], comparison: RunComparison | None = None) -> str:
    """Return the comment about the last run, beside its accepted values or the first run."""
    last = loaded[-1]
    header, tally = last.run.header, last.tally
    page = MarkdownPage(_MOST_BYTES)
    page.add(MARK, f"## qgate: {for_markdown(verdict_text(tally, header, last.broken))}")
    for cause in tally.causes[:1]:
        page.add("", f"**cause: {for_markdown(cause.text())}**")
    problems = [partial_text(header), *last.broken, last.run.torn]
    problems += other_test_lines(last.run.other, _LINES)
    bullets = [f"* {for_markdown(text)}" for text in problems if text]
    page.add(*[""] * bool(bullets), *bullets[: 2 * _LINES])
    if comparison is None:
        moved = Movements(read(last.path)[1])
        moves, new = moved.of(*_MOVED), len(moved.of("new"))
        equal, since = len(moved.of("equal")), _accepted_since(header.get("accepted_at"))
        against = "what was accepted"
    else:
        moves = [_of_row(row) for row in comparison.rows if row.group not in ("new", "gone")]
        equal = sum(move.outcome == "equal" for move in moves)
        moves = sorted((m for m in moves if m.outcome != "equal"), key=lambda move: move.order)
        new, since = comparison.counts["new"], {}
        against = comparison.names[0]
        page.add("", for_markdown(headline(comparison)))
    page.add("", *(markdown_head(*_HEADS) if moves else ["Nothing moved."]))
    of_all = _since_run(loaded) if comparison else ""
    rows = [_row(move, of_all or since.get((move.model, move.title), "accepted"))
            for move in moves[:_ROWS]]  # fmt: skip
    page.add_list(rows, _ROWS, lambda count: ["", f"+{count} more"], len(moves))
    within = f"within {EQUAL:.0%}".replace("%", " %")
    counts = [f"{counted(equal, 'comparison')} {within} of {for_markdown(against)}"]
    counts += [f"{counted(new, 'comparison')} without an earlier value"] * bool(new)
    page.add("", f"{', '.join(counts)}. {for_markdown(about(last.run))}")
    return page.text()


def _row(move: Movement, since: str) -> str:
    cells = [
        f"{move.site} ({move.scope})", f"{move.model} {move.mode}", move.metric,
        *figures_apart(move.old, move.new), move.change, move.outcome, since,
    ]  # fmt: skip
    return markdown_row(cells)


def _accepted_since(changes: Sequence[Mapping[str, str]] | None) -> _Since:
    """Return when accepted files changed last, by model and name."""
    return {
        (change["model"], change["mode"]): f"{change['date']}, {change['commit'][:12]}"
        for change in changes or ()
    }


def _since_run(loaded: Sequence[LoadedRun]) -> str:
    header = loaded[0].run.header
    return ", ".join(filter(None, [str(header["started"])[:10], str(header["commit"] or "")[:12]]))


def _of_row(row: Row) -> Movement:
    """Return a row of a comparison as the movement from its first run to its last."""
    first, last = row.cells[0], row.cells[-1]
    old, new = (cell.value if cell else None for cell in (first, last))
    outcome, change, size = movement(row.metric, old, new)
    if last is not None and not last.passed:
        outcome = "failed"
    elif row.group == "equal":
        outcome = "equal"
    mode = row.mode or (last.mode if last else "")
    where = (row.site, row.scope, row.metric)
    return Movement(row.model, mode, mode, *where, old, new, outcome, change, size)
