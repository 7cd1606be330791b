"""The checks of one site: which limit, which number, how far over.

Errors are held from above only: an improvement is listed, never failed, because a gate that fails
on good news teaches people to ignore it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qgate.gate.bounds import Bound, Side, times_over, within
from qgate.gate.limits import Limits
from qgate.gate.measured import Measured, is_finite
from qgate.metrics import METRICS, Metric

Kind = Literal["nonfinite", "budget", "regression", "absolute", "missing", "absent", "nothing"]
# What an update of the accepted errors can cure.
ACCEPTABLE: tuple[Kind, ...] = ("regression", "missing", "absent")
# An error a million times smaller than accepted is no better quantizer; below 1e-12 all is noise.
_TRACE, _LEAST = 1e-6, 1e-12
# How many elements may fall to the other side of a threshold by other arithmetic.
_ELEMENTS = 2
_WITHOUT_NUMBER = ("missing", "absent", "nothing")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number held against one limit.

    against    what the limit was made from: the accepted value or the ideal quantizer's error
    bound      what the value has to keep, on the side `side`
    times      how many times over the bound; None where there is no number to compare with
    source     where the limit was set
    reason     in words, where numbers do not say it
    text       what it is, where that is a text: then `value` is 0 if it is the accepted one, else 1
    accepted_text   the text that was accepted
    """

    site: str
    layer: str
    scope: str
    order: int
    metric: str
    kind: Kind
    passed: bool
    value: float | None = None
    side: Side = "<="
    bound: float | None = None
    against: float | None = None
    times: float | None = None
    improved: bool = False
    quantizer: str = ""
    allowed: float | None = None
    source: str = ""
    reason: str = ""
    text: str = ""
    accepted_text: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.site, self.scope, self.metric

    @property
    def place(self) -> tuple[int, str, str, str, str]:
        """Order of execution, made total."""
        return self.order, self.site, self.scope, self.metric, self.kind

    @property
    def badness(self) -> tuple[Any, ...]:
        """Sorts worst first: not finite, then by times over the bound, then without a number."""
        if self.kind in _WITHOUT_NUMBER:
            return 2, 0.0, *self.place
        unfit = self.kind == "nonfinite" or not is_finite(self.value)
        times = math.inf if self.times is None else self.times
        return 0 if unfit else 1, -times, *self.place

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Check:
        return cls(**given)


def checks_of(
    measured: Measured,
    limits: Limits,
    device_matches: bool,
) -> list[Check]:
    """All checks of one site; one that has nothing to check fails for that."""
    found = [
        *_nonfinite(measured),
        *_budget(measured, limits),
        *_accepted(measured, limits, device_matches),
        *(_absolute(measured, bound) for bound in limits.absolute.values()),
    ]
    return found or [check(measured, "", "nothing", False, reason="nothing was compared")]


def check(measured: Measured, metric: str, kind: Kind, passed: bool, **rest: Any) -> Check:
    return Check(
        site=measured.site,
        layer=measured.layer,
        scope=measured.scope,
        order=measured.order,
        metric=metric,
        kind=kind,
        passed=passed,
        **rest,
    )


def _nonfinite(measured: Measured) -> Iterator[Check]:
    for name, whose in (("nonfinite", "actual"), ("nonfinite_reference", "the reference")):
        count = getattr(measured, name)
        if count:
            yield check(
                measured,
                name,
                "nonfinite",
                False,
                value=float(count),
                bound=0.0,
                times=math.inf,
                reason=f"{count} NaN or infinite in {whose}{_first_of(measured, name)}",
            )


def _first_of(measured: Measured, name: str) -> str:
    first = (measured.why or {}).get(name, "")
    return f", first in {first}" if first else ""


def _budget(measured: Measured, limits: Limits) -> Iterator[Check]:
    """A local error against that of an ideal quantizer; where that is exact, against the noise.

    An error well below the ideal's is no improvement: no quantizer of that format can make it.
    """
    if measured.scope != "local" or measured.ideal is None:
        return
    value = measured.value("relative_mse")
    ideal = measured.ideal.get("relative_mse", math.nan)
    bound = measured.floor if ideal == 0 else (ideal + measured.floor) * _factor(limits.budget_db)
    unfit = not (math.isfinite(ideal) and ideal >= 0)
    yield check(
        measured,
        "relative_mse",
        "budget",
        not unfit and within(value, "<=", bound),
        value=value,
        bound=None if unfit else bound,
        against=ideal,
        times=math.inf if unfit else times_over("relative_mse", value, "<=", bound),
        quantizer=measured.quantizer,
        allowed=limits.budget_db,
        source=limits.source("budget_db"),
        reason=f"the ideal quantizer's error is {ideal}" if unfit else "",
    )
    least = 0.0 if unfit else (ideal - measured.floor) / _factor(limits.budget_db)
    seen = value is not None and math.isfinite(value)
    if seen and least > 0 and not within(value, ">=", least):
        yield check(
            measured,
            "relative_mse",
            "budget",
            False,
            value=value,
            side=">=",
            bound=least,
            against=ideal,
            times=times_over("relative_mse", value, ">=", least),
            quantizer=measured.quantizer,
            allowed=limits.budget_db,
            source=limits.source("budget_db"),
            reason="nothing is quantized here, or not as declared",
        )


