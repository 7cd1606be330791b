"""The checks of a gate, and the verdict over all of them: which limit, which number, how far over.

An error is held from above, and an improvement is listed. One that is far better than accepted
fails until it is accepted: something else was computed, or it is worth keeping.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qgate.charts.overviews import Overview, Overviewed
from qgate.errors import QgateError
from qgate.gate.measured import Measured, is_finite
from qgate.gate.policy import FINDINGS, Bound, Limits, Side, room_for_few_tokens, times_over, within
from qgate.metrics import METRICS, Metric, sample_number
from qgate.metrics.intervals import mean_interval
from qgate.metrics.plan_changes import is_plan_change
from qgate.results.checks import severity
from qgate.results.kinds import NO_ACCEPTED, LimitKind, Scope, limit_kind_of, scope_of
from qgate.results.run_facts import DefectKind, SmallestDefect
from qgate.text import counted

NO_SAMPLES = "the accepted file has figures of the mean alone: --update-baselines adds the samples"
TASK_CHANGE = "task_change"
# Stands for a quantizer where there is none: a plan that covers less is no improvement.
NOT_QUANTIZED = "nothing"
# Half the error (3 dB) is no noise of other arithmetic, which moves an error against FP32 by 5 %
# at most. What has less meaning may fall, but not to a millionth. Below 1e-12 all is noise.
_FAR_BETTER, _TRACE, _LEAST = 0.5, 1e-6, 1e-12

_MOVED = 3
# Bits per byte that sums of float64 numbers cannot tell from none.
_NOTHING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number held against one limit.

    scope, kind   names of a scope and of a kind of limit
    against    what the limit was made from: the accepted value or the ideal quantizer's error
    bound      what the value has to keep, on the side `side`
    times      how many times over the bound; None where there is no number to compare with
    source     where the limit was set
    reason     in words, where numbers do not say it
    text       what it is, where that is a text: then `value` is 0 if it is the accepted one, else 1
    accepted_text   the text that was accepted
    accepted_on     the device of the accepted value, where other arithmetic made it
    room            how much the arithmetic of this device adds, which the bound allows beside
                    `allowed`
    """

    site: str
    layer: str
    scope: str
    order: int
    metric: str
    kind: str
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
    accepted_on: str = ""
    room: float = 0.0

    @property
    def about(self) -> Scope:
        return scope_of(self.scope)

    @property
    def limit(self) -> LimitKind:
        return limit_kind_of(self.kind)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.site, self.scope, self.metric

    @property
    def position(self) -> tuple[int, str, str, str, str]:
        """Sorts in the order of execution, made total."""
        return self.order, self.site, self.scope, self.metric, self.kind

    @property
    def badness(self) -> tuple[Any, ...]:
        """Sorts worst first: not finite, then by times over the bound, then without a number."""
        return (*(-rank for rank in severity(vars(self))), *self.position)

    @property
    def is_plan_change(self) -> bool:
        """Tell if the site has another quantizer than was accepted, which an update asks about."""
        return is_plan_change(vars(self))

    def to_dict(self) -> dict[str, object]:
        """Return the fields, those about another device only where one accepted the value."""
        unused = () if self.accepted_on else ("accepted_on", "room")
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in unused}


def checks_of(measured: Measured, limits: Limits, device_matches: bool = True) -> list[Check]:
    """Make all checks of one site; one that has nothing to check fails for that."""
    checks = [
        *_void(measured),
        *_nonfinite(measured),
        *_isolated(measured),
        *(
            _bounded(measured, v.metric, "conformance", v.share, "<=", 0.0, reason=v.about)
            for v in measured.conformance
        ),
        *_budget(measured, limits),
        *_accepted(measured, limits, device_matches),
        *_samples(measured, limits, device_matches),
        *(_absolute(measured, bound) for bound in limits.absolute.values()),
    ]
    return checks or [check(measured, "", "nothing", False, reason="nothing was compared")]


def check(measured: Measured, metric: str, kind: str, passed: bool, **fields: Any) -> Check:
    return Check(
        site=measured.site, layer=measured.layer, scope=measured.scope, order=measured.order,
        metric=metric, kind=kind, passed=passed, **fields,
    )  # fmt: skip


