"""Text of a verdict: one line with the worst failure, and a short table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qgate.errors import QgateError
from qgate.gate.checks import Check, Verdict
from qgate.gate.measured import OTHER_VALUES, UNNAMED_FAULT
from qgate.metrics import METRICS
from qgate.metrics.grades import graded
from qgate.metrics.plan_changes import PlanChange, merged, plan_changes
from qgate.results.checks import decibels_over, view_of
from qgate.results.failure_causes import EarlierCause, said_of
from qgate.results.kinds import LIMIT_KINDS
from qgate.results.schema import FindingWords
from qgate.text import change_figure, counted, figure_text, figures_apart, one_line

_NO_CAUSE = EarlierCause()
_NO_DIAGNOSES: Mapping[tuple[str, str], str] = {}
COLUMNS = ("site", "scope", "metric", "accepted/ideal", "now", "change", "limit", "kind")


def first_line(
    verdict: Verdict,
    mode: str,
    *,
    label: str = "mode",
    diagnoses: Mapping[tuple[str, str], str] = _NO_DIAGNOSES,
    follows: str = "",
) -> str:
    """Write the failure where the error enters, or the worst one, and how many more there are.

    `diagnoses` say what is wrong at sites and scopes, and `follows` what it comes from.
    """
    failed = verdict.failed
    if not failed:
        raise QgateError(f"{label} {mode} passed: there is no failure to describe.")
    ending = f"; {one_line(follows)}" if follows else ""
    if changes := _plan_changes(verdict):
        # The other failures follow from it.
        change = changes[0]
        more = _more_checks(len(failed) - change.sites)
        return one_line(f"{change.text()} ({label} {mode})") + more + ending
    more = _more_checks(len(failed) - 1)
    check = verdict.entry or failed[0]
    diagnosis = diagnoses.get((check.site, check.scope), "")
    if check.limit.says_fault:
        diagnosis = diagnosis or _fault(check)
    if check.limit.separator:
        text = said_of(f"{check.site} ({label} {mode})", check.reason)
    elif diagnosis:
        text = f"{said_of(f'{check.site} ({label} {mode})', diagnosis)}: {sentence(check)}"
    else:
        text = sentence(check, f"at {check.site} ({label} {mode})")
    return one_line(text) + more + ending


def _more_checks(count: int) -> str:
    return f" (+{counted(count, 'more failed check')})" if count > 0 else ""


def _plan_changes(verdict: Verdict) -> list[PlanChange]:
    total = sum(bool(measured.texts) for measured in verdict.measured)
    total += sum(check.limit.is_absent and check.is_plan_change for check in verdict.checks)
    return merged(plan_changes(map(vars, verdict.checks)), total)


def sentence(check: Check, where: str = "") -> str:
    """Write one failed check as a sentence, with its place in words if that is not said before."""
    at, colon = (f" {where}", f" {where}:") if where else ("", ",")
    if check.is_plan_change:
        return f"{check.accepted_text} accepted, {check.text} found{', ' * bool(where)}{where}"
    if check.limit.sentence is not None:
        return check.limit.sentence(check, where)
    if check.metric.startswith("nonfinite"):
        return f"non-finite values{colon} {check.reason}"
    if check.value is None or not math.isfinite(check.value):
        state = "was not computed" if check.value is None else f"is {check.value}"
        return f"{check.metric} {state}{colon} only a finite value can pass"
    if check.bound is None or not math.isfinite(check.bound):
        return (
            f"{check.metric} {figure_text(check.value)}{colon} {check.reason or 'no finite limit'}"
        )
    if check.side == "==":
        why = f"{':' if where else ','} {check.reason}" if check.reason else ""
        return f"{check.metric} {check.value:.17g} instead of {check.bound:.17g}{at}{why}"
    value, bound = figures_apart(check.value, check.bound)
    sign = "<" if check.side == ">=" else ">"
    return f"{check.metric} {value} {sign} {bound}{colon} {_why(check)}"


def finding(check: Check, diagnosis: str = "") -> FindingWords:
    """Return what is wrong in words, and by how much against what, as records keep it."""
    if separator := check.limit.separator:
        fault, _, first = check.reason.partition(separator)
        if diagnosis and fault.startswith(OTHER_VALUES):
            return FindingWords(fault=diagnosis, figures=fault, diagnosed=True)
        is_named = fault != UNNAMED_FAULT
        words = fault if is_named else diagnosis or fault
        is_diagnosed = is_named or bool(diagnosis)
        return FindingWords(fault=words, figures=first, diagnosed=is_diagnosed)
    figures = sentence(check)
    if check.limit.says_fault and check.reason and check.bound is None and check.value is not None:
        figures = (
            f"{check.metric} {figure_text(check.value)} is the size of float noise, and it is none"
        )
    return FindingWords(
        fault=diagnosis or _fault(check), figures=figures, diagnosed=bool(diagnosis)
    )


def _fault(check: Check) -> str:
    """Say in words what a failed check means."""
    if check.is_plan_change:
        return "is quantized in another way than accepted"
    kind = check.limit
    if kind.says_fault and check.reason:
        return check.reason
    if kind.is_ideal and check.side == ">=":
        return "is not quantized, or not as declared"
    if kind.is_ideal and check.against == 0 and not check.quantizer:
        return "changed, and the mode leaves it as it is"
    if kind.is_ideal:
        return f"is not what correct {check.quantizer or 'quantization'} gives"
    metric = METRICS.find(check.metric) if kind.is_accepted else None
    if metric is not None and (check.side == "==" or metric.direction == "steady"):
        return check.about.better_words or "is not what was accepted"
    if metric is not None and check.side == ">=" and check.about.better_words:
        return check.about.better_words
    if metric is not None and check.side == ">=" and metric.relative:
        return "is far better than accepted"
    return kind.fault


def _why(check: Check) -> str:
    against, kind = check.against, check.limit
    if kind.why:
        return kind.why.format(reason=f", {check.reason}" if check.reason else "")
    if against is None or (kind.is_accepted and check.reason):
        return check.reason
    if kind.is_ideal:
        return _why_of_ideal(check)
    logarithm = METRICS.find(check.metric).logarithm
    if logarithm == "log2":
        return _factors(check.value, against, check.bound or 0.0)
    if logarithm:
        return _moved_decibels(check.value, against, check.bound or 0.0)
    if not check.allowed and check.bound is not None:
        off = figure_text(abs(check.bound - against))
        return f"accepted is {figure_text(against)}, it may be {off} off"
    return _times(check.value, against, check.allowed or 0.0) + _elsewhere(check)


def _why_of_ideal(check: Check) -> str:
    if check.reason and check.bound is None:
        return check.reason
    name = f"ideal {check.quantizer or 'declared'} quantizer"
    if check.side == ">=":
        return f"better than an {name}: {check.reason}"
    if check.against == 0 and not check.quantizer:
        return "the mode leaves it as it is, only float noise is allowed"
    if check.against == 0:
        return f"the {name} is exact here, only the noise floor is allowed"
    return f"{decibels_over(vars(check))} dB over the {name}, {check.allowed:g} allowed"


def _elsewhere(check: Check) -> str:
    """Write ` (accepted on cpu-avx512-af3c5255)`, and the room of this device beside the limit."""
    if not check.accepted_on:
        return ""
    room = f"; another right arithmetic may add {figure_text(check.room)}" if check.room else ""
    return f" (accepted on {check.accepted_on}{room})"


def _factors(value: float | None, accepted: float, bound: float) -> str:
    """Write `2.1x accepted, up to 1.4x allowed`, of logarithms."""
    if value is None:
        return ""
    factors = [2.0 ** min(max(log2 - accepted, -999), 999) for log2 in (value, bound)]
    moved, most = (f"{factor:.3g}" for factor in factors)
    if moved == most:
        moved, most = figures_apart(*factors)
    return f"{moved}x accepted, {'up' if value > accepted else 'down'} to {most}x allowed"


def _moved_decibels(value: float | None, accepted: float, bound: float) -> str:
    """Write `0.30 dB over accepted, 0.09 dB allowed`."""
    if value is None:
        return ""
    moved, most = figures_apart(abs(value - accepted), abs(bound - accepted))
    return f"{moved} dB {'over' if value > accepted else 'under'} accepted, {most} dB allowed"


def _times(value: float | None, accepted: float, allowed: float) -> str:
    """Write `27x accepted`, or the change where it is small."""
    if value is None or accepted == 0:
        return f"accepted is {accepted:g}"
    ratio = value / accepted
    if ratio >= 1.995:
        return f"{change_figure(ratio)} accepted"
    change = 100 * (value - accepted) / abs(accepted)
    moved, most = figures_apart(abs(change), 100 * allowed)
    return f"{moved} % {'over' if change > 0 else 'under'} accepted, {most} % allowed"


def failure_text(
    verdict: Verdict,
    mode: str,
    *,
    label: str = "mode",
    baseline: str = "",
    command: str = "pytest suites --update-baselines",
    report: str = "",
    rows: int = 5,
    diagnoses: Mapping[tuple[str, str], str] = _NO_DIAGNOSES,
    earlier: EarlierCause = _NO_CAUSE,
) -> str:
    """Write the first line, the offending rows, where the error enters, and what to do about it.

    `command` accepts the new values; it is offered only where that can be.
    """
    failed = verdict.failed
    changes = _plan_changes(verdict)
    first = first_line(verdict, mode, label=label, diagnoses=diagnoses, follows=earlier.words)
    if not changes and all(check.limit.is_new for check in failed):
        # Nothing is known to be wrong: a table of what is not there helps nobody.
        return f"{first}\n  to record it: {command}"
    lines = [first]
    lines += [f"  {one_line(change.text())}" for change in changes[1:]]
    # A plan is said in sentences: a table of texts, site by site, helps nobody.
    numbers = [check for check in failed if not check.is_plan_change]
    if numbers:
        lines += ["", *_table(numbers[:rows])]
    if len(numbers) > rows:
        lines.append(f"  {rows} of {len(numbers)} failed checks are shown; results.jsonl has all")
    if source := _enters(verdict):
        lines.append(f"  {source}")
    if carried := _carried(verdict):
        lines.append(f"  {carried}")
    if baseline:
        lines.append(f"  baseline  {baseline}")
    if not earlier.is_acceptable:
        lines.append(f"  mend that first: this test {_verb(earlier)}")
    elif any(check.limit.is_acceptable for check in failed) and not hint(failed):
        lines.append(f"  if intended: {command}")
        if changes:
            lines.append("  an update without --accept-plan writes nothing of this gate")
    elif advice := hint(failed):
        lines.append(f"  {advice}")
    if report:
        lines.append(f"  report  {report}")
    return "\n".join(lines)


def hint(failed: tuple[Check, ...]) -> str:
    """Say what to do about failures that --update-baselines cannot accept; empty without one."""
    first = {check.kind: check for check in reversed(failed)}
    parts = [
        kind.advice_for(first[kind.name].reason, first[kind.name].source)
        for kind in LIMIT_KINDS
        if kind.advice and kind.name in first
    ]
    return f"{'; '.join(parts)}: --update-baselines cannot accept this" if parts else ""


def _verb(earlier: EarlierCause) -> str:
    """Write `follows from PLACE` or `is the same as at PLACE`."""
    words = one_line(earlier.words)
    return words if words.startswith("follows") else f"is {words}"


def _enters(verdict: Verdict) -> str:
    entry = verdict.entry
    if entry is not None and not entry.about.is_local:
        return ""
    if entry is not None:
        return f"the error enters at {entry.site}, the first whose {entry.scope} error is out"
    if not any(check.about.over_tokens for check in verdict.failed):
        return ""
    if verdict.has_local:
        return "no local error is out: the error is carried here or amplified"
    return "local errors were not measured: where the error enters is not known"


def _carried(verdict: Verdict) -> str:
    """Write what is carried along, the worst where there are several; a failure has no grades."""
    carried = [measured.values for measured in verdict.measured if measured.about.over_tokens]
    with_bands = [values for values in carried if graded(values)]
    if not with_bands:
        return ""
    values = max(with_bands, key=lambda values: values.get("mse") or 0.0)
    parts = [
        f"{metric.short} {figure_text(value)}"
        for metric in graded(values)
        if (value := values[metric.name]) is not None
    ]
    return f"carried: {', '.join(parts)}" if parts else ""


def _table(failed: Sequence[Check]) -> list[str]:
    cells = [COLUMNS, *(cells_of(check) for check in failed)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def cells_of(check: Check) -> tuple[str, ...]:
    """Lay out a check as a row under `COLUMNS`."""
    view, site = view_of(vars(check)), one_line(check.site)
    where = (site or "-", check.scope, check.metric or "-")
    return (*where, view.against, view.now, view.change, view.limit, check.kind)
