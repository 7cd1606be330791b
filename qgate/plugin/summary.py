"""The end of a run: lines on the terminal, annotations for GitHub, and the page."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError, sentence_of
from qgate.loading import LateModule
from qgate.page.runs import Run, read_run
from qgate.page.terminal import (
    NARROWEST,
    TerminalLine,
    error_lines,
    green_lines,
    is_green,
    lines_without_records,
    red_lines,
    summary,
    wrapped_lines,
)
from qgate.plugin.records import joined_facts, records_file
from qgate.plugin.runs import SuiteRun, remove_stale, selection_of
from qgate.results import Tally, github_annotations, github_error, markdown_summary
from qgate.results.coverage import partial_text
from qgate.results.failure_causes import cause_of, origin_of, suspect_of
from qgate.results.kinds import barred_modes
from qgate.results.run_facts import other_test_lines, other_tests_of
from qgate.results.summary import set_up_lines
from qgate.storage.out_folders import REPRODUCTIONS
from qgate.text import beginning, counted, for_terminal, one_line

if TYPE_CHECKING:
    from qgate.page import accepted_changes as accepted_changes
    from qgate.page import pages as pages
else:
    pages = LateModule("qgate.page.pages")
    accepted_changes = LateModule("qgate.page.accepted_changes")


_MOST, _SCRIPTS = 20, 3
_ANNOTATIONS = 50


def page_run(run: SuiteRun) -> Run | None:
    """Return the run as it was written; None where no gate ran, or nothing could be written."""
    if run.written and run.page_run is None:
        run.page_run = read_run(records_file(run))
    return run.page_run


def draw(run: SuiteRun) -> None:
    """Make the page of a run; whatever keeps it from being made is an error, and is not green."""
    own = run.options.run
    if own.no_report:
        return
    page = records_file(run).with_name("report.html")
    try:
        pages.write_page(page, page_run(run), plots=own.plots)  # type: ignore[arg-type]
        run.page = page
    except Exception as error:
        is_told = isinstance(error, QgateError | OSError)
        text = sentence_of(error) if is_told else repr(error)
        run.errors.append(f"{page.name} could not be made: {text}")
        remove_stale(page.parent, "results.jsonl", "results.csv")


def tell(reporter: Any, run: SuiteRun) -> None:
    """Write the section of the summary."""
    if run.selection.refused:
        # Of its own refusal pytest prints the error; workers only tell theirs.
        for reason in () if selection_of(run.options.config).refused else run.selection.refused:
            _write(reporter, f"ERROR: {reason}", "red")
        return
    models = joined_facts(run.parts).models
    about = ", ".join(f"{name} on {of['device']}" for name, of in sorted(models.items()))
    title = one_line(f"qgate: {about or ', '.join(run.options.models)}")
    reporter.write_sep("=", for_terminal(title))
    rows, width = run.rows, reporter._tw.fullwidth
    for line in _lines(run, rows, width):
        _write(reporter, line.text, line.color)
    for text in dict.fromkeys(run.errors):
        _write(reporter, f"ERROR: {text}", "red")
    _tell_github(reporter, run, rows, about)


def _write(reporter: Any, text: str, color: str = "") -> None:
    """Write a line; a command is one only where `_tell_github` means it."""
    reporter.write_line(for_terminal(one_line(text)), **({color: True} if color else {}))


def _lines(run: SuiteRun, rows: Sequence[Mapping[str, Any]], width: int) -> list[TerminalLine]:
    tally = Tally(rows)
    if _is_short(run, tally):
        lines = green_lines(tally, width, run.header, [*run.selection.unasked])
        closing = [*run.selection.notes, *run.unused, *run.underflow, *_written(run)[-1:]]
        return lines + wrapped_lines([f"  {text}" for text in closing], width)
    set_up = error_lines(_first(set_up_lines(run.broken)))
    is_red = tally.counts.failed or (rows and run.broken)
    if _is_brief(run) and is_red and not run.header.get("shard"):
        header = {**run.header, "broken": run.broken}
        lines = red_lines(tally, width, header, _scripts_folder(run))
        sentences = [*run.selection.notes, *run.unused, *run.underflow]
        scripts = [] if any(cause.suspect.script for cause in tally.causes) else _scripts(run)[:1]
        closing = [f"  {text}" for text in (*_written(run)[-1:], *scripts)]
        return set_up + lines + wrapped_lines([*sentences, *closing], width)
    lines = summary(tally, width, run.header) if rows else lines_without_records(width, run.header)
    return lines + set_up + wrapped_lines(_sentences(run), width)


def _is_short(run: SuiteRun, tally: Tally) -> bool:
    """Tell if all that was held passed, and -v does not ask for the rest."""
    news = run.errors or run.broken or run.updated or run.stale
    return _is_brief(run) and not news and is_green(tally, run.header)


def _is_brief(run: SuiteRun) -> bool:
    """Tell if neither -v nor an update asks for all that there is to say."""
    return run.options.config.get_verbosity() <= 0 and run.options.update is None


def _sentences(run: SuiteRun) -> list[str]:
    """Return closing sentences: notes, updates, and where the records are."""
    lines = run.selection.texts
    if run.selection.empty:
        lines.append("no gate ran: nothing that was asked for fits")
    elif run.idle:
        lines.append("no gate ran: all of them were skipped")
    if run.updated:
        verb = "would change" if run.options.dry_run else "written"
        lines.append(f"baselines: {len(run.changes)} entries {verb}")
        lines += [f"  {line}" for line in _first(accepted_changes.mode_sentences(run.accepted))]
        changes = run.changes
        if len(changes) > _MOST:  # new entries are counted above: what replaces another is news
            changes = [change for change in changes if change.old is not None]
        lines += [f"  {line}" for line in _first([str(change) for change in changes])]
    elif run.options.update is not None:
        lines.append("baselines: nothing written")
    if run.stale:
        named = ", ".join(run.stale)
        lines.append(f"stale until they are refreshed: the accepted errors of {named}")
    return [*lines, *run.unused, *run.underflow, *_written(run), *_scripts(run)]


def _written(run: SuiteRun) -> list[str]:
    """Say where the records and the page are, the page last."""
    if run.folder is None or run.errors:
        return []
    folder = os.path.relpath(run.folder, run.options.config.invocation_params.dir)
    lines = [f"records in {folder}/results.jsonl and {folder}/results.csv"]
    return lines + ([f"report in {folder}/{run.page.name}"] if run.page is not None else [])


def _scripts(run: SuiteRun) -> list[str]:
    """Say how tensors of the first failures are compared again."""
    names = [str(row["reproduction"]) for row in run.rows if "reproduction" in row]
    folder = _scripts_folder(run)
    return [
        f"compare the tensors again: python {folder}/{name}/run.py"
        for name in names[:_SCRIPTS]
        if folder
    ]


def _scripts_folder(run: SuiteRun) -> str:
    """Return the folder of the scripts, from where the run was started; nothing without one."""
    if run.folder is None or run.errors:
        return ""
    folder = os.path.relpath(run.folder, run.options.config.invocation_params.dir)
    return f"{folder}/{REPRODUCTIONS}"


class _Brief:
    """The text of a failure in a few lines."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def toterminal(self, writer: Any) -> None:
        for line in self.lines:
            writer.line(line)