def _bounded(
    measured: Measured,
    metric: str,
    kind: str,
    value: float | None,
    side: Side,
    bound: float,
    *,
    size: float | None = None,
    **fields: Any,
) -> Check:
    """Check a value against a bound, or its `size` where that is what counts."""
    size = value if size is None else size
    times = times_over(metric, size, side, bound)
    passed = within(size, side, bound)
    return check(
        measured, metric, kind, passed, value=value, side=side, bound=bound, times=times, **fields
    )


def _void(measured: Measured) -> Iterator[Check]:
    """Fail what was measured of something that is not in effect."""
    if reason := (measured.why or {}).get("nothing"):
        yield check(measured, "", "nothing", False, times=math.inf, reason=reason)


def _nonfinite(measured: Measured) -> Iterator[Check]:
    for name, tensor in (("nonfinite", "actual"), ("nonfinite_reference", "the reference")):
        if count := getattr(measured, name):
            first = (measured.why or {}).get(name, "")
            reason = f"{count} NaN or infinite in {tensor}{f', first in {first}' if first else ''}"
            about = {"value": float(count), "bound": 0.0, "times": math.inf, "reason": reason}
            yield check(measured, name, "nonfinite", False, **about)


def _isolated(measured: Measured) -> Iterator[Check]:
    """Check what FP32 code makes of a run's own tensors against the noise of that code."""
    if measured.about.against_noise:
        metric = "relative_mse@worst_token"
        reason = (measured.why or {}).get("isolated", "")
        value, bound = measured.value(metric), measured.floor
        if reason and within(value, "<=", bound):
            # The size of the error is that of noise, and still it is none.
            about = {"value": value, "times": math.inf, "reason": reason}
            yield check(measured, metric, "isolated", False, **about)
            return
        yield _bounded(measured, metric, "isolated", value, "<=", bound, reason=reason)


def _budget(measured: Measured, limits: Limits) -> Iterator[Check]:
    """Check a local error against an ideal quantizer's; where that is exact, against the noise.

    An error well below the ideal's is no improvement: no quantizer of that format can make it.
    """
    if not measured.about.has_budget or measured.ideal is None:
        return
    metric, value = "relative_mse", measured.value("relative_mse")
    ideal = measured.ideal.get(metric, math.nan)
    allowed, source = limits.budget_db, limits.source("budget_db")
    bounded = partial(
        _bounded, measured, metric, "budget", value, against=ideal, allowed=allowed, source=source,
        quantizer=measured.quantizer,
    )  # fmt: skip
    failed = partial(
        check, measured, metric, "budget", False, value=value, against=ideal, allowed=allowed,
        source=source, quantizer=measured.quantizer, times=math.inf,
    )  # fmt: skip
    if not (math.isfinite(ideal) and ideal >= 0):
        yield failed(reason=f"the ideal quantizer's error is {ideal}")
        return
    factor = _factor(limits.budget_db)
    most = measured.floor if ideal == 0 else (ideal + measured.floor) * factor
    checks = [bounded("<=", most)]
    least = (ideal - measured.floor) / factor
    if is_finite(value) and least > 0 and not within(value, ">=", least):
        checks.append(bounded(">=", least, reason="nothing is quantized here, or not as declared"))
    unexplained = (measured.why or {}).get("budget", "")
    if unexplained and all(bound.passed for bound in checks):
        # The size of the error is right, and still it is another error.
        checks = [failed(reason=unexplained)]
    yield from checks


def _factor(db: float) -> float:
    try:
        return float(10 ** (db / 10))
    except OverflowError:
        return math.inf