def _factor(db: float) -> float:
    try:
        return float(10 ** (db / 10))
    except OverflowError:
        return math.inf


def _accepted(
    measured: Measured,
    limits: Limits,
    device_matches: bool,
) -> Iterator[Check]:
    name = "regression" if device_matches else "regression_other_device"
    for metric in measured.compared:
        known = METRICS.get(metric)
        if known.textual:
            yield _text(measured, metric)
            continue
        tolerance = limits.tolerance(device_matches, known)
        direction = known.direction
        value = measured.value(metric)
        if value is None or not math.isfinite(value):
            what = "was not computed" if value is None else f"is {value}"
            why = f"{metric} {what}"
            yield check(
                measured, metric, "nonfinite", False, value=value, times=math.inf, reason=why
            )
            continue
        accepted = (measured.accepted or {}).get(metric)
        if accepted is None:
            why = "no accepted value"
            yield check(measured, metric, "missing", False, value=value, reason=why)
            continue
        if direction == "equal":
            yield _equal(measured, metric, value, accepted)
            continue
        size, goal = (abs(value), abs(accepted)) if known.signed else (value, accepted)
        # A share of what a logarithm is of, and not of the logarithm.
        share = math.log2(1 + tolerance) if known.logarithm == "log2" else tolerance * abs(goal)
        slack = share + limits.atol
        if known.relative:
            slack += measured.floor
        if not device_matches and known.counted:
            slack += _ELEMENTS * measured.grain
        side: Side = ">=" if direction == "higher" else "<="
        bound, better = (
            (goal - slack, goal + slack) if side == ">=" else (goal + slack, goal - slack)
        )
        reason = "" if math.isfinite(accepted) else f"the accepted value is {accepted}"
        steady = direction == "steady" or (measured.scope == "sweep" and direction == "lower")
        if steady and size < better:
            default = "it is to stay as it is: the tensors are the same"
            side, bound, reason = ">=", better, (measured.why or {}).get(metric, default)
        elif _is_void(known, size, goal):
            side, bound, reason = (
                ">=",
                goal * _TRACE,
                "nothing differs any more",
            )
        yield check(
            measured,
            metric,
            "regression",
            within(size, side, bound),
            value=value,
            side=side,
            bound=bound,
            against=accepted,
            times=times_over(metric, size, side, bound),
            improved=not reason and (size > better if side == ">=" else size < better),
            allowed=tolerance,
            source=limits.source(name),
            reason=reason,
        )


def _is_void(metric: Metric, size: float, goal: float) -> bool:
    """Whether an error that was there is all but gone: the reference against itself has none."""
    return metric.relative and goal > _LEAST and size < goal * _TRACE


def _text(measured: Measured, metric: str) -> Check:
    """Compare a text, such as what quantizes a site, with the accepted one."""
    now, accepted = measured.texts.get(metric, ""), measured.accepted_texts.get(metric, "")
    why = (measured.why or {}).get(metric, "")
    if not accepted:
        reason = why or "no accepted value"
        return check(measured, metric, "missing", False, value=0.0, text=now, reason=reason)
    return check(
        measured,
        metric,
        "regression",
        now == accepted,
        value=float(now != accepted),
        side="==",
        bound=0.0,
        against=0.0,
        times=0.0 if now == accepted else math.inf,
        reason=why,
        text=now,
        accepted_text=accepted,
    )


def _equal(measured: Measured, metric: str, value: float, accepted: float) -> Check:
    return check(
        measured,
        metric,
        "regression",
        within(value, "==", accepted),
        value=value,
        side="==",
        bound=accepted,
        against=accepted,
        times=times_over(metric, value, "==", accepted),
        reason=(measured.why or {}).get(metric, ""),
    )


def _absolute(measured: Measured, bound: Bound) -> Check:
    value = measured.value(bound.metric)
    size = abs(value) if value is not None and bound.magnitude else value
    return check(
        measured,
        bound.metric,
        "absolute",
        bound.holds(value),
        value=value,
        side=bound.side,
        bound=bound.value,
        times=times_over(bound.metric, size, bound.side, bound.value),
        source=bound.source,
        reason=f"{bound.metric} was not computed" if value is None else bound.reason,
    )
