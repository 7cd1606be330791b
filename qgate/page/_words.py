"""What a gate says of itself: its verdict, its first line, its figures, and what to type next."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from qgate.gate.checks import ACCEPTABLE, Check
from qgate.gate.texts import cells_of, sentence
from qgate.gate.updating import hint
from qgate.metrics import METRICS
from qgate.page.runs import RecordedGate, Run
from qgate.results.others import NOT_FINISHED, others_text
from qgate.results.ranking import severity, times_figure, times_text
from qgate.results.schema import Record

FAILED, NEW, UNKNOWN, PASSED, IMPROVED = "failed", "new", "no verdict", "passed", "improved"
VERDICTS = (FAILED, NEW, UNKNOWN, PASSED, IMPROVED)
# Of these suites the mode of a record is a format.
_OF_FORMATS = ("overflow", "scaling", "dump_overflow")
_FIELDS = frozenset(field.name for field in dataclasses.fields(Check))
# Options that say what a run is about; a gate is run again with those it was run with.
_ABOUT = frozenset(
    [
        "mode",
        "model",
        "format",
        "layers",
        "dump",
        "dump-name",
        "reference",
        "baselines",
        "device",
        "samples",
        "seqlen",
        "calib-samples",
        "calib-seqlen",
        "percentile-alpha",
        "calibration",
    ]
)


def verdict_of(gate: RecordedGate, run: Run) -> str:
    """A gate that passed and then broke has no verdict: nobody knows what it would have said."""
    if not gate.passed:
        return NEW if gate.is_new else FAILED
    if gate.node in run.broken:
        return UNKNOWN
    return IMPROVED if gate.improved else PASSED


def check_of(record: Record, place: int) -> Check:
    """A stored check as it was judged, with the numbers that JSON could not hold."""
    given = dict(record["checks"][place])
    lost = record.get("reason") or {}
    for name in ("value", "bound", "against", "times"):
        if given.get(name) is None and (word := lost.get(f"/checks/{place}/{name}")):
            given[name] = float(word)
    base = {"site": record["site"], "layer": record["layer"], "scope": record["scope"], "order": 0}
    return Check(**{**base, **{name: each for name, each in given.items() if name in _FIELDS}})


def failed_checks(record: Record) -> list[Check]:
    """Worst first."""
    places = [i for i, each in enumerate(record["checks"]) if not each["passed"]]
    places.sort(key=lambda i: severity(record["checks"][i]), reverse=True)
    return [check_of(record, place) for place in places]


def binding_of(gate: RecordedGate) -> Check | None:
    """The check that decided a gate or came nearest to its limit."""
    if gate.check is None:
        return None
    return check_of(gate.record, gate.record["checks"].index(gate.check))


def gate_line(gate: RecordedGate) -> str:
    """`relative_mse 9.2e-04 > 3.5e-05 at layers.0.mixer (mode 2-1): 27x accepted (+3 more)`."""
    label = "format" if gate.record["suite"] in _OF_FORMATS else "mode"
    where = f"at {gate.record['site']} ({label} {gate.record['mode']})"
    check = binding_of(gate)
    if check is None:
        return f"nothing compared {where}: a gate that compared nothing does not pass"
    if check.passed:
        return f"{check.metric} {cells_of(check)[4]} {where}: {near(gate)}"
    others = gate.failures - 1
    more = f" (+{others} more {'place' if others == 1 else 'places'})" if others else ""
    return sentence(check, where) + more


def near(gate: RecordedGate) -> str:
    """How far from its limit: `0.98x its limit (budget)`."""
    if gate.check is None:
        return "nothing compared"
    return times_text(gate.check)


def headline(run: Run) -> str:
    """The first line of a run: what broke, and how much of it."""
    said, rest = headline_parts(run)
    return f"{said}: {rest}" if rest else said


def headline_parts(run: Run) -> tuple[str, str]:
    """`2 of 111 gates failed`, and of the worst: metric, value, limit, layer."""
    failed = [gate for gate in run.failed if not gate.is_new]
    new = [gate for gate in run.failed if gate.is_new]
    lacking = _lacking(run)
    every = _gates(len(run.gates))
    also = [others_text(run.other), "" if run.finished else NOT_FINISHED]
    if failed:
        rest = [gate_line(failed[0]), f"{len(new):,} new" if new else "", lacking, *also]
        return f"{len(failed):,} of {every} failed", "; ".join(filter(None, rest))
    if new:
        verb = "has" if len(new) == 1 else "have"
        said = f"{len(new):,} of {every} {verb} nothing to be compared with yet"
        return said, "; ".join(filter(None, [gate_line(new[0]), lacking, *also]))
    if run.broken:
        node, why = next(iter(run.broken.items()))
        return lacking, "; ".join(filter(None, [f"{first_of(why)} ({node})", *also]))
    if run.errors:
        return "The run failed", run.errors[0]
    if not run.finished:
        there = f"{every} passed before" if run.gates else "nothing was compared"
        return "The run did not finish", "; ".join(filter(None, [there, also[0]]))
    if run.other["failed"]:
        return _other_failed(run, every)
    if not run.gates:
        return "No gate ran", "nothing was compared, so nothing passed"
    if status := run.header.get("exit", 0):
        return "The run failed", f"{every} passed, and pytest ended with exit status {status}"
    shard = run.header.get("shard") or {}
    part = f" of shard {shard.get('number')}/{shard.get('of')}" if shard else ""
    said = f"All {every}{part} passed" if len(run.gates) > 1 else f"The one gate{part} passed"
    gate = run.gates[0]
    if changed := updated_text(run.header.get("update")):
        return said, f"baselines: {changed}"
    if gate.check is None or gate.check["kind"] == "missing":
        return said, ""
    place = f"{gate.record['site']} (mode {gate.record['mode']})"
    return said, f"nearest to its limit is {gate.check['metric']} at {place}, {near(gate)}"


def updated_text(update: Mapping[str, Any] | None) -> str:
    """`37 entries written (failed)`; empty where there was no update."""
    if not update:
        return ""
    count = update.get("entries", 0)
    entries = f"{count:,} {'entry' if count == 1 else 'entries'}"
    did = "would change" if update.get("dry_run") else "written"
    return f"{f'{entries} {did}' if update.get('done') else 'nothing written'} ({update['which']})"


def _other_failed(run: Run, every: str) -> tuple[str, str]:
    """Where all gates passed, and tests that are no gates did not."""
    count = run.other["failed"]
    said = f"{count:,} other test{'' if count == 1 else 's'} failed"
    node, why = next(iter(run.other["failures"].items()), ("", ""))
    passed = f"all {every} passed" if run.gates else "no gate ran"
    return said, "; ".join(filter(None, [f"{node}: {why}".strip(": "), passed]))


def _lacking(run: Run) -> str:
    count = len(run.broken)
    return f"no verdict for {_gates(count)}, their set-up failed" if count > 1 else (
        "no verdict for one gate, its set-up failed" if count else ""
    )  # fmt: skip


def first_of(why: object) -> str:
    """The first line of a message that may have many."""
    return (str(why).strip().splitlines() or [""])[0]


def _gates(count: int) -> str:
    return f"{count:,} gate{'' if count == 1 else 's'}"


def plain_cells(check: Check) -> tuple[str, ...]:
    """A check as a row under `qgate.gate.texts.COLUMNS`; a dash stands for what is not there."""
    cells = list(cells_of(check))
    if _is_from_nothing(check):
        cells[5] = "same" if check.value == 0 else "≈ same" if check.passed else cells[5]
    elif check.value == 0 and cells[5].startswith("?"):
        cells[5] = "to 0"
    return tuple("–" if cell in ("-", "") else cell.replace("<=", "≤").replace(">=", "≥")
                 for cell in cells)  # fmt: skip


# Figures ------------------------------------------------------------------------------------------


def factor(check: Check) -> float:
    """The value over what its limit was made from, NaN where there is none: to sort by."""
    value, against = check.value, check.against
    if value is None or against is None or not (math.isfinite(value) and math.isfinite(against)):
        return math.nan
    if METRICS.find(check.metric).logarithm == "log2":
        return METRICS.find(check.metric).factor(value - against)
    if against == 0:
        # Below the floor of noise a value is as good as the zero it is compared with.
        return 1.0 if value == 0 or check.passed else math.inf
    return value / against


def _is_from_nothing(check: Check) -> bool:
    """Whether a value is compared with zero, so that no ratio says how it changed."""
    is_log2 = METRICS.find(check.metric).logarithm == "log2"
    return check.against == 0 and check.side != "==" and not is_log2


def times_cell(check: Check | None) -> tuple[str, float]:
    """How many times its limit a value is, and what that sorts by: what is not finite is worst,
    what has no number stands between failed and passed."""
    if check is None or check.kind in ("missing", "absent", "nothing"):
        return "–", 1.0
    unfit = check.kind == "nonfinite" or check.value is None or not math.isfinite(check.value)
    if unfit or check.times is None or not math.isfinite(check.times):
        return "∞", math.inf
    return f"{times_figure(check.times)}×", check.times


# What to type next --------------------------------------------------------------------------------


def again(run: Run, gate: RecordedGate) -> str:
    """The command that runs one gate again; of a file that has none the options are a guess from
    the command of the run."""
    if known := gate.record.get("commands"):
        return str(known["again"])
    return shlex.join(["pytest", gate.node, *_options(run.header.get("command") or ())])


def accepting(run: Run, gate: RecordedGate) -> tuple[str, str]:
    """The command that accepts what a gate measured, or why nothing accepts it."""
    failed = [check for record in gate.failed for check in failed_checks(record)]
    if why := hint(tuple(failed)):
        return "", why
    if not any(check.kind in ACCEPTABLE for check in failed):
        return "", ""
    if known := gate.record.get("commands"):
        return str(known["accept"]), ""
    long = any(each.startswith("--qgate-") for each in _options(run.header.get("command") or ()))
    return f"{again(run, gate)} --{'qgate-' if long else ''}update-baselines", ""


def _options(command: Iterable[object]) -> list[str]:
    kept: list[str] = []
    waiting = False
    for each in map(str, command):
        name, equals, _ = each.partition("=")
        if waiting:
            kept.append(each)
            waiting = False
        elif each.startswith("--") and name[2:].removeprefix("qgate-") in _ABOUT:
            kept.append(each)
            waiting = not equals
    return kept