def _accepted(measured: Measured, limits: Limits, device_matches: bool) -> Iterator[Check]:
    """Compare what was accepted with what is there now, metric by metric."""
    for name in measured.compared:
        metric = METRICS.get(name)
        if metric.textual:
            yield _text(measured, name)
            continue
        if sample_number(metric.part) is not None:
            continue
        value = measured.value(name)
        if value is None or not math.isfinite(value):
            why = f"{name} {'was not computed' if value is None else f'is {value}'}"
            times = math.inf
            yield check(measured, name, "nonfinite", False, value=value, times=times, reason=why)
            continue
        accepted = (measured.accepted or {}).get(name)
        is_same = device_matches and name not in measured.elsewhere
        if accepted is None:
            is_same = device_matches and metric.base not in measured.elsewhere
            if not is_same and _is_accepted_whole(measured, metric, value, limits):
                continue
            why = _missing(measured)
            yield check(measured, name, "missing", False, value=value, reason=why)
        elif metric.direction == "equal":
            why = (measured.why or {}).get(name, "")
            yield _bounded(
                measured, name, "regression", value, "==", accepted, against=accepted, reason=why
            )
        else:
            yield _regression(measured, metric, value, accepted, limits, is_same)


def _samples(measured: Measured, limits: Limits, device_matches: bool) -> Iterator[Check]:
    """Compare the figure of each sample with its accepted one, and judge their mean change.

    It passes if the whole interval of the mean change lies within the margin, on both sides: a few
    samples that move much make the interval wide.
    """
    figures = measured.sample_figures()
    accepted = measured.accepted_samples()
    now = {number: measured.value(name) for number, name in figures.items()}
    for number, name in figures.items():
        if number not in accepted and is_finite(now[number]):
            why = _missing(measured) if accepted or not measured.accepted else NO_SAMPLES
            yield check(measured, name, "missing", False, value=now[number], reason=why)
    paired = {number: value for number, value in now.items() if value is not None}
    is_paired = accepted and accepted.keys() == paired.keys() and measured.about.pairs_samples
    if not (is_paired and all(map(is_finite, now.values()))):
        return
    change = paired_change(accepted, paired)
    device_matches = device_matches and measured.elsewhere.keys().isdisjoint(figures.values())
    limit = limits.task_limit(device_matches)
    share = getattr(limits, limit) * room_for_few_tokens(sum(measured.positions))
    margin = share * abs(sum(accepted.values()) / len(accepted)) + limits.atol
    yield _bounded(
        measured, TASK_CHANGE, "regression", change.largest, "<=", margin, allowed=share,
        source=limits.source(limit), reason=change.text(),
    )  # fmt: skip


def _missing(measured: Measured) -> str:
    """Say what is missing: all of a new site, or a line that its others were written with."""
    if not (measured.accepted or measured.accepted_texts):
        return NO_ACCEPTED
    return "which other metrics of the site have: its line was removed, or never written"


def _is_accepted_whole(measured: Measured, metric: Metric, value: float, limits: Limits) -> bool:
    """Tell if a part is what was accepted for the whole, to the tolerance of another device.

    An element at the edge of being massive may be so on one device only.
    """
    accepted = (measured.accepted or {}).get(metric.base)
    if metric.part != "without_massive" or accepted is None:
        return False
    slack = limits.tolerance(False, metric) * abs(accepted) + limits.atol + measured.floor
    return abs(value - accepted) <= slack


def _regression(
    measured: Measured,
    metric: Metric,
    value: float,
    accepted: float,
    limits: Limits,
    device_matches: bool,
) -> Check:
    """Check a value against the accepted one and its tolerance, on the side where it is worse."""
    tolerance = limits.tolerance(device_matches, metric, measured.carried_tokens)
    size, goal = (abs(value), abs(accepted)) if metric.signed else (value, accepted)
    slack = metric.slack(tolerance, goal) + limits.atol
    if metric.relative or metric.counted:
        slack += measured.floor
    if metric.counted:
        slack += limits.counted_slack(device_matches, measured.grain)
    room = measured.device_room.get(metric.name, 0.0)
    slack += room
    side: Side = ">=" if metric.direction == "higher" else "<="
    bound, better = (goal - slack, goal + slack) if side == ">=" else (goal + slack, goal - slack)
    reason = "" if math.isfinite(accepted) else f"the accepted value is {accepted}"
    is_steady = metric.direction == "steady" or (measured.about.is_steady and side == "<=")
    if is_steady and (metric.task or not limits.other_weights) and size < better:
        default = "it is to stay as it is: the tensors are the same"
        side, bound, reason = ">=", better, (measured.why or {}).get(metric.name, default)
    elif metric.relative and goal > _LEAST:
        is_held = measured.about.is_two_sided and not metric.part
        least = goal * (_FAR_BETTER / (1 + tolerance) if is_held else _TRACE) - limits.atol
        if size < least:
            side, bound, reason = ">=", least, _far_better(size, goal)
    task, others = limits.task_limit(device_matches), limits.regression_limit(device_matches)
    moved = _bounded(
        measured, metric.name, "regression", value, side, bound, size=size, against=accepted,
        improved=not reason and (size > better if side == ">=" else size < better),
        allowed=tolerance, source=limits.source(task if metric.task else others), reason=reason,
        accepted_on=measured.elsewhere.get(metric.name, ""), room=room,
    )  # fmt: skip
    if not (metric.tolerance and slack):
        return moved
    # Of what may move by a share of its own, the move counts: the value is always near its bound.
    return dataclasses.replace(moved, times=abs(size - goal) / slack)


