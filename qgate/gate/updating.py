"""Updates of the accepted errors: what one stores, and what it cannot.

| state of an entry | failed (default) | new | all |
|---|---|---|---|
| in tolerance | kept | kept | rewritten |
| worse | rewritten | fails | rewritten |
| improved | rewritten | kept, listed | rewritten |
| missing | written | written | written |
| accepted, but not measured | removed | fails | removed |
| broken | fails, kept | fails, kept | fails, kept |

An entry is one metric of one site and scope. Broken is what is not finite, over an absolute limit
or over the format budget; then that site and scope is left alone whole, since the other numbers of
a broken tensor are not worth accepting either. At the end of a run a mode is left out whole where a
limit broke that says what is right (`LimitKind.bars_mode`). Of a gate whose plan changed nothing is
written, unless the plan is accepted too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from qgate.charts.overviews import Overview, Overviewed
from qgate.errors import unknown
from qgate.gate.checks import TASK_CHANGE, Check
from qgate.gate.measured import is_finite
from qgate.gate.verdict import Verdict
from qgate.metrics import METRICS, sample_number
from qgate.results.limit_kinds import LIMIT_KINDS
from qgate.text import counted

Which = Literal["failed", "new", "all"]
WHICH: tuple[Which, ...] = get_args(Which)
Key = tuple[str, str, str]
State = Literal["new", "worse", "improved", "same", "removed"]


@dataclass(frozen=True)
class EntryChange:
    """One entry, old → new; a removed one is a whole site and scope without a metric."""

    site: str
    scope: str
    metric: str
    state: State
    old: float | str | None
    new: float | str | None


@dataclass(frozen=True, repr=False)
class GateUpdate(Overviewed):
    """Entries to write, (site, scope) to remove, and the failures that remain."""

    values: dict[Key, float | str]
    removed: tuple[tuple[str, str], ...]
    changes: tuple[EntryChange, ...]
    remaining: tuple[Check, ...]
    hint: str

    def overview(self) -> Overview:
        """Describe the update: its changes, old and new."""
        title = f"Update of {counted(len(self.values), 'value')}"
        title += f", {len(self.removed):,} removed, {len(self.remaining):,} failures remain"
        return Overview(title, self.changes, vars, "change", [self.hint] if self.hint else [])

    @property
    def passed(self) -> bool:
        return not self.remaining


def decide_update(
    verdict: Verdict, which: Which = "failed", accept_plan: bool = False
) -> GateUpdate:
    """Return what `--update-baselines` writes for a verdict.

    Where a site has another quantizer than was accepted, it writes nothing without `accept_plan`.
    """
    if which not in WHICH:
        raise unknown("choice of what to update", which, WHICH)
    if not accept_plan and any(check.is_plan_change for check in verdict.failed):
        return GateUpdate({}, (), (), verdict.failed, hint(verdict.failed))
    broken = {
        (check.site, check.scope) for check in verdict.failed if not check.limit.is_acceptable
    }
    open_checks = [check for check in verdict.checks if (check.site, check.scope) not in broken]
    changes = [
        change
        for check in open_checks
        if (change := _change(check)) is not None and _is_written(change.state, which)
    ]
    changes += _parts(verdict, broken)
    changes += [change for change in _samples(verdict, broken) if _is_written(change.state, which)]
    values = {
        (change.site, change.scope, change.metric): change.new
        for change in changes
        if change.new is not None
    }
    removed = tuple((change.site, change.scope) for change in changes if change.state == "removed")
    remaining = tuple(
        check
        for check in verdict.failed
        if not check.limit.is_acceptable
        or not (_is_settled(check, values) or (check.site, check.scope) in removed)
    )
    return GateUpdate(values, removed, tuple(changes), remaining, hint(remaining))


def _change(check: Check) -> EntryChange | None:
    """Return what an update could do about one check, None where there is nothing."""
    if check.limit.is_absent:
        return EntryChange(*check.key, "removed", None, None)
    if not check.limit.is_acceptable or not is_finite(check.value) or check.metric == TASK_CHANGE:
        return None
    if check.limit.is_new:
        return EntryChange(*check.key, "new", None, check.text or check.value)
    state: State = "improved" if check.improved else "same" if check.passed else "worse"
    old, new = check.accepted_text or check.against, check.text or check.value
    return EntryChange(*check.key, state, old, new)


def _is_written(state: State, which: Which) -> bool:
    if state == "new" or which == "all":
        return True
    return which == "failed" and state in ("worse", "improved", "removed")


def _parts(verdict: Verdict, broken: set[tuple[str, str]]) -> Iterator[EntryChange]:
    """Return numbers of parts, which are recorded with a site that is new."""
    for measured in verdict.measured:
        if measured.key in broken or measured.accepted:
            continue
        for metric in measured.part_metrics():
            if metric not in measured.compared:
                yield EntryChange(*measured.key, metric, "new", None, measured.value(metric))


def _samples(verdict: Verdict, broken: set[tuple[str, str]]) -> Iterator[EntryChange]:
    """Return figures of single samples, which are accepted together."""
    moved = {
        (check.site, check.scope)
        for check in verdict.failed
        if check.metric == TASK_CHANGE or not check.about.pairs_samples
    }
    for measured in verdict.measured:
        if measured.key in broken:
            continue
        state: State = "worse" if measured.key in moved else "same"
        for name in measured.sample_figures().values():
            old = (measured.accepted or {}).get(name)
            if old is not None:
                yield EntryChange(*measured.key, name, state, old, measured.value(name))


def _is_settled(check: Check, values: Mapping[Key, float | str]) -> bool:
    """Tell if what an update writes cures a failure; a change of samples is cured by theirs."""
    if check.metric != TASK_CHANGE:
        return check.key in values
    return any(
        (site, scope) == (check.site, check.scope)
        and sample_number(METRICS.find(name).part) is not None
        for site, scope, name in values
    )


def hint(failed: tuple[Check, ...]) -> str:
    """Say what to do about failures that --update-baselines cannot accept; empty without one."""
    kinds = {check.kind for check in failed}
    sources = {check.kind: check.source for check in reversed(failed) if check.source}
    parts = [
        kind.advice.format(source=sources.get(kind.name, kind.usual_source))
        for kind in LIMIT_KINDS
        if kind.advice and kind.name in kinds
    ]
    return f"{'; '.join(parts)}: --update-baselines cannot accept this" if parts else ""
