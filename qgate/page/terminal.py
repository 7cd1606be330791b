"""A run on a terminal: counts, a table of modes, the failures, worst first."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tabulate import tabulate

from qgate.metrics import METRICS
from qgate.results.coverage import (
    coverage_in,
    covered_texts,
    extent_of,
    lacks_gates,
    partial_head,
    partial_text,
    unmet_text,
)
from qgate.results.failure_causes import FailureCause
from qgate.results.run_facts import (
    NOT_FINISHED,
    RUN_FACTS,
    ended_badly,
    is_finished,
    least_power_text,
    other_test_lines,
    other_tests_of,
    other_tests_text,
)
from qgate.results.summary import ComparisonSummary, ModeSummary, Tally, verdict_texts
from qgate.text import beginning, counted, for_terminal, one_line

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


# Lines that fit a width, and never cut the layer out of a site's name -----------------------------

CUT = "…"


def display_width(text: str) -> int:
    """Count the columns of a line: two for wide characters, none for combining ones."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a plain table; `numbers` are columns that align right."""
    listed = [list(heads), *([for_terminal(cell) for cell in row] for row in rows)]
    # Heads are a row like others: those of the library make columns wider than what is in them.
    widths = [max(widest(str(row[at]).split("\n")) for row in listed) for at in range(len(heads))]
    listed.insert(1, ["-" * width for width in widths])
    aligned = ["right" if column in numbers else "left" for column in range(len(heads))]
    text = tabulate(
        listed, tablefmt="plain", disable_numparse=True, colalign=aligned, preserve_whitespace=True
    )
    return [line.rstrip() for line in str(text).splitlines()]


def widest(lines: Sequence[str]) -> int:
    return max(map(display_width, lines), default=0)


def fit_table(
    layouts: Sequence[tuple[int, Callable[[int], list[str]]]], width: int, sites: Iterable[str]
) -> list[str]:
    """Return the first layout that fits with readable sites, else the last one clipped.

    layouts  the least width of a site, and the lines with sites of a width
    """
    longest = max((display_width(one_line(site)) for site in sites), default=0)
    lines: list[str] = []
    for least, layout in layouts:
        site, least = longest, min(longest, least)
        lines = layout(site)
        while widest(lines) > width and site > least:
            site = max(least, site - (widest(lines) - width))
            lines = layout(site)
        if widest(lines) <= width:
            return lines
    return [clip_line(line, width) for line in lines]


def clip_line(line: str, width: int) -> str:
    """Return the start of a line that is too long for the terminal."""
    if display_width(line) <= width:
        return line
    return f"{_end(line[::-1], width - 1)[::-1]}{CUT}"