def _far_better(size: float, accepted: float) -> str:
    if size <= accepted * _TRACE:
        return "nothing differs any more"
    better = 10 * math.log10(accepted / size)
    return f"{better:.1f} dB better than accepted: something else was computed, or accept it"


def _text(measured: Measured, metric: str) -> Check:
    """Compare a text, such as what quantizes a site, with the accepted one."""
    now, accepted = measured.texts.get(metric, ""), measured.accepted_texts.get(metric, "")
    why = (measured.why or {}).get(metric, "")
    if not accepted:
        # Nothing was accepted for a new site; at a site with accepted errors nothing quantized.
        before = NOT_QUANTIZED if measured.accepted else ""
        about = {"value": 0.0, "text": now, "reason": why or _missing(measured)}
        about |= {"accepted_text": before}
        return check(measured, metric, "missing", False, **about)
    differs = float(now != accepted)
    return check(
        measured,
        metric,
        "regression",
        not differs,
        value=differs,
        side="==",
        bound=0.0,
        against=0.0,
        times=math.inf if differs else 0.0,
        reason=why,
        text=now,
        accepted_text=accepted,
    )


def _absolute(measured: Measured, bound: Bound) -> Check:
    value, about = measured.value(bound.metric), (measured.why or {}).get(bound.metric, "")
    size = abs(value) if value is not None and bound.magnitude else value
    return check(
        measured,
        bound.metric,
        "finding" if bound.metric == FINDINGS else "absolute",
        bound.holds(value),
        value=value,
        side=bound.side,
        bound=bound.value,
        times=times_over(bound.metric, size, bound.side, bound.value),
        source=bound.source,
        reason=f"{bound.metric} was not computed" if value is None else about or bound.reason,
    )


@dataclass(frozen=True)
class PairedChange:
    """Mean change of samples with its 95 % interval, and all changes, the largest first."""

    mean: float
    low: float
    high: float
    changes: tuple[tuple[int, float], ...]

    @property
    def largest(self) -> float:
        """Return how far from zero the mean may be, on either side."""
        return max(abs(self.low), abs(self.high))

    def text(self) -> str:
        """Write the mean with its interval, and the samples that moved most."""
        moved = [
            f"{number} by {_figure(change)}" for number, change in self.changes[:_MOVED] if change
        ]
        if len(self.changes) == 1:
            return f"{_figure(self.mean)} of one sample, which has no interval"
        mean = (
            f"{_figure(self.mean)} in the mean of {len(self.changes)} samples, 95 % interval "
            f"{_figure(self.low)} to {_figure(self.high)}"
        )
        return f"{mean}; most moved: sample {', '.join(moved)}" if moved else mean


def paired_change(before: Mapping[int, float], now: Mapping[int, float]) -> PairedChange:
    """Compare the figures of samples, by number; a single sample has no interval.

    Two or three samples are not enough for an interval of the mean: it is no wider, to each side,
    than their changes lie apart.
    """
    changes = {number: now[number] - before[number] for number in before}
    mean, half = mean_interval([*changes.values()])
    half = min(half, max(changes.values()) - min(changes.values()))
    ordered = sorted(changes.items(), key=lambda change: (-abs(change[1]), change[0]))
    return PairedChange(mean, mean - half, mean + half, tuple(ordered))


