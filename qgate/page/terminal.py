"""A run on a terminal: counts, a table of modes, the failures, worst first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qgate.page.tables import (
    cut_middle,
    display_width,
    fit_table,
    metric_lines,
    site_text,
    table,
)
from qgate.results.extent import partial_text
from qgate.results.failure_causes import FailureCause
from qgate.results.headlines import verdict_texts
from qgate.results.other_tests import (
    NOT_FINISHED,
    ended_badly,
    is_finished,
    other_test_lines,
    other_tests_of,
    other_tests_text,
)
from qgate.results.run_facts import RUN_FACTS
from qgate.results.summary import ComparisonSummary, ModeSummary, Tally
from qgate.text import counted, for_terminal, one_line

Color = Literal["", "red", "green", "yellow"]
NARROWEST = 60
_NARROWEST_TEXT = 40
_MODES, _CAUSES, _OTHERS = 10, 10, 5
_COMMAND = re.compile(r"^ *[a-z ]+: python \S+$")
_BOUND = ("%", ">", "<", "|")
"""Signs that no line begins with: they belong to the number before them."""
_NARROW_SITE = 24
_WIDE_SITE = 32
_LEAST_SITE = 12
_NO_HEADER: Mapping[str, Any] = {}
_ANSI = {"red": "\x1b[31m", "green": "\x1b[32m", "yellow": "\x1b[33m"}


@dataclass(frozen=True)
class TerminalLine:
    """One line and its color.

    It is never a command to a CI service that reads commands from the log.
    """

    text: str
    color: Color = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", for_terminal(self.text))

    def colored(self, colors: bool) -> str:
        start = _ANSI.get(self.color, "") if colors and self.text else ""
        return f"{start}{self.text}\x1b[0m" if start else self.text


def wrapped_lines(texts: Sequence[str], width: int, color: Color = "") -> list[TerminalLine]:
    """Wrap texts between words; a command that is a line of its own stays whole, to be copied."""
    width = max(width, _NARROWEST_TEXT)
    return [
        TerminalLine(line, color)
        for text in texts
        for line in ([one_line(text)] if _COMMAND.search(text) else _folded(one_line(text), width))
    ]


def error_lines(texts: Sequence[str]) -> list[TerminalLine]:
    """Return one line per error, however long: logs are searched for them."""
    return [TerminalLine(one_line(text), "red") for text in texts]


def _folded(text: str, width: int) -> list[str]:
    lines, remaining = [], for_terminal(text)
    indent = " " * (len(text) - len(text.lstrip(" ")) + 2)
    while len(remaining) > 4 * width or display_width(remaining) > width:
        cut = _end_of_line(remaining, width, width // 3)
        if not cut:
            start = _end_of_line(remaining, width // 3, len(indent))
            word = remaining[start:].split(maxsplit=1)[0]
            cut = start if len(indent) + display_width(word) <= width else 0
        # A word that is longer than a line is cut where the line ends.
        at = cut or width
        while display_width(remaining[:at]) > width:
            at -= 1
        lines.append(remaining[:at])
        remaining = for_terminal(indent + remaining[at:].lstrip())
    return [*lines, remaining]


def _end_of_line(text: str, width: int, least: int) -> int:
    """Return where the last space is that a line may end before; 0 where there is none."""
    cut = text.rfind(" ", least, width + 1)
    while cut > 0 and text[cut + 1 : cut + 2] in _BOUND:
        cut = text.rfind(" ", least, cut)
    return max(cut, 0)


def summary(
    tally: Tally,
    width: int,
    header: Mapping[str, Any] = _NO_HEADER,
    *,
    modes: int = _MODES,
    rows: int = _CAUSES,
) -> list[TerminalLine]:
    """Return the end of `pytest suites`: the cause, counts, modes, a line for every other cause.

    Failures that follow from a cause are counted, and so are other tests: pytest names them.
    """
    causes = tally.causes
    lines = more_cause_lines(causes, width, rows)
    first = unknown_lines(tally, width)
    return _report(tally, width, header, modes, [*first, *lines], causes)


def tables(
    tally: Tally,
    width: int,
    header: Mapping[str, Any] = _NO_HEADER,
    *,
    modes: int = 40,
    rows: int = 20,
) -> list[TerminalLine]:
    """Return what `qgate report` prints: the cause, counts, modes, failures, other tests."""
    width = max(width, NARROWEST)
    failures, causes = _failures(tally)[:rows], tally.causes
    lines = [
        *error_lines(other_test_lines(other_tests_of(header), _OTHERS)),
        *unknown_lines(tally, width),
        *(line for cause in causes[1:_OTHERS] for line in other_cause_lines(cause, width)),
    ]
    if failures:
        lines += [TerminalLine(""), TerminalLine("Failures, worst first", "red")]
        lines += map(TerminalLine, _failure_table(failures, width))
    hidden = tally.counts.failed - sum(tally.unknown.values()) - tally.folded - len(failures)
    lines += [TerminalLine(f"+{hidden} more in results.jsonl")] * (hidden > 0)
    return _report(tally, width, header, modes, lines, causes)


def _failures(tally: Tally) -> list[ComparisonSummary]:
    return [finding for finding in tally.failures if not (finding.is_new or finding.is_plan_change)]


def _report(
    tally: Tally, width: int, header: Mapping[str, Any], modes: int,
    failures: Sequence[TerminalLine], causes: Sequence[FailureCause],
) -> list[TerminalLine]:  # fmt: skip
    first = wrapped_lines([f"cause: {cause.text()}" for cause in causes[:1]], width, "red")
    counted_lines = [*first, *partial_lines(header), *counts_lines(tally, width, header)]
    lines = [*counted_lines, *mode_table(tally.modes, width, modes), *failures]
    # What else changed says nothing while something is wrong, and one advice is enough.
    improved = "" if causes else improved_text(tally)
    return [*lines, *wrapped_lines([improved] if improved else [], width)]


def improved_text(tally: Tally) -> str:
    count = tally.counts.improved
    return f"{count} improved: bank it with --update-baselines" if count else ""


def more_cause_lines(
    causes: Sequence[FailureCause], width: int, rows: int = _CAUSES
) -> list[TerminalLine]:
    """Return the causes after the first one, and how many are not among them."""
    lines = [line for cause in causes[1 : 1 + rows] for line in other_cause_lines(cause, width)]
    return [*lines, *hidden_cause_lines(len(causes) - 1 - rows)]


def hidden_cause_lines(hidden: int) -> list[TerminalLine]:
    """Say how many causes are not shown."""
    text = f"+{counted(hidden, 'more cause')} in results.jsonl"
    return [TerminalLine(text)] if hidden > 0 else []


def other_cause_lines(cause: FailureCause, width: int) -> list[TerminalLine]:
    """Return `failed: SITE (MODEL, mode M) is truncated: FIGURES; follow from it: 2 layers`."""
    return wrapped_lines([f"failed: {cause.text()}"], width, "red")


def counts_lines(
    tally: Tally, width: int, header: Mapping[str, Any] = _NO_HEADER
) -> list[TerminalLine]:
    """Return the counts of gates; other problems come first where all gates passed."""
    counts = tally.counts
    color: Color = "red" if counts.failed or not counts.passed else "green"
    text = counts.text()
    if counts.failed:
        text = f"{verdict_texts(tally, header)[0]}; comparisons: {text}"
    lines = wrapped_lines([text], width, color)
    also = wrong_lines(tally, width, header)
    lines = [*lines, *also] if counts.failed else [*also, *lines]
    return [*lines, *fact_lines(header, width)]


def partial_lines(header: Mapping[str, Any]) -> list[TerminalLine]:
    """Return the first line of a run that fails as it is partial."""
    return error_lines(list(filter(None, [partial_text(header)])))


def lines_without_records(width: int, header: Mapping[str, Any]) -> list[TerminalLine]:
    """Return the lines of a run whose gates have no record."""
    wrong = wrong_lines(Tally(), width, header)
    return [*partial_lines(header), *wrong, *fact_lines(header, width)]


def fact_lines(header: Mapping[str, Any], width: int) -> list[TerminalLine]:
    """Return what a run says of itself beside its gates; warnings and notes are yellow."""
    return [
        line
        for fact in RUN_FACTS
        for line in wrapped_lines(
            fact.lines(header), width, "yellow" if fact.tone_of(header) else ""
        )
    ]


def wrong_lines(tally: Tally, width: int, header: Mapping[str, Any]) -> list[TerminalLine]:
    """Return what went wrong beside the gates."""
    wrong = ["" if is_finished(header) else NOT_FINISHED, other_tests_text(other_tests_of(header))]
    fails = tally.counts.failed or header.get("broken") or partial_text(header)
    if not (fails or any(wrong)):
        wrong.append(ended_badly(header))
    return wrapped_lines(list(filter(None, wrong)), width, "red")


def unknown_lines(tally: Tally, width: int) -> list[TerminalLine]:
    """Name the modes that only lack accepted errors; no update records beside a fault."""
    unknown = tally.unknown
    if not unknown:
        return []
    names = [one_line(f"{model} {mode}") for model, mode in unknown]
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    comparisons = f"{counted(sum(unknown.values()), 'comparison')} ({listed})"
    can_record = unknown.keys() - tally.refused.keys()
    how = "with --update-baselines" if can_record else "once what is wrong is mended"
    text = f"no accepted errors yet for {comparisons}: record them {how}"
    return wrapped_lines([text], width, "yellow")


# Tables ------------------------------------------------------------------------------------------


def mode_table(modes: Sequence[ModeSummary], width: int, most: int) -> list[TerminalLine]:
    """Return one row per mode: failed gates, the worst one, and the carried errors."""
    if not modes:
        return []
    several = len({mode.model for mode in modes}) > 1
    first = modes[:most]
    layouts = [
        (_WIDE_SITE, lambda site: _wide_modes(first, several, site, True)),
        (_WIDE_SITE, lambda site: _wide_modes(first, several, site, False)),
        (_LEAST_SITE, lambda site: _narrow_modes(first, several, site)),
    ]
    lines = fit_table(layouts, width, [mode.worst.site for mode in first if mode.worst])
    hidden = len(modes) - len(first)
    more = [f"+{hidden} more mode{'s' if hidden > 1 else ''}"] if hidden > 0 else []
    return list(map(TerminalLine, [*lines, *more]))


def _wide_modes(modes: Sequence[ModeSummary], several: bool, site: int, beside: bool) -> list[str]:
    """Return a line per mode, with its carried errors beside it or below."""
    rows = []
    for mode in modes:
        worst = mode.worst
        cells = ["-"] * 5
        if worst is not None:
            where = f"{site_text(worst.site, worst.layer, site)} ({one_line(worst.scope)})"
            cells = [where, _metric(worst), *_numbers(worst)]
        name = one_line(f"{mode.model} {mode.mode}" if several else mode.mode)
        rows.append([cut_middle(name, 36), f"{mode.failed}/{mode.gates}", *cells])
    heads = ["mode", "failed", "worst against its limit", "metric", "value", "limit", "x limit"]
    if beside and not any(mode.long_text for mode in modes):
        rows = [[*row, _carried(mode) or "-"] for row, mode in zip(rows, modes, strict=True)]
        return table([*heads, "carries"], rows, numbers=(1, 4, 5, 6))
    return _below(table(heads, rows, numbers=(1, 4, 5, 6)), modes, 1)


def _below(lines: list[str], modes: Sequence[ModeSummary], height: int) -> list[str]:
    """Put carried errors on lines of their own under the rows of their modes."""
    rows = lines[:2]
    for number, mode in enumerate(modes):
        rows += lines[2 + number * height : 2 + (number + 1) * height]
        rows += [f"    carries {carried}"] if (carried := _carried(mode)) else []
        rows += [f"    {one_line(mode.long_text)}"] if mode.long_text else []
    return rows


def _carried(mode: ModeSummary) -> str:
    return one_line(mode.carried_text())


def _narrow_modes(modes: Sequence[ModeSummary], several: bool, site: int) -> list[str]:
    """Put the metric under the site, the model under the mode, and carried errors below."""
    rows = []
    for mode in modes:
        worst = mode.worst
        cells = ["-\n ", "-", "-", "-"]
        if worst is not None:
            where = site_text(worst.site, worst.layer, max(site, _NARROW_SITE))
            room = max(site, _NARROW_SITE)
            metric = f"{_metric(worst)} {one_line(worst.scope)}"
            metric = metric if display_width(metric) <= room else cut_middle(_metric(worst), room)
            cells = [f"{where}\n{metric}", *_numbers(worst)]
        model = cut_middle(one_line(mode.model), 12) if several else " "
        name = f"{cut_middle(one_line(mode.mode), 14)}\n  {model}"
        rows.append([name, f"{mode.failed}/{mode.gates}", *cells])
    heads = ("mode", "failed", "worst against its limit", "value", "limit", "x limit")
    return _below(table(heads, rows, numbers=(1, 3, 4, 5)), modes, 2)


def _metric(finding: ComparisonSummary) -> str:
    return one_line(finding.view.metric) or "-"


def _numbers(finding: ComparisonSummary) -> list[str]:
    view = finding.view
    return [view.now, view.most, view.far.removesuffix("x")]


def _failure_table(failed: Sequence[ComparisonSummary], width: int) -> list[str]:
    several = len({finding.model for finding in failed}) > 1
    layouts = [
        (_WIDE_SITE, lambda site: _wide_failures(failed, several, site)),
        (_LEAST_SITE, lambda site: _narrow_failures(failed, several, site)),
    ]
    return fit_table(layouts, width, [finding.site for finding in failed])


def _mode_of(finding: ComparisonSummary, several: bool) -> str:
    return one_line(f"{finding.model} {finding.mode}" if several else finding.mode)


def _wide_failures(failed: Sequence[ComparisonSummary], several: bool, site: int) -> list[str]:
    heads = ("site", "scope", "mode", "metric", "value", "limit", "x limit", "change")
    rows = [
        [
            site_text(finding.site, finding.layer, site),
            one_line(finding.scope),
            cut_middle(_mode_of(finding, several), 30),
            _metric(finding),
            *_numbers(finding),
            finding.view.change,
        ]
        for finding in failed
    ]
    return table(heads, rows, numbers=(4, 5, 6, 7))


def _narrow_failures(failed: Sequence[ComparisonSummary], several: bool, site: int) -> list[str]:
    """Put scope and mode under the site, and the part of a metric under its name."""
    heads = ("site", "metric", "value", "limit", "x limit")
    room = max(site, _NARROW_SITE)
    rows = []
    for finding in failed:
        context = cut_middle(one_line(f"{finding.scope}, {_mode_of(finding, several)}"), room - 2)
        where = f"{site_text(finding.site, finding.layer, room)}\n  {context}"
        rows.append([where, metric_lines(_metric(finding)), *_numbers(finding)])
    return table(heads, rows, numbers=(2, 3, 4))