def cut_middle(text: str, width: int) -> str:
    """Keep the ends of a name, more of the last one, which says more."""
    if display_width(text) <= width:
        return text
    room = width - 1
    tail = _end(text, max(1, room * 2 // 3))
    head = _end(text[::-1], room - display_width(tail))[::-1]
    return f"{head}{CUT}{tail}"


def _end(text: str, width: int) -> str:
    """Return as much of the end of a text as fits."""
    start, room = len(text), width
    while start and (room := room - display_width(text[start - 1])) >= 0:
        start -= 1
    return text[start:]


def site_text(site: str, layer: str, width: int) -> str:
    """Return a site in `width` columns: its layer whole, then as much of its end as fits."""
    site, layer = one_line(site), one_line(layer)
    if display_width(site) <= width:
        return site
    start = site.find(layer) if layer else -1
    if start < 0:
        return cut_middle(site, width)
    port = site[start + len(layer) :]
    room = width - display_width(layer) - bool(start)
    if room < 2:
        return clip_line(layer, width)
    lead = CUT if start else ""
    if display_width(port) <= room:
        return f"{lead}{layer}{port}"
    return f"{lead}{layer}{CUT}{_end(port, room - 1)}"


def metric_lines(metric: str) -> str:
    """Return a metric and, on a line of its own, its part: together they are wide as a site."""
    kind = METRICS.find(metric)
    return f"{kind.base}\n  @{kind.part}" if kind.part else one_line(metric)


# In a few lines: what -v and the page say at length -----------------------------------------------

_REST = " (-v says all)"


def green_lines(
    tally: Tally, width: int, header: Mapping[str, Any], unasked: Sequence[str]
) -> list[TerminalLine]:
    """Return the end of a run in which every gate that was asked for passed, in a few lines."""
    power_words = least_power_text(header)
    details = [f"  {text}" for text in filter(None, (power_words, improved_text(tally)))]
    details += [f"  not asked for: {', '.join(unasked)} (-v says how)"] if unasked else []
    unmet = unmet_text(coverage_in(header))
    noted = [f"  {words}" for words in (*_fact_texts(header, 2 * width - 2), unmet) if words]
    return [
        *wrapped_lines([verdict_texts(tally, header)[0]], width, "green"),
        *wrapped_lines(noted, width, "yellow"),
        *wrapped_lines(details, width),
    ]


def _fact_texts(header: Mapping[str, Any], room: int) -> list[str]:
    """Return warnings and notes, those that are longer than the room in brief."""
    texts = []
    for fact in RUN_FACTS:
        # How much was compared stands in the verdict.
        if not fact.tone_of(header) or fact.lines is covered_texts:
            continue
        lines = fact.lines(header)
        if fact.brief is not None and max(map(len, lines), default=0) > room:
            lines = [line + _REST for line in fact.brief(header)]
        texts += [
            beginning(line, room - len(_REST)) + _REST if len(line) > room else line
            for line in lines
        ]
    return texts


def red_lines(
    tally: Tally, width: int, header: Mapping[str, Any], folder: str
) -> list[TerminalLine]:
    """Return the end of a run in which gates failed: causes, counts, where else all is right.

    folder   of the scripts that compare tensors again, from where the run was started
    """
    causes = tally.causes
    blocks = [
        line
        for number, cause in enumerate(causes[:_CAUSES])
        for line in _cause_block("failed" if number else "cause", cause, width, folder)
    ]
    return [
        *blocks,
        *hidden_cause_lines(len(causes) - _CAUSES),
        *wrapped_lines(_unmeasured_texts(causes, header), width, "yellow"),
        *_refusal_lines(causes, width),
        *unknown_lines(tally, width),
        *partial_lines(header),
        *wrapped_lines([verdict_texts(tally, header)[0]], width, "red"),
        *wrong_lines(tally, width, header),
        *wrapped_lines(_fact_texts(header, max(width, NARROWEST)), width, "yellow"),
    ]


def _cause_block(word: str, cause: FailureCause, width: int, folder: str) -> list[TerminalLine]:
    """Return what is wrong, the gates that follow, the code, and what compares it again."""
    suspect = cause.suspect
    see = f"  see {suspect.code}" if suspect.code else ""
    script = (
        f"  again: python {folder}/{suspect.script}/run.py" if suspect.script and folder else ""
    )
    steps = [f"{see}{script}"] if see and len(see) + len(script) <= width else [see, script]
    followers = f"  {cause.followers_text}" if cause.followers_text else ""
    return [
        *wrapped_lines([f"{word}: {cause.sentence()}"], width, "red"),
        *wrapped_lines([followers] if followers else [], width),
        *map(TerminalLine, filter(None, steps)),  # whole, to be copied
    ]


def _unmeasured_texts(causes: Sequence[FailureCause], header: Mapping[str, Any]) -> list[str]:
    """Say that a gate which was left out may name the cause, where no local error was found."""
    is_sought = causes and not any(cause.suspect.is_local or cause.plan for cause in causes)
    if not is_sought or not lacks_gates(extent_of(header)):
        return []
    return ["a gate that this run left out may name the cause: run all of the mode"]


def _refusal_lines(causes: Sequence[FailureCause], width: int) -> list[TerminalLine]:
    """Say what to do about causes that no update accepts."""
    advice = [cause.suspect.advice for cause in causes if not cause.is_acceptable]
    texts = "; ".join(dict.fromkeys(filter(None, advice)))
    return wrapped_lines([f"cannot be accepted: {texts}"] if texts else [], width, "red")


def is_green(tally: Tally, header: Mapping[str, Any]) -> bool:
    """Tell if all that a run held passed, and it came to its end; of a shard another tells."""
    return bool(
        tally.counts.passed
        and not (tally.counts.failed or tally.unknown)
        and not wrong_lines(tally, NARROWEST, header)
        and not (header.get("shard") or partial_head(header))
    )