def _figure(value: float) -> str:
    return f"{value:+.2g}" if abs(value) > _NOTHING else "0"


# The verdict: every site is checked, whatever the first one says ----------------------------------


_NO_SITE = "no such site"


@dataclass(frozen=True, repr=False)
class Verdict(Overviewed):
    """Measured rows and all their checks, in the order of execution."""

    measured: tuple[Measured, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def overview(self) -> Overview:
        """Describe the verdict: what failed, worst first, then what passed nearest to its limit."""
        passed = sorted((c for c in self.checks if c.passed), key=lambda c: -(c.times or 0.0))
        failed = self.failed
        title = f"Verdict: {counted(len(self.checks), 'check')} at "
        title += f"{counted(len(self.measured), 'place')}, {len(failed):,} failed"
        source = [f"the error enters at {self.first_source}"] if self.first_source else []
        rows = [*failed, *passed]
        return Overview(title, rows, _check_row, "check", source, "times the limit")

    @property
    def failed(self) -> tuple[Check, ...]:
        """Worst first: not finite, then by times over the bound, then missing ones."""
        bad = (check for check in self.checks if not check.passed)
        return tuple(sorted(bad, key=lambda check: check.badness))

    @property
    def improved(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.improved)

    @property
    def has_local(self) -> bool:
        return any(measured.about.has_budget for measured in self.measured)

    @property
    def entry(self) -> Check | None:
        """Return the failure where the error enters: against no accepted value if there is any.

        Local and isolated errors are made at their sites, so the first one in the order of the
        model is the cause; of two engines it is the first beyond what was accepted.
        """
        own = [check for check in self.failed if check.about.enters and check.limit.has_number]
        return min(own, key=lambda c: (c.limit.needs_accepted, *c.position), default=None)

    @property
    def first_source(self) -> str | None:
        """Return the site where the error enters."""
        return None if self.entry is None else self.entry.site


def _check_row(check: Check) -> dict[str, object]:
    return {
        "site": check.site, "scope": check.scope, "metric": check.metric, "value": check.value,
        "limit": check.bound, "times the limit": check.times,
        "verdict": "passed" if check.passed else check.reason or f"failed ({check.kind})",
    }  # fmt: skip


def judge(
    measured: Sequence[Measured],
    limits_of: Callable[[Measured], Limits],
    device_matches: bool = True,
    *,
    absent: Mapping[tuple[str, str], str] | None = None,
    kept_on: Mapping[tuple[str, str], str] | None = None,
) -> Verdict:
    """Check every site against its limits.

    Unless `device_matches`, all accepted values are of other arithmetic; else `Measured.elsewhere`
    says which are.
    `absent` has the (site, scope) with accepted values that were not measured, each with the
    quantizer that was accepted there, or an empty text: they fail. `kept_on` has the devices of
    those that another kind of device accepted.
    Nothing measured is an error, not a pass.
    """
    ordered = sorted(measured, key=lambda row: (row.order, row.site, row.scope))
    gone = sorted((absent or {}).items())
    if not ordered and not gone:
        raise QgateError("nothing was measured: a gate that compared nothing does not pass.")
    for (site, scope), times in Counter([*(row.key for row in ordered), *(absent or ())]).items():
        if times > 1:
            raise QgateError(f"{site} ({scope}) is given {times} times: a site is judged once.")
    checks = [check for row in ordered for check in checks_of(row, limits_of(row), device_matches)]
    last = ordered[-1].order + 1 if ordered else 0
    reason = "accepted, but not measured: the set of sites changed"
    checks += [
        Check(
            site=site, layer="", scope=scope, order=last, metric="", kind="absent", passed=False,
            reason=reason, accepted_text=quantizer, text=_NO_SITE if quantizer else "",
            accepted_on=(kept_on or {}).get((site, scope), ""),
        )
        for (site, scope), quantizer in gone
    ]  # fmt: skip
    return Verdict(tuple(ordered), tuple(sorted(checks, key=lambda check: check.position)))


# Power: the smallest defects that the checks of a gate would have seen ----------------------------
#
# A defect adds to the error of a tensor. The room between an error and its bound is what it may
# add, for the tensor as a whole and for the worst channel, token or sample. The defect is in a
# channel, token or sample with the mean error, and a scale that is off by one halves what it
# scales. Where isolated errors are compared, their limit at float noise sees less; and where
# quantized weights are held bit for bit, any change of any weight.

# Squared relative error of what is half of what it should be.
_HALVED = 0.25
_LAST_PLACE = 2.0**-24
"""The smallest relative change that a float32 can have."""
Sizes = Iterator[tuple[DefectKind, float]]


def smallest_defects(verdict: Verdict) -> list[SmallestDefect]:
    """Return for each kind the smallest defect that would have been red at every site."""
    checks: dict[tuple[str, str], list[Check]] = {}
    for check in verdict.checks:
        checks.setdefault((check.site, check.scope), []).append(check)
    seen: dict[str, dict[DefectKind, float]] = {}
    for row in verdict.measured:
        sizes = seen.setdefault(row.site, {})
        for kind, size in _sizes(row, checks.get(row.key, ())):
            if math.isfinite(size):
                sizes[kind] = min(size, sizes.get(kind, math.inf))
    largest: dict[DefectKind, SmallestDefect] = {}
    for site, sizes in seen.items():
        for kind, size in sizes.items():
            if kind not in largest or largest[kind]["size"] < size:
                largest[kind] = SmallestDefect(kind=kind, size=size, site=site)
    return [*largest.values()]


def _sizes(row: Measured, checks: Sequence[Check]) -> Sizes:
    if row.about.is_task:
        own = [name for name in row.values if METRICS.find(name).task]
        room = min(_room(checks, name) for name in (TASK_CHANGE, *own))
        yield "metric" if own else "task", room
    elif not all(check.passed for check in checks):
        return
    elif row.about.against_noise:
        yield from _isolated_sizes(row, checks)
    elif row.about.has_budget:
        yield from _local_sizes(row, checks)


def _isolated_sizes(row: Measured, checks: Sequence[Check]) -> Sizes:
    room = _room(checks, "relative_mse@worst_token")
    if row.site.rpartition(":")[2] == "output" and math.isfinite(room):
        # Every token of a sample is compared, and a channel is one of several in each token.
        yield "token", math.sqrt(room)
        yield "sample", math.sqrt(room)
        if row.channels:
            yield "channel", math.sqrt(room * row.channels)


def _local_sizes(row: Measured, checks: Sequence[Check]) -> Sizes:
    port = row.site.rpartition(":")[2]
    # A site that is not held has one value, which says why.
    is_whole = port == "weight" and any(held.values > 1 for held in row.conformance)
    if is_whole:
        yield "weight", _LAST_PLACE
    error = row.value("relative_mse")
    if not error:
        return
    # Noise that adds to the relative MSE adds half of it to what correlation lacks.
    whole = min(_room(checks, "relative_mse"), 2 * _room(checks, "one_minus_correlation"))
    if port == "weight":
        yield "weight", math.sqrt(whole)
        if not is_whole:
            yield "scale", min(1.0, whole / _HALVED)
        return
    kinds: tuple[DefectKind, ...] = ("token", "sample", "channel")
    # Samples have about the same energy; that of a token or channel may be next to none.
    most = {"sample": whole * len(row.positions)}
    for kind in kinds if port == "output" else kinds[:2]:
        worst = row.value(f"relative_mse@worst_{kind}")
        if worst is not None:
            part = _room(checks, f"relative_mse@worst_{kind}") + worst - error
            yield kind, math.sqrt(max(0.0, min(part, most.get(kind, math.inf))))


def _room(checks: Iterable[Check], metric: str) -> float:
    """Return by how much a value may grow until a limit is red; infinite without a limit."""
    rooms = [
        check.bound - check.value
        for check in checks
        if check.metric == metric and check.limit.has_room and check.side == "<="
        if check.bound is not None and check.value is not None
    ]
    return max(0.0, min(rooms, default=math.inf))
