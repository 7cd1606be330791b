"""Texts for continuous integration: a Markdown summary, GitHub annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qgate.results.checks import binding, is_counted, view_of, worst_first
from qgate.results.coverage import partial_text
from qgate.results.failure_causes import origin_of
from qgate.results.run_facts import (
    NOT_FINISHED,
    RUN_FACTS,
    ended_badly,
    is_finished,
    other_test_lines,
    other_tests_of,
    other_tests_text,
)
from qgate.results.summary import ComparisonSummary, ModeSummary, Tally, verdict_text
from qgate.text import (
    for_markdown,
    for_workflow,
    for_workflow_property,
)

_ROWS = 20
# A comment of GitHub takes 65,536 characters; a comparison may follow.
_MOST_BYTES = 45_000
_RESERVE = 200
_MODE_HEAD = (
    "mode", "gates", "failed", "worst against its limit", "metric", "value", "limit", "× limit",
    "carries",
)  # fmt: skip
_FAILURE_HEAD = ("site", "scope", "mode", "metric", "value", "limit", "how far", "change")
_FOLD = "<details><summary>All failures</summary>"


def markdown_summary(
    records: Iterable[Mapping[str, Any]] | Tally,
    rows: int = _ROWS,
    broken: Sequence[str] = (),
    *,
    about: str = "",
    most: int = _MOST_BYTES,
    header: Mapping[str, Any] | None = None,
) -> str:
    """Return verdict, counts, modes and failures, worst first, as Markdown.

    It fits `GITHUB_STEP_SUMMARY` and comments of pull requests. `broken` has errors of set-ups, and
    `header` the other failed tests and the exit status: without them a red run would look green.
    `about` follows the verdict. Lists end where the text would exceed `most` bytes.
    """
    tally = records if isinstance(records, Tally) else Tally(records)
    counts = tally.counts
    page = MarkdownPage(most)
    named = f", {for_markdown(about)}" if about else ""
    header = header or {}
    other = other_tests_of(header)
    page.add(f"## qgate: {for_markdown(verdict_text(tally, header, broken))}{named}", "")
    causes = tally.causes
    for cause in causes[:1]:
        page.add(f"**cause: {for_markdown(cause.text())}**", "")
    if partial := partial_text(header):
        page.add(f"* **error**: {for_markdown(partial)}", "")
    page.add(counts.text())
    for fact in RUN_FACTS:
        for text in () if fact.is_long else fact.lines(header):
            page.add("", for_markdown(text))
    if not is_finished(header):
        page.add("", f"* **error**: {NOT_FINISHED}")
    elif not (counts.failed or broken or other["failed"] or partial) and ended_badly(header):
        page.add("", f"* **error**: {ended_badly(header)}")
    if broken:
        page.add("")
        texts = [f"* **error**: {for_markdown(text)}" for text in broken]
        page.add_list(texts, rows, lambda count: [f"* and {count} more"])
    if other["failed"]:
        page.add("", f"{other_tests_text(other)}:", "")
        texts = [
            f"* {for_markdown(line)}" for line in other_test_lines(other, len(other["failures"]))
        ]
        page.add_list(texts, rows, lambda count: [f"* and {count} more"], other["failed"])
    modes = tally.modes
    if modes:
        page.add("", *markdown_head(*_MODE_HEAD))
        texts = [_mode_row(mode) for mode in modes]
        page.add_list(texts, rows, lambda count: ["", f"+{count} more modes"])
    if len(causes) > 1:
        page.add("", "Other causes:", "")
        texts = [f"* {for_markdown(cause.text())}" for cause in causes[1:]]
        page.add_list(texts, rows, lambda count: [f"* and {count} more"])
    failed = [line for line in tally.failures if not line.is_plan_change]
    if failed:
        page.add("", *([_FOLD, ""] if causes else []), "Failures, worst first:", "")
        page.add(*markdown_head(*_FAILURE_HEAD))
        page.add_list(
            [_row(line) for line in failed],
            rows,
            lambda count: ["", f"+{count} more in `results.jsonl`"],
            counts.failed - tally.folded,
        )
        page.add(*(["", "</details>"] if causes else []))
    return page.text()


class MarkdownPage:
    """Lines of Markdown, up to a size that GitHub accepts."""

    def __init__(self, most: int) -> None:
        self._lines: list[str] = []
        self._room = most

    def add(self, *lines: str) -> None:
        for line in lines:
            self._lines.append(line)
            self._room -= len(line.encode("utf-8")) + 1

    def add_list(
        self,
        lines: Sequence[str],
        most: int,
        more: Callable[[int], list[str]],
        total: int | None = None,
    ) -> None:
        """Add as many lines as fit, and the number of the others."""
        count = 0
        for line in lines[:most]:
            if len(line.encode("utf-8")) + _RESERVE > self._room:
                break
            self.add(line)
            count += 1
        remaining = (len(lines) if total is None else total) - count
        if remaining:
            self.add(*more(remaining))

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def markdown_head(*names: str) -> tuple[str, str]:
    return f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"


def _mode_row(mode: ModeSummary) -> str:
    cells: list[object] = [f"{mode.model} {mode.mode}", mode.gates, mode.failed]
    worst = mode.worst
    cells += [""] * 5 if worst is None else [
        f"{worst.site} ({worst.scope})", *_figures(worst), worst.view.far.removesuffix("x")
    ]  # fmt: skip
    cells.append("; ".join(filter(None, [mode.carried_text(), mode.long_text])))
    return markdown_row(cells)


def _row(comparison: ComparisonSummary) -> str:
    mode, view = f"{comparison.model} {comparison.mode}", comparison.view
    figures = _figures(comparison)
    return markdown_row(
        [comparison.site, comparison.scope, mode, *figures, view.how_far, view.change]
    )


def _figures(comparison: ComparisonSummary) -> list[str]:
    view = comparison.view
    return [view.metric, view.now, view.limit]


def markdown_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(for_markdown(cell) for cell in cells)} |"


def github_annotations(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return an `::error` line for every cause, then one for each other failed gate, worst first.

    A gate that follows from a cause says so.
    """
    causes = Tally(records).causes
    of_causes, following = [], []
    by_node = {cause.suspect.node: cause for cause in reversed(causes)}
    worst: dict[str, Mapping[str, Any]] = {}
    for record in worst_first(records):
        worst.setdefault(record["node"], record)
    for node, record in worst.items():
        if (cause := by_node.get(node)) is not None and not record["passed"]:
            text = f"cause: {cause.text()}"
            of_causes.append((causes.index(cause), github_annotation(record, text) or ""))
            continue
        origin = origin_of(causes, node)
        ending = f"; {origin}" if origin else ""
        following.append(github_annotation(record, ending=ending))
    return [line for line in (*(line for _, line in sorted(of_causes)), *following) if line]


def github_annotation(
    record: Mapping[str, Any], message: str = "", *, ending: str = ""
) -> str | None:
    """Return the `::error` line of a failed comparison, None for one that passed.

    `file` and `line` of the record put it into the diff.
    """
    if record["passed"] or not is_counted(record):
        return None
    text = view_of(binding(record)).text()
    where = f"{record['site']} ({record['scope']}, mode {record['mode']})"
    message = message or f"{text} at {where}{ending}"
    position = {name: record[name] for name in ("file", "line") if record.get(name) is not None}
    title = f"qgate {record['model']} {record['mode']}"
    properties = {**position, "title": title}
    joined = ",".join(f"{key}={for_workflow_property(value)}" for key, value in properties.items())
    return f"::error {joined}::{for_workflow(message)}"


def github_error(text: str) -> str:
    """Return the `::error` line of a set-up error."""
    return f"::error title=qgate::{for_workflow(text)}"