def shorten(run: SuiteRun, failed: list[Any], width: int) -> None:
    """Put failures that are causes first, and leave two lines of each: what is wrong, and why.

    Of tests that lack accepted errors the first is told that a command records; the others go from
    `failed` to `run.unlisted`. -v, pages and files have the whole texts.
    """
    if not (failed and _is_brief(run)):
        return
    tally = Tally(run.rows)
    causes, refused = tally.causes, tally.refused
    first = {cause.suspect.node: number for number, cause in reversed([*enumerate(causes)])}
    failed.sort(key=lambda report: first.get(report.nodeid, len(causes)))
    lacking: dict[str, list[Any]] = {}
    for report in failed:
        if not hasattr(report, "qgate"):
            continue
        cause = cause_of(causes, report.nodeid)
        lines = str(report.longrepr).splitlines() or [""]
        if report.nodeid in first:
            # pytest's short summary begins with it: a node id alone fills a line.
            title = causes[first[report.nodeid]].title()
            report.qgate_cause = beginning(title, max(width, NARROWEST) - len("FAILED  -"))
            if cause is None or cause.plan is None:
                report.longrepr = _Brief(lines[0], *_advice(lines))
            continue
        if cause is None:
            wrong = [row for row in report.qgate if not row["passed"]]
            if wrong and not any(map(suspect_of, wrong)):
                lacking.setdefault(lines[-1] if causes else "", []).append(report)
            continue
        finding = re.split("; the same as at |; follows from ", lines[0])[0]
        report.longrepr = _Brief(finding, f"  {origin_of(causes, report.nodeid)}")
        run.following.append(report)
    for one, *hidden in lacking.values():
        lines = str(one.longrepr).splitlines()
        if cause := refused.get((one.qgate[0]["model"], one.qgate[0]["mode"])):
            lines[1:] = [f"  to record it, mend {cause.place} first"]
        elif hidden:
            lines[-1] = _joined_command([one, *hidden])
        if hidden:
            count = 1 + len(hidden)
            lines[0] = f"{counted(count, 'test')} have no accepted errors yet; -v names all"
            one.qgate_cause = lines[0].partition(";")[0]
        one.longrepr = _Brief(*lines)
        run.unlisted += hidden
    unlisted = set(map(id, run.unlisted))
    failed[:] = [report for report in failed if id(report) not in unlisted]


