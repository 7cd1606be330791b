"""What continuous integration shows: JUnit properties, a Markdown summary, GitHub annotations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qgate.results.others import (
    NOT_FINISHED,
    ended_badly,
    is_finished,
    other_lines,
    others_of,
    others_text,
)
from qgate.results.ranking import (
    binding,
    binding_checks,
    bound_of,
    check_text,
    figure,
    times_figure,
    times_text,
    value_of,
)
from qgate.results.summary import Finding, ModeSummary, Tally, change_text
from qgate.text import for_markdown, for_workflow, for_workflow_property, one_line

_ROWS = 20
# A comment of GitHub takes 65,536 characters; a comparison may follow.
_MOST_BYTES = 45_000
_RESERVE = 200


def junit_properties(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs for `record_property`: the checked metrics of one comparison, named with its site."""
    where = one_line(f"{record['site']} {record['scope']}")
    pairs = [
        (f"qgate {where} {metric}".rstrip(), f"{verdict_word(check)}: {check_text(check)}")
        for metric, check in binding_checks(record).items()
    ]
    about = [(f"qgate {name}", one_line(record[name])) for name in ("model", "mode", "layer")]
    return [*about, *((name, one_line(value)) for name, value in pairs)]


def verdict_word(check: Mapping[str, Any]) -> str:
    if not check["passed"]:
        return "failed"
    return "improved" if check["improved"] else "passed"


def markdown_summary(
    records: Iterable[Mapping[str, Any]] | Tally,
    rows: int = _ROWS,
    broken: Sequence[str] = (),
    *,
    about: str = "",
    most: int = _MOST_BYTES,
    header: Mapping[str, Any] | None = None,
) -> str:
    """Verdict, counts, each mode and the failures, worst first; for `GITHUB_STEP_SUMMARY` and for
    comments of pull requests, which take 65,536 characters.

    `broken` says what kept gates from comparing, and `header` which other tests failed and whether
    the run came to its end: without them a red run would look green. `about` is told beside the
    verdict. Lists end where the text would get longer than `most` bytes.
    """
    tally = records if isinstance(records, Tally) else Tally(records)
    counts = tally.counts
    page = _Page(most)
    named = f", {for_markdown(about)}" if about else ""
    header = header or {}
    other = others_of(header)
    page.add(f"## qgate: {_verdict(tally, broken, header)}{named}", "", counts.text())
    if not is_finished(header):
        page.add("", f"* **error**: {NOT_FINISHED}")
    elif not (counts.failed or broken or other["failed"]) and ended_badly(header):
        page.add("", f"* **error**: {ended_badly(header)}")
    if broken:
        page.add("")
        texts = [f"* **error**: {for_markdown(text)}" for text in broken]
        page.listed(texts, rows, lambda rest: [f"* and {rest} more"])
    if other["failed"]:
        page.add("", f"{others_text(other)}:", "")
        texts = [f"* {for_markdown(each)}" for each in other_lines(other, len(other["failures"]))]
        page.listed(texts, rows, lambda rest: [f"* and {rest} more"], other["failed"])
    modes = tally.modes
    if modes:
        page.add("", *_head("mode", "gates", "failed", "worst against its limit", "metric", "value",
                            "limit", "× limit", "carries"))  # fmt: skip
        texts = [_mode_row(mode) for mode in modes]
        page.listed(texts, rows, lambda rest: ["", f"+{rest} more modes"])
    failed = tally.failures
    if failed:
        page.add("", "Failures, worst first:", "")
        page.add(*_head("site", "scope", "mode", "metric", "value", "limit", "how far", "change"))
        page.listed(
            [_row(each) for each in failed],
            rows,
            lambda rest: ["", f"+{rest} more in `results.jsonl`"],
            counts.failed,
        )
    return page.text()


def _verdict(tally: Tally, broken: Sequence[str], header: Mapping[str, Any]) -> str:
    """The first word that people read: a run that compared nothing did not pass."""
    counts, other = tally.counts, others_of(header)
    rest = [others_text(other).partition(",")[0]] if other["failed"] else []
    rest += [] if is_finished(header) else ["not finished"]
    if counts.failed:
        return ", ".join([f"{tally.failed_gates} of {tally.gates} gates failed", *rest])
    if header.get("broken") or (broken and not (header or rest)):
        return ", ".join(["set-up failed", *rest])
    rest = rest or (["the run failed"] if broken or ended_badly(header) else [])
    gates = f"{tally.gates} gate{'' if tally.gates == 1 else 's'}"
    said = f"{gates} passed" if counts.passed else "nothing was compared"
    return ", ".join([*rest, said])


class _Page:
    """Lines of Markdown, up to a size that GitHub takes."""

    def __init__(self, most: int) -> None:
        self._lines: list[str] = []
        self._room = most

    def add(self, *lines: str) -> None:
        for each in lines:
            self._lines.append(each)
            self._room -= len(each.encode("utf-8")) + 1

    def listed(
        self,
        lines: Sequence[str],
        most: int,
        more: Callable[[int], list[str]],
        total: int | None = None,
    ) -> None:
        """As many as there is room for, and how many more there are."""
        shown = 0
        for each in lines[:most]:
            if len(each.encode("utf-8")) + _RESERVE > self._room:
                break
            self.add(each)
            shown += 1
        rest = (len(lines) if total is None else total) - shown
        if rest:
            self.add(*more(rest))

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _head(*names: str) -> tuple[str, str]:
    return f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"


def _mode_row(mode: ModeSummary) -> str:
    cells: list[object] = [f"{mode.model} {mode.mode}", mode.gates, mode.failed]
    cells += ["", *_figures(None)] if mode.worst is None else _worst_cells(mode.worst)
    cells.append(", ".join(each.text() for each in mode.carried))
    return _table_row(cells)


def _worst_cells(found: Finding) -> list[object]:
    metric, value, limit, _ = _figures(found)
    times = found.times
    shown = times_figure(times) if times is not None and math.isfinite(times) else ""
    # A failure that no number says, such as a NaN, is told in words.
    words = times_text(found.check) if found.check and not shown and not found.passed else shown
    return [f"{found.site} ({found.scope})", metric, value, limit, words]


def _figures(found: Finding | None) -> tuple[str, str, str, str]:
    """Metric, value, limit and how far."""
    check = found.check if found else None
    if check is None:
        return "", "", "", "" if found is None else "nothing compared"
    limit = "" if check["bound"] is None else f"{check['side']} {figure(bound_of(check))}"
    return str(check["metric"]), figure(value_of(check)), limit, times_text(check)


def _row(found: Finding) -> str:
    cells: list[object] = [found.site, found.scope, f"{found.model} {found.mode}"]
    return _table_row([*cells, *_figures(found), change_text(found)])


def _table_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(for_markdown(cell) for cell in cells)} |"


def github_annotation(record: Mapping[str, Any]) -> str | None:
    """The `::error` line of a failed comparison, None for one that passed.

    `file` and `line` of the record, where it has them, place it in the diff.
    """
    if record["passed"]:
        return None
    check = binding(record)
    what = check_text(check) if check else "nothing compared"
    message = f"{what} at {record['site']} ({record['scope']}, mode {record['mode']})"
    places = {name: record[name] for name in ("file", "line") if record.get(name) is not None}
    title = f"qgate {record['model']} {record['mode']}"
    told = {**places, "title": title}
    properties = ",".join(f"{key}={for_workflow_property(each)}" for key, each in told.items())
    return f"::error {properties}::{for_workflow(message)}"


def github_error(text: str) -> str:
    """The `::error` line of what kept gates from comparing."""
    return f"::error title=qgate::{for_workflow(text)}"
