"""A run on a terminal: counts, a table of modes, the failures; worst first, as wide as there is
room."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qgate.page.tables import (
    clipped,
    far_text,
    limit_text,
    metric_lines,
    middle_cut,
    shown_width,
    site_text,
    table,
    value_text,
    widest,
)
from qgate.results.others import (
    NOT_FINISHED,
    ended_badly,
    is_finished,
    other_lines,
    others_of,
    others_text,
)
from qgate.results.ranking import check_text
from qgate.results.summary import Finding, ModeSummary, Tally, change_text
from qgate.text import one_line

Color = Literal["", "red", "green", "yellow"]
NARROWEST = 60
_MODES, _FAILURES, _OTHERS = 10, 10, 5
_NARROW_SITE = 24
_WIDE_SITE = 32
# `::error` at the start of a line, `##[error]` and `##vso[…` anywhere.
_COMMAND = re.compile(r"(^\s*|#(?=#(?:vso)?\[))(::|#(?=(?:vso)?\[))")
_NO_HEADER: Mapping[str, Any] = {}
_ANSI = {"red": "\x1b[31m", "green": "\x1b[32m", "yellow": "\x1b[33m"}


@dataclass(frozen=True)
class TerminalLine:
    """One line, and its color where there are colors; never a command to a CI service that reads
    them from the log, whatever a site is called."""

    text: str
    color: Color = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _COMMAND.sub(r"\1'\2", self.text))

    def painted(self, colors: bool) -> str:
        start = _ANSI.get(self.color, "") if colors and self.text else ""
        return f"{start}{self.text}\x1b[0m" if start else self.text


def plain(texts: Sequence[str], width: int, color: Color = "") -> list[TerminalLine]:
    """Sentences, broken between words where they are longer than a line."""
    return [
        TerminalLine(each, color)
        for text in texts
        for each in _folded(one_line(text), max(width, NARROWEST))
    ]


def errors(texts: Sequence[str]) -> list[TerminalLine]:
    """One line each, however long: logs are searched for them, and a terminal folds by itself."""
    return [TerminalLine(one_line(text), "red") for text in texts]


def _folded(text: str, width: int) -> list[str]:
    lines, rest = [], text
    while len(rest) > 4 * width or shown_width(rest) > width:
        cut = rest.rfind(" ", width // 3, width + 1)
        # A word that is longer than half a line is cut where the line ends.
        at = cut if cut > 0 else width
        while shown_width(rest[:at]) > width:
            at -= 1
        lines.append(rest[:at])
        rest = "  " + rest[at:].lstrip()
    return [*lines, rest]


def summary(
    tally: Tally,
    width: int,
    header: Mapping[str, Any] = _NO_HEADER,
    *,
    modes: int = _MODES,
    rows: int = _FAILURES,
) -> list[TerminalLine]:
    """The end of `pytest suites`: counts, modes, a line for every failure; of the header what else
    failed. Other tests are named by pytest."""
    width = max(width, NARROWEST)
    lines = [*counts_lines(tally, width, header), *mode_table(tally.modes, width, modes)]
    lines += unknown_lines(tally.unknown, width)
    known = [each for each in tally.failures if not each.is_new]
    for each in known[:rows]:
        lines += failure_lines(each, width)
    rest = tally.counts.failed - sum(tally.unknown.values()) - len(known[:rows])
    if rest > 0:
        lines.append(TerminalLine(f"+{rest} more in results.jsonl"))
    return lines + improved_lines(tally, width)


def tables(
    tally: Tally,
    width: int,
    header: Mapping[str, Any] = _NO_HEADER,
    *,
    modes: int = 40,
    rows: int = 20,
) -> list[TerminalLine]:
    """What `qgate report` prints: the same, with the failures as a table."""
    width = max(width, NARROWEST)
    lines = [*counts_lines(tally, width, header), *mode_table(tally.modes, width, modes)]
    lines += errors(other_lines(others_of(header), _OTHERS))
    lines += unknown_lines(tally.unknown, width)
    known = [each for each in tally.failures if not each.is_new]
    if known:
        lines += [TerminalLine(""), TerminalLine("Failures, worst first", "red")]
        lines += [TerminalLine(text) for text in _failure_table(known[:rows], width)]
    rest = tally.counts.failed - sum(tally.unknown.values()) - len(known[:rows])
    if rest > 0:
        lines.append(TerminalLine(f"+{rest} more in results.jsonl"))
    return lines + improved_lines(tally, width)


def counts_lines(
    tally: Tally, width: int, header: Mapping[str, Any] = _NO_HEADER
) -> list[TerminalLine]:
    """Those of gates; where all of them passed, what else went wrong stands before."""
    counts = tally.counts
    color: Color = "red" if counts.failed or not counts.passed else "green"
    lines = plain([counts.text()], width, color)
    also = wrong_lines(tally, width, header)
    return [*lines, *also] if counts.failed else [*also, *lines]


def wrong_lines(tally: Tally, width: int, header: Mapping[str, Any]) -> list[TerminalLine]:
    """What went wrong beside the gates."""
    wrong = ["" if is_finished(header) else NOT_FINISHED, others_text(others_of(header))]
    if not (tally.counts.failed or header.get("broken") or any(wrong)):
        wrong.append(ended_badly(header))
    return plain(list(filter(None, wrong)), width, "red")


def unknown_lines(unknown: Mapping[tuple[str, str], int], width: int) -> list[TerminalLine]:
    """What only lacks errors that were accepted: nothing is known to be wrong."""
    if not unknown:
        return []
    names = [one_line(f"{model} {mode}") for model, mode in unknown]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    count = sum(unknown.values())
    what = f"{count} comparison{'' if count == 1 else 's'} ({shown})"
    told = f"no accepted errors yet for {what}: record them with --update-baselines"
    return plain([told], width, "yellow")


def improved_lines(tally: Tally, width: int) -> list[TerminalLine]:
    count = tally.counts.improved
    return plain([f"{count} improved: bank it with --update-baselines"], width) if count else []


def failure_lines(finding: Finding, width: int) -> list[TerminalLine]:
    """`failed: SITE (SCOPE, MODEL, mode M): METRIC VALUE, limit <= BOUND, 26.6x its limit`; on two
    lines where one is too narrow, the layer always whole."""
    what = one_line(check_text(finding.check)) if finding.check else "nothing compared"
    told = one_line(f"({finding.scope}, {finding.model}, mode {finding.mode})")
    site = one_line(finding.site)
    line = f"failed: {site} {told}: {what}"
    if shown_width(line) <= width:
        return [TerminalLine(line, "red")]
    room = width - shown_width(f"failed:  {told}:")
    if room < min(shown_width(site), _NARROW_SITE):
        told = middle_cut(told, width - shown_width("failed:  :") - _NARROW_SITE)
        room = width - shown_width(f"failed:  {told}:")
    head = f"failed: {site_text(site, finding.layer, room)} {told}:"
    return [TerminalLine(clipped(head, width), "red"), *_indented(what, width)]


def _indented(text: str, width: int) -> list[TerminalLine]:
    folded = _folded(text, width - 8)
    return [TerminalLine(f"{' ' * 8}{each.strip()}", "red") for each in folded]


# Tables ------------------------------------------------------------------------------------------


def mode_table(modes: Sequence[ModeSummary], width: int, most: int) -> list[TerminalLine]:
    """One row per mode: how many of its gates failed, the worst against its limit, what it
    carries."""
    if not modes:
        return []
    several = len({mode.model for mode in modes}) > 1
    shown = modes[:most]
    lines = _best(
        [
            lambda site: _wide_modes(shown, several, site, True),
            lambda site: _wide_modes(shown, several, site, False),
            lambda site: _narrow_modes(shown, several, site),
        ],
        width,
        [each.worst for each in shown if each.worst],
    )
    return [*map(TerminalLine, lines), *_more(len(modes) - len(shown), "more mode")]


def _more(rest: int, what: str) -> list[TerminalLine]:
    return [TerminalLine(f"+{rest} {what}{'s' if rest > 1 else ''}")] if rest > 0 else []


def _best(
    layouts: Sequence[Callable[[int], list[str]]], width: int, found: Sequence[Finding]
) -> list[str]:
    """The first layout that fits with sites at a width that still tells; they take what is left."""
    longest = max((shown_width(one_line(each.site)) for each in found), default=0)
    for layout in layouts:
        last = layout is layouts[-1]
        least = min(longest, 12 if last else _WIDE_SITE)
        site = longest
        lines = layout(site)
        while widest(lines) > width and site > least:
            site = max(least, site - (widest(lines) - width))
            lines = layout(site)
        if last or widest(lines) <= width:
            return [clipped(each, width) for each in lines]
    return []


def _wide_modes(modes: Sequence[ModeSummary], several: bool, site: int, beside: bool) -> list[str]:
    """A line for each, and what it carries beside it or below."""
    rows = []
    for mode in modes:
        worst = mode.worst
        cells = ["-"] * 5
        if worst is not None:
            where = f"{site_text(worst.site, worst.layer, site)} ({one_line(worst.scope)})"
            cells = [where, _metric(worst), *_numbers(worst)]
        name = one_line(f"{mode.model} {mode.mode}" if several else mode.mode)
        rows.append([middle_cut(name, 36), f"{mode.failed}/{mode.gates}", *cells])
    heads = ["mode", "failed", "worst against its limit", "metric", "value", "limit", "x limit"]
    if beside:
        rows = [[*row, _carried(mode) or "-"] for row, mode in zip(rows, modes, strict=True)]
        return table([*heads, "carries"], rows, numbers=(1, 4, 5, 6))
    return _below(table(heads, rows, numbers=(1, 4, 5, 6)), modes, 1)


def _below(lines: list[str], modes: Sequence[ModeSummary], each: int) -> list[str]:
    """What modes carry, on lines of their own under their rows."""
    made = lines[:2]
    for place, mode in enumerate(modes):
        start = 2 + place * each
        made += lines[start : start + each]
        if carried := _carried(mode):
            made.append(f"    carries {carried}")
    return made


def _carried(mode: ModeSummary) -> str:
    return one_line(", ".join(each.text() for each in mode.carried))


def _narrow_modes(modes: Sequence[ModeSummary], several: bool, site: int) -> list[str]:
    """The metric under the site, the model under the mode, what it carries below."""
    rows = []
    for mode in modes:
        worst = mode.worst
        cells = ["-\n ", "-", "-", "-"]
        if worst is not None:
            where = site_text(worst.site, worst.layer, max(site, _NARROW_SITE))
            room = max(site, _NARROW_SITE)
            metric = f"{_metric(worst)} {one_line(worst.scope)}"
            metric = metric if shown_width(metric) <= room else middle_cut(_metric(worst), room)
            cells = [f"{where}\n{metric}", *_numbers(worst)]
        model = middle_cut(one_line(mode.model), 12) if several else " "
        name = f"{middle_cut(one_line(mode.mode), 14)}\n  {model}"
        rows.append([name, f"{mode.failed}/{mode.gates}", *cells])
    heads = ("mode", "failed", "worst against its limit", "value", "limit", "x limit")
    return _below(table(heads, rows, numbers=(1, 3, 4, 5)), modes, 2)


def _metric(finding: Finding) -> str:
    return (one_line(finding.check["metric"]) if finding.check else "") or "-"


def _numbers(finding: Finding) -> list[str]:
    return [value_text(finding), limit_text(finding), far_text(finding).removesuffix("x")]


def _failure_table(failed: Sequence[Finding], width: int) -> list[str]:
    several = len({each.model for each in failed}) > 1
    return _best(
        [
            lambda site: _wide_failures(failed, several, site),
            lambda site: _narrow_failures(failed, several, site),
        ],
        width,
        failed,
    )


def _mode_of(finding: Finding, several: bool) -> str:
    return one_line(f"{finding.model} {finding.mode}" if several else finding.mode)


def _wide_failures(failed: Sequence[Finding], several: bool, site: int) -> list[str]:
    heads = ("site", "scope", "mode", "metric", "value", "limit", "x limit", "change")
    rows = [
        [
            site_text(each.site, each.layer, site),
            one_line(each.scope),
            middle_cut(_mode_of(each, several), 30),
            _metric(each),
            *_numbers(each),
            change_text(each) or "-",
        ]
        for each in failed
    ]
    return table(heads, rows, numbers=(4, 5, 6, 7))


def _narrow_failures(failed: Sequence[Finding], several: bool, site: int) -> list[str]:
    """Scope and mode under the site, the part of a metric under its name."""
    heads = ("site", "metric", "value", "limit", "x limit")
    room = max(site, _NARROW_SITE)
    rows = []
    for each in failed:
        told = middle_cut(one_line(f"{each.scope}, {_mode_of(each, several)}"), room - 2)
        where = f"{site_text(each.site, each.layer, room)}\n  {told}"
        rows.append([where, metric_lines(_metric(each)), *_numbers(each)])
    return table(heads, rows, numbers=(2, 3, 4))
