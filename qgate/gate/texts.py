"""What a user reads of a verdict: one line that says it all, and a short table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qgate.errors import QgateError
from qgate.gate.checks import ACCEPTABLE, Check
from qgate.gate.grades import graded, graded_text
from qgate.gate.updating import hint
from qgate.gate.verdict import Verdict
from qgate.metrics import METRICS
from qgate.text import one_line

COLUMNS = ("site", "scope", "metric", "accepted/ideal", "now", "change", "limit", "kind")


def first_line(verdict: Verdict, mode: str, *, label: str = "mode") -> str:
    """Metric, value, limit, site, mode of the worst failure, and how many more there are."""
    failed = verdict.failed
    if not failed:
        raise QgateError(f"{label} {mode} passed: there is no failure to describe.")
    rest = f" (+{len(failed) - 1} more)" if len(failed) > 1 else ""
    return one_line(sentence(failed[0], f"at {failed[0].site} ({label} {mode})")) + rest


def sentence(check: Check, where: str) -> str:
    """What one failed check says, with its place in words."""
    if check.kind == "missing":
        return f"no accepted {check.metric} {where}: record it with --update-baselines"
    if check.kind == "absent":
        return f"not measured {where}: it has accepted errors, the set of sites changed"
    if check.kind == "nothing":
        return f"nothing compared {where}: a gate that compared nothing does not pass"
    if check.metric.startswith("nonfinite"):
        return f"non-finite values {where}: {check.reason}"
    if check.value is None or not math.isfinite(check.value):
        what = "was not computed" if check.value is None else f"is {check.value}"
        return f"{check.metric} {what} {where}: only a finite value can pass"
    if check.bound is None or not math.isfinite(check.bound):
        return f"{check.metric} {number(check.value)} {where}: {check.reason or 'no finite limit'}"
    if check.accepted_text:
        told = f"{check.text!r} instead of {check.accepted_text!r}"
        return f"{check.metric} {told} {where}"
    if check.side == "==":
        why = f": {check.reason}" if check.reason else ""
        return f"{check.metric} {check.value:.17g} instead of {check.bound:.17g} {where}{why}"
    value, bound = _apart(check.value, check.bound)
    sign = "<" if check.side == ">=" else ">"
    return f"{check.metric} {value} {sign} {bound} {where}: {_why(check)}"


def _why(check: Check) -> str:
    against = check.against
    if check.kind == "absolute":
        return f"absolute limit{f', {check.reason}' if check.reason else ''}"
    if against is None or (check.kind == "regression" and check.reason):
        return check.reason
    if check.kind == "budget" and check.side == ">=":
        return f"better than an ideal {check.quantizer or 'declared'} quantizer: {check.reason}"
    if check.kind == "budget":
        name = f"the ideal {check.quantizer or 'declared'} quantizer"
        if against == 0:
            return f"{name} is exact here, only the noise floor is allowed"
        return f"{_decibels(check)} dB over {name}, {check.allowed:g} allowed"
    if METRICS.find(check.metric).logarithm == "log2":
        return _factors(check.value, against, check.bound or 0.0)
    if not check.allowed and check.bound is not None:
        return f"accepted is {number(against)}, it may be {number(abs(check.bound - against))} off"
    return _times(check.value, against, check.allowed or 0.0)


def _factors(value: float | None, accepted: float, bound: float) -> str:
    """`2.1x accepted, up to 1.4x allowed`, of logarithms."""
    if value is None:
        return ""
    moved, most = (2.0 ** min(max(each - accepted, -999), 999) for each in (value, bound))
    shown = (f"{moved:.3g}", f"{most:.3g}")
    told = shown if shown[0] != shown[1] else _apart(moved, most)
    return f"{told[0]}x accepted, {'up' if value > accepted else 'down'} to {told[1]}x allowed"


def _times(value: float | None, accepted: float, allowed: float) -> str:
    """`27x accepted`, or the change where it is small."""
    if value is None or accepted == 0:
        return f"accepted is {accepted:g}"
    ratio = value / accepted
    if ratio >= 1.995:
        return f"{ratio:.0f}x accepted" if 9.95 <= ratio < 1e4 else f"{ratio:.2g}x accepted"
    change = 100 * (value - accepted) / abs(accepted)
    moved, most = _apart(abs(change), 100 * allowed)
    return f"{moved} % {'over' if change > 0 else 'under'} accepted, {most} % allowed"


def _decibels(check: Check) -> str:
    """How far from the ideal, with the digits that tell it from what is allowed."""
    value, bound, allowed = check.value or 0.0, check.bound or 0.0, check.allowed or 0.0
    if not (0 < value < math.inf and 0 < bound < math.inf):
        return "?"
    side = -1 if check.side == ">=" else 1
    excess = 10 * (math.log10(value) - math.log10(bound)) + side * allowed
    texts = (f"{excess:.{digits}f}" for digits in range(1, 12))
    return next((text for text in texts if side * float(text) > allowed), f"{excess:.12f}")


def number(value: float | None, digits: int = 1) -> str:
    """A figure in a few characters; "-" where there is none."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    plain = 1e-2 <= abs(value) < 1e4
    if 0.9 < abs(value) < 1:
        # Correlations: what matters is how far they are from 1.
        digits = max(digits, digits + math.ceil(-math.log10(1 - abs(value))) - 2)
    return f"{value:.{digits + 2}g}" if plain else f"{value:.{digits}e}"


