"""Checks as records have them: the order of the worst first, and their figures as texts.

Texts are written once here: terminal, files and pages lay them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from qgate.metrics import METRICS
from qgate.results.kinds import limit_kind_of
from qgate.text import change_figure, figures_apart, one_line, times_figure


def is_counted(record: Mapping[str, Any]) -> bool:
    """Tell if a record counts: that of a gate which failed as expected does not."""
    return "xfailed" not in record


def severity(check: Mapping[str, Any]) -> tuple[int, int, float]:
    """Return a key that sorts the worst check last.

    The order is: passed, failed without a number, over an accepted value, over a limit that needs
    none or nothing in effect, not finite.
    """
    times = check["times"]
    if check["passed"]:
        return 0, 0, times or 0.0
    worst = math.inf if times is None else times
    kind, value = limit_kind_of(check["kind"]), check["value"]
    if not kind.has_number:
        return 1, kind.severity, math.inf if kind.severity else 0.0
    if kind.is_nonfinite or value is None or not math.isfinite(value):
        return 1, 3, worst
    return 1, 1 if kind.needs_accepted else 2, worst


def binding(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the binding check of a record: its worst failure, or the nearest to its limit."""
    checks: list[Mapping[str, Any]] = record["checks"]
    return checks[0] if len(checks) == 1 else max(checks, key=severity, default=None)