def _joined_command(reports: Sequence[Any]) -> str:
    """Return the command that records what several tests lack: of all their models and modes."""
    commands = [str(report.longrepr).splitlines()[-1] for report in reports]
    option = re.compile(r" (--(?:qgate-)?(?:model|mode|format)) ('[^']*'|\S+)")
    values: dict[str, dict[str, None]] = {}
    for name, value in (pair for command in commands for pair in option.findall(command)):
        values.setdefault(name, {})[value] = None
    start = "  to record it: pytest "
    paths = [command.partition(" --")[0].removeprefix(start) for command in commands]
    _, dashes, alike = option.sub("", commands[0]).partition(" --")
    before, dashes, updating = f"{dashes}{alike}".rpartition(" --")
    before = f"{start}{' '.join(dict.fromkeys(paths))}{before}"
    joined_options = "".join(f" {name} {','.join(values[name])}" for name in values)
    return f"{before}{joined_options}{dashes}{updating}"


def short_summary(run: SuiteRun, failed: list[Any]) -> None:
    """Leave out failures that follow from others where pytest lists all by their node ids."""
    hidden = set(map(id, run.following))
    run.unlisted += run.following
    failed[:] = [report for report in failed if id(report) not in hidden]


def count_written(run: SuiteRun, stats: dict[str, list[Any]]) -> None:
    """Count tests as passed whose values an update left out."""
    updated = stats.get("updated", [])
    models = {str(row["model"]) for report in updated for row in report.qgate}
    barred = {(model, mode) for model in models for mode in barred_modes(run.rows, model)}
    for report in [*updated]:
        modes = {(str(row["model"]), str(row["mode"])) for row in report.qgate}
        if not run.changes or modes <= barred:
            updated.remove(report)
            stats.setdefault("passed", []).append(report)


def _advice(lines: Sequence[str]) -> Sequence[str]:
    """Return what to do about a failure: what follows its baseline, or its last line.

    A baseline of another machine may be why it fails.
    """
    after = (at for at, line in enumerate(lines, 1) if line.startswith("  baseline  "))
    start = next(after, max(len(lines) - 1, 1))
    return lines[start - ("(accepted on" in lines[start - 1] and start > 1) :]


def _first(lines: list[str]) -> list[str]:
    hidden = len(lines) - _MOST
    return [*lines[:_MOST], *([f"and {hidden} more"] if hidden > 0 else [])]


def _tell_github(
    reporter: Any, run: SuiteRun, rows: Sequence[Mapping[str, Any]], about: str
) -> None:
    """Write the summary of the step, and an annotation for every failed test, worst first."""
    broken = [*set_up_lines(run.broken), *run.errors]
    partial = list(filter(None, [partial_text(run.header)]))
    step = os.environ.get("GITHUB_STEP_SUMMARY")
    if step:
        try:
            with Path(step).open("a", encoding="utf-8") as file:
                file.write(markdown_summary(rows, broken=broken, about=about, header=run.header))
        except OSError as error:
            _write(reporter, f"GITHUB_STEP_SUMMARY could not be written: {error}", "red")
    if os.environ.get("GITHUB_ACTIONS"):
        other = other_test_lines(other_tests_of(run.header), _MOST)
        gates = github_annotations(rows)
        errors = [github_error(text) for text in [*partial, *broken, *other]]
        lines = [*gates[:1], *errors, *gates[1:]]
        for line in lines[:_ANNOTATIONS]:
            reporter.write_line(line)