def _apart(value: float, bound: float | None) -> tuple[str, str]:
    """Two figures with digits enough to differ: `0.62 > 0.62` helps nobody."""
    for digits in range(1, 17):
        pair = number(value, digits), number(bound, digits)
        if pair[0] != pair[1]:
            return pair
    return repr(value), repr(bound)


def failure_text(
    verdict: Verdict,
    mode: str,
    *,
    label: str = "mode",
    baseline: str = "",
    command: str = "pytest suites --update-baselines",
    report: str = "",
    rows: int = 5,
) -> str:
    """The first line, the offending rows, where the error enters, and what to do about it.

    `command` accepts the new values; it is offered only where that can be.
    """
    failed = verdict.failed
    if all(check.kind == "missing" for check in failed):
        # Nothing is known to be wrong: a table of what is not there helps nobody.
        return f"{first_line(verdict, mode, label=label)}\n  to record it: {command}"
    lines = [first_line(verdict, mode, label=label), "", *_table(failed[:rows])]
    if len(failed) > rows:
        lines.append(f"  +{len(failed) - rows} more rows in results.jsonl")
    if source := _enters(verdict):
        lines.append(f"  {source}")
    if grades := _grades(verdict):
        lines.append(f"  {grades}")
    if baseline:
        lines.append(f"  baseline  {baseline}")
    if any(check.kind in ACCEPTABLE for check in failed) and not hint(failed):
        lines.append(f"  if intended: {command}")
    elif rest := hint(failed):
        lines.append(f"  {rest}")
    if report:
        lines.append(f"  report  {report}")
    return "\n".join(lines)


def _enters(verdict: Verdict) -> str:
    source = verdict.first_source
    if source:
        return f"the error enters at {source}, the first whose local error is out"
    if not any(check.scope == "carried" for check in verdict.failed):
        return ""
    if verdict.has_local:
        return "no local error is out: the error is carried here or amplified"
    return "local errors were not measured: where the error enters is not known"


def _grades(verdict: Verdict) -> str:
    """The bands of the carried error, the worst where there are several."""
    carried = [each.values for each in verdict.measured if each.scope == "carried"]
    with_bands = [values for values in carried if graded(values)]
    if not with_bands:
        return ""
    values = max(with_bands, key=lambda each: each.get("mse") or 0.0)
    parts = []
    for metric in graded(values):
        if (value := values[metric.name]) is not None:
            shown = (number(value, digits) for digits in range(1, 17))
            parts.append(f"{metric.short} {graded_text(metric.name, shown, value)}")
    return f"grades: {', '.join(parts)}" if parts else ""


def _table(failed: Sequence[Check]) -> list[str]:
    cells = [COLUMNS, *(cells_of(check) for check in failed)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def cells_of(check: Check) -> tuple[str, ...]:
    """A check as a row under `COLUMNS`, its value with digits enough to differ from its limit."""
    if check.text or check.accepted_text:
        texts = check.accepted_text or "-", check.text or "-"
        limit = f"== {check.accepted_text}" if check.accepted_text else "-"
        return one_line(check.site), check.scope, check.metric, *texts, "-", limit, check.kind
    now, bound = number(check.value), number(check.bound)
    if check.value is not None and check.bound is not None and math.isfinite(check.value):
        now, bound = _apart(check.value, check.bound)
    limit = f"{check.side} {bound}" if check.bound is not None else "-"
    site, metric = one_line(check.site) or "-", check.metric or "-"
    return site, check.scope, metric, number(check.against), now, _moved(check), limit, check.kind


def _moved(check: Check) -> str:
    value, against = check.value, check.against
    if value is None or against is None or not (math.isfinite(value) and math.isfinite(against)):
        return "-"
    if check.side == "==":
        return f"{value - against:+g}"
    if METRICS.find(check.metric).logarithm == "log2":
        return f"{value - against:+.3g}"
    if against == 0:
        return "from 0"
    if check.kind == "budget":
        return f"{_decibels(check)} dB"
    percent = 100 * (value - against) / abs(against)
    if abs(percent) >= 1e4:
        ratio = value / against
        return f"{ratio:.0f}x" if abs(ratio) < 1e7 else f"{ratio:.3g}x"
    return f"{percent:+.0f}%" if abs(percent) >= 100 else f"{percent:+.3g}%"