def binding_checks(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the binding check of each metric of a record."""
    binding_by_metric: dict[str, Mapping[str, Any]] = {}
    for check in record["checks"]:
        name = check["metric"]
        if name not in binding_by_metric or severity(check) > severity(binding_by_metric[name]):
            binding_by_metric[name] = check
    return binding_by_metric


def badness(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that sorts the worst record first: failed before passed, then by its check."""
    check = binding(record)
    worst = severity(check) if check else (0, 0, 0.0)
    return (bool(record["passed"]), *(-figure for figure in worst))


def rank(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of `badness`, with ties in order of execution and by name."""
    names = (str(record[name]) for name in ("mode", "model", "site", "scope", "node"))
    return (*badness(record), record.get("order", 0), *names)


def worst_first(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(records, key=rank)


def measured_sites(
    records: Iterable[Mapping[str, Any]],
) -> dict[str, dict[str, set[tuple[str, str, str]]]]:
    """Return the compared (suite, site, scope) by model and name of accepted errors."""
    by_model: dict[str, dict[str, set[tuple[str, str, str]]]] = {}
    for record in records:
        key = (record["suite"], record["site"], record["scope"])
        title = record.get("title", record["mode"])
        by_model.setdefault(record["model"], {}).setdefault(title, set()).add(key)
    return by_model


# Texts of a check ---------------------------------------------------------------------------------

NOTHING = "-"
_NOT_FINITE, _OVER_ZERO, _SAME, _IDEAL = "not finite", "over 0", "same", "ideal"
_AS = {_SAME: "as accepted", _IDEAL: "as an ideal quantizer"}
# A smaller change is written as none, and how far that is from its limit is the tolerance itself.
_LEAST_CHANGE = 5e-4


class CheckView(NamedTuple):
    """The texts of one check, and the numbers that they sort by.

    now       the value, with digits enough to differ from its limit, or why there is none
    limit     `<= 3.5e-05`, or the text that was accepted
    against   what the limit was made from: the accepted value, or an ideal quantizer's error
    change    the change from that: `+26 %`, `27x`, `6.2 dB` more than an ideal quantizer
    far       how many times its limit: `26.6x`, or a word where no number says it, as of a value
              that is the accepted or the ideal one; "-" where the value is not finite
    moved     the value over `against`; NaN without one
    times     how many times its limit, infinite where it is not finite; 1 where nothing is compared
    """

    metric: str
    kind: str
    now: str
    limit: str
    against: str
    change: str
    far: str
    moved: float
    times: float

    @property
    def most(self) -> str:
        """The limit without its sign where a value may not be above it: `3.5e-05`, `>= 0.9`."""
        return self.limit.removeprefix("<= ")

    @property
    def how_far(self) -> str:
        """Write `26.6x (regression)`, for a column of that name."""
        far = _NOT_FINITE if self.far == NOTHING else self.far
        return f"{far} ({self.kind})" if self._has_times else far

    @property
    def distance(self) -> str:
        """Write `26.6x its limit (regression)`."""
        if self.far in _AS:
            return _AS[self.far]
        far = "over a limit of 0" if self.far == _OVER_ZERO else f"{self.far} its limit"
        return f"{far} ({self.kind})" if self._has_times else self.how_far

    @property
    def _has_times(self) -> bool:
        return self.far not in (NOTHING, self.kind, *_AS) and bool(self.kind)

    def text(self) -> str:
        """Write `relative_mse 9.2e-04, limit <= 3.5e-05, 26.6x its limit (regression)`."""
        now = "" if self.now == NOTHING else self.now
        limit = "" if self.limit == NOTHING else f"limit {self.limit}"
        distance = "" if self.distance == now else self.distance
        return ", ".join(filter(None, [f"{self.metric} {now}".strip(), limit, distance]))


_NO_CHECK = CheckView(
    metric="", kind="", now=NOTHING, limit=NOTHING, against=NOTHING, change=NOTHING,
    far="nothing compared", moved=math.nan, times=1.0,
)  # fmt: skip


def view_of(check: Mapping[str, Any] | None, accepted: float | None = None) -> CheckView:
    """Write the texts of a check; `accepted` is the accepted value where its limit has another."""
    if check is None:
        return _NO_CHECK
    metric, kind = str(check["metric"]), limit_kind_of(check["kind"])
    value, bound, against = check["value"], check["bound"], check.get("against")
    against = accepted if against is None else against
    text, accepted_text = check.get("text"), check.get("accepted_text")
    if text or accepted_text:
        now, before = one_line(text or NOTHING), one_line(accepted_text or NOTHING)
        most, change, moved = f"== {before}" if accepted_text else NOTHING, NOTHING, math.nan
    else:
        figures = [value, bound] if check["passed"] else [value, bound, against]
        now, most, *base = figures_apart(*figures)
        before = (base or figures_apart(against))[0]
        most = NOTHING if bound is None else f"{check['side']} {most}"
        change, moved = _change(check, against)
        if not is_number(value):
            now = _NOT_FINITE if kind.has_number else NOTHING
    far, times = _far(check)
    if check["passed"] and abs(moved - 1) < _LEAST_CHANGE:
        far = _SAME if kind.is_accepted else _IDEAL if _is_tolerance(check, times) else far
    return CheckView(metric, check["kind"], now, most, before, change, far, moved, times)


def _is_tolerance(check: Mapping[str, Any], times: float) -> bool:
    """Tell if how far a value is from its limit is what a budget allows, as of an ideal value."""
    allowed = check.get("allowed")
    is_budget = limit_kind_of(check["kind"]).is_ideal and is_number(allowed)
    return is_budget and abs(times * 10 ** (float(allowed or 0) / 10) - 1) < _LEAST_CHANGE


def is_number(value: object) -> bool:
    """Tell if a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _far(check: Mapping[str, Any]) -> tuple[str, float]:
    """Write how many times its limit a value is, and return the number to sort it by."""
    kind, times = limit_kind_of(check["kind"]), check["times"]
    if not kind.has_number:
        return kind.name, 1.0
    if kind.is_nonfinite or not is_number(check["value"]):
        return NOTHING, math.inf
    if is_number(times):
        return f"{times_figure(times)}x", times
    return _OVER_ZERO if check["bound"] is not None else kind.name, math.inf


def _change(check: Mapping[str, Any], against: float | None) -> tuple[str, float]:
    """Write the change from what a limit was made from, and return the factor that it is."""
    value, metric = check["value"], str(check["metric"])
    if against is None or not (is_number(value) and is_number(against)):
        return NOTHING, math.nan
    if check["side"] == "==":
        return (f"{value - against:+g}" if value != against else "same"), math.nan
    if against == 0 and value and check["passed"] and not METRICS.find(metric).logarithm:
        # Below the floor of noise a value is as good as the zero it is compared with.
        return "≈ same", 1.0
    change, moved = change_of(metric, against, value)
    is_over = limit_kind_of(check["kind"]).is_ideal and bool(check["bound"] and value and against)
    return (f"{decibels_over(check)} dB" if is_over else change), moved


def change_of(metric: str, old: float, new: float) -> tuple[str, float]:
    """Write a change, `+26 %` or `27x`, and return its factor.

    The change of a logarithm is that of the sizes or energies that it stands for.
    """
    ratio = METRICS.find(metric).ratio(old, new)
    if old == new:
        return "same", 1.0
    if ratio is None:
        return ("from 0", math.inf) if old == 0 else (f"{new - old:+.3g}", math.nan)
    return (change_figure(ratio) if ratio else "to 0"), ratio


def decibels_over(check: Mapping[str, Any]) -> str:
    """Write the distance from an ideal, with digits enough to differ from what is allowed."""
    value, bound, allowed = (check.get(name) or 0.0 for name in ("value", "bound", "allowed"))
    if not (0 < value < math.inf and 0 < bound < math.inf):
        return "?"
    side = -1 if check["side"] == ">=" else 1
    excess = 10 * (math.log10(value) - math.log10(bound)) + side * allowed
    texts = (f"{excess:.{digits}f}" for digits in range(1, 12))
    return next((text for text in texts if side * float(text) > allowed), f"{excess:.12f}")


def junit_properties(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs for `record_property`: the checked metrics of one comparison."""
    where = one_line(f"{record['site']} {record['scope']}")
    pairs = [
        (f"qgate {where} {metric}".rstrip(), f"{verdict_word(check)}: {view_of(check).text()}")
        for metric, check in binding_checks(record).items()
    ]
    about = [(f"qgate {name}", one_line(record[name])) for name in ("model", "mode", "layer")]
    return [*about, *((name, one_line(value)) for name, value in pairs)]


def verdict_word(check: Mapping[str, Any]) -> str:
    if not check["passed"]:
        return "failed"
    return "improved" if check["improved"] else "passed"
