"""Texts about a gate: its verdict, its first line, its figures, and the next commands."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from qgate.gate.checks import Check
from qgate.gate.texts import finding
from qgate.gate.updating import hint
from qgate.page.runs import RecordedGate, Run
from qgate.project.gate_kinds import gate_kinds
from qgate.results.check_views import NOTHING, CheckView, view_of
from qgate.results.failure_causes import cause_of, suspect_of
from qgate.results.headlines import verdict_texts
from qgate.results.ranking import needs_accepted, severity
from qgate.results.schema import Record
from qgate.text import counted

FAILED, NEW, UNKNOWN, PASSED, IMPROVED = "failed", "new", "no verdict", "passed", "improved"
VERDICTS = (FAILED, NEW, UNKNOWN, PASSED, IMPROVED)
_FIELDS = frozenset(field.name for field in dataclasses.fields(Check))
# Options that say what a run is about; a gate is run again with those it was run with.
_ABOUT = (
    "mode", "model", "format", "layers", "reference", "baselines", "device",
    "samples", "seqlen", "calib-samples", "calib-seqlen", "percentile-alpha", "calibration",
)  # fmt: skip


def verdict_of(gate: RecordedGate, run: Run) -> str:
    """Return the verdict of a gate; one that passed and then broke has none."""
    if not gate.passed:
        return NEW if gate.is_new else FAILED
    if gate.node in run.broken:
        return UNKNOWN
    return IMPROVED if gate.improved else PASSED


def _check_fields(record: Record, index: int) -> Mapping[str, Any]:
    """Return the fields of a stored check, with the numbers that JSON cannot hold."""
    fields = dict(record["checks"][index])
    lost = record.get("reason") or {}
    for name in ("value", "bound", "against", "times"):
        if fields.get(name) is None and (word := lost.get(f"/checks/{index}/{name}")):
            fields[name] = float(word)
    return fields


def _check_of(record: Record, index: int) -> Check:
    fields = _check_fields(record, index)
    base = {"site": record["site"], "layer": record["layer"], "scope": record["scope"], "order": 0}
    return Check(**{**base, **{name: value for name, value in fields.items() if name in _FIELDS}})


def failed_checks(record: Record) -> list[Check]:
    """Return the failed checks of a record, worst first."""
    indices = [i for i, check in enumerate(record["checks"]) if not check["passed"]]
    indices.sort(key=lambda i: severity(record["checks"][i]), reverse=True)
    return [_check_of(record, index) for index in indices]


def binding_of(gate: RecordedGate) -> Mapping[str, Any] | None:
    """Return the fields of the check that decided a gate or came nearest to its limit."""
    if gate.check is None:
        return None
    return _check_fields(gate.record, gate.record["checks"].index(gate.check))


def gate_line(gate: RecordedGate) -> str:
    """Return `layers.0:output (mode 2-1) is worse than accepted: relative_mse 9.2e-04 > …`."""
    where = f"at {_place(gate.record)}"
    check = binding_of(gate)
    if check is None:
        return f"nothing compared {where}: a gate that compared nothing does not pass"
    if check["passed"]:
        return f"{check['metric']} {view_of(check).now} {where}: {nearness_text(gate)}"
    beyond = gate.failures - 1
    more = f" (+{counted(beyond, 'more failed check')})" if beyond else ""
    site_text, figures = fault_texts(gate.record)
    return f"{site_text}: {figures}{more}"


def fault_texts(record: Record) -> tuple[str, str]:
    """Return `layers.0:output (mode 2-1) is worse than accepted`, and the figures.

    Files of earlier versions have the words of none of their records.
    """
    checks = best_first(record)
    words = record.get("finding") or (finding(checks[0]) if checks else {})
    fault = words.get("fault", "is out of its limit")
    return f"{_place(record)} {fault}", str(words.get("figures", ""))


def _place(record: Record) -> str:
    by_format = {suite for kind in gate_kinds() for suite in kind.by_format}
    label = "format" if record["suite"] in by_format else "mode"
    return f"{record['site']} ({label} {record['mode']})"


def evidence(gate: RecordedGate) -> list[Record]:
    """Sort the failed comparisons of a gate: the place where the error is made comes first."""
    suspects = [(suspect_of(record), index) for index, record in enumerate(gate.failed)]
    suspects.sort(key=lambda pair: (pair[0] is None, pair[0] and pair[0][:2], pair[1]))
    return [gate.failed[index] for _, index in suspects]


def best_first(record: Record) -> list[Check]:
    """Sort the failed checks of a record: limits that need no accepted value first, then worst."""
    return sorted(failed_checks(record), key=lambda check: needs_accepted(vars(check)))


def nearness_text(gate: RecordedGate) -> str:
    """Return `0.98x its limit (budget)`."""
    return view_of(gate.check).distance


def headline(run: Run) -> str:
    """Return the first line of a run: what broke, and how much of it."""
    first, details = headline_parts(run)
    return f"{first}: {details}" if details else first


def headline_parts(run: Run) -> tuple[str, str]:
    """Return `2 of 111 gates failed, 1 fault in int8`, and place and fault."""
    first, also = verdict_texts(run.tally, run.header, run.errors)
    return first, "; ".join(filter(None, [_first_problem(run), *also]))


def headline_figures(run: Run) -> str:
    """Return the figures of a single fault, which stand below a headline that has its place."""
    has_failed = any(not gate.is_new for gate in run.failed)
    return run.causes[0].figures() if has_failed and len(run.causes) == 1 else ""


def _first_problem(run: Run) -> str:
    """Name the fault of a run, or the first two of several, or else what went wrong first."""
    failed = sorted(run.failed, key=lambda gate: gate.is_new)
    if failed and not failed[0].is_new:
        titles = [cause.title() for cause in run.causes[:2]] or [gate_line(failed[0])]
        more = [f"and {len(run.causes) - 2} more"] * (len(run.causes) > 2)
        return "; ".join([*titles, *more])
    if failed:
        return gate_line(failed[0])
    if run.broken:
        node, why = next(iter(run.broken.items()))
        return f"{first_line(why)} ({node})"
    if run.errors:
        return run.errors[0]
    if run.other["failed"]:
        node, why = next(iter(run.other["failures"].items()), ("", ""))
        return f"{node}: {why}".strip(": ")
    changed = updated_text(run.header.get("update"))
    return f"baselines: {changed}" if changed else ""


def updated_text(update: Mapping[str, Any] | None) -> str:
    """Return `37 entries written (failed)`, empty without an update."""
    if not update:
        return ""
    count = update.get("entries", 0)
    entries = f"{count:,} {'entry' if count == 1 else 'entries'}"
    did = "would change" if update.get("dry_run") else "written"
    return f"{f'{entries} {did}' if update.get('done') else 'nothing written'} ({update['which']})"


def first_line(why: object) -> str:
    return (str(why).strip().splitlines() or [""])[0]


def view_texts(check: Mapping[str, Any] | None) -> CheckView:
    """Return the texts of a check with the signs of a page."""
    view = view_of(check)
    return view._replace(
        now=_typeset(view.now), limit=_typeset(view.limit), against=_typeset(view.against),
        change=_typeset(view.change), far=_times_sign(view.far),
    )  # fmt: skip


def _typeset(text: str) -> str:
    if text in (NOTHING, ""):
        return "–"
    return _times_sign(text).replace("<=", "≤").replace(">=", "≥")


def _times_sign(text: str) -> str:
    return f"{text[:-1]}×" if text.endswith("x") and text[-2:-1].isdigit() else text


# What to type next --------------------------------------------------------------------------------


def rerun_command(run: Run, gate: RecordedGate) -> str:
    """Return the command that runs one gate again.

    A file of an earlier version has none: then options are taken from the command of the run.
    """
    if commands := gate.record.get("commands"):
        return str(commands["again"])
    return shlex.join(["pytest", gate.node, *_options(run.header.get("command") or ())])


def accept_command(run: Run, gate: RecordedGate) -> tuple[str, str]:
    """Return the command that accepts the values of a gate, or the reason that none does."""
    failed = [check for record in gate.failed for check in failed_checks(record)]
    cause = cause_of(run.causes, gate.node)
    if cause is not None and gate.node != cause.suspect.node and not cause.is_acceptable:
        return "", f"mend {cause.place} first: this gate follows from it"
    if why := hint(tuple(failed)):
        return "", why
    if not any(check.limit.is_acceptable for check in failed):
        return "", ""
    if commands := gate.record.get("commands"):
        return str(commands["accept"]), ""
    options = _options(run.header.get("command") or ())
    prefix = "qgate-" if any(option.startswith("--qgate-") for option in options) else ""
    return f"{rerun_command(run, gate)} --{prefix}update-baselines", ""


def _options(command: Iterable[object]) -> list[str]:
    subjects = {name: option for kind in gate_kinds() for name, option in kind.settings.items()
                if option.about == "subject"}  # fmt: skip
    options: list[str] = []
    awaited = 0
    for word in map(str, command):
        name, equals, _ = word.partition("=")
        option = name[2:].removeprefix("qgate-")
        if awaited:
            options.append(word)
            awaited -= 1
        elif word.startswith("--") and option in (*_ABOUT, *subjects):
            options.append(word)
            awaited = 0 if equals else subjects[option].length or 1 if option in subjects else 1
    return options
