"""What an update of the accepted errors stores, and what it cannot.

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
a broken tensor are not worth accepting either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from qgate.errors import unknown
from qgate.gate.checks import ACCEPTABLE, Check
from qgate.gate.measured import is_finite
from qgate.gate.verdict import Verdict

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


@dataclass(frozen=True)
class GateUpdate:
    """Entries to write, (site, scope) to remove, and the failures that remain."""

    values: dict[Key, float | str]
    removed: tuple[tuple[str, str], ...]
    changes: tuple[EntryChange, ...]
    remaining: tuple[Check, ...]
    hint: str

    @property
    def passed(self) -> bool:
        return not self.remaining


def decide_update(verdict: Verdict, which: Which = "failed") -> GateUpdate:
    """What `--update-baselines` writes for a verdict."""
    if which not in WHICH:
        raise unknown("choice of what to update", which, WHICH)
    broken = {(check.site, check.scope) for check in verdict.failed if check.kind not in ACCEPTABLE}
    open_checks = [check for check in verdict.checks if (check.site, check.scope) not in broken]
    changes = [
        change
        for check in open_checks
        if (change := _change(check)) is not None and _wanted(change.state, which)
    ]
    changes += _parts(verdict, which, broken)
    values = {
        (change.site, change.scope, change.metric): change.new
        for change in changes
        if change.new is not None
    }
    removed = tuple((change.site, change.scope) for change in changes if change.state == "removed")
    remaining = tuple(
        check
        for check in verdict.failed
        if check.kind not in ACCEPTABLE
        or (check.key not in values and (check.site, check.scope) not in removed)
    )
    return GateUpdate(values, removed, tuple(changes), remaining, hint(remaining))


def _change(check: Check) -> EntryChange | None:
    """What an update could do about one check, None where there is nothing."""
    if check.kind == "absent":
        return EntryChange(*check.key, "removed", None, None)
    if check.kind not in ACCEPTABLE or not is_finite(check.value):
        return None
    if check.kind == "missing":
        return EntryChange(*check.key, "new", None, check.text or check.value)
    state: State = "improved" if check.improved else "same" if check.passed else "worse"
    old, new = check.accepted_text or check.against, check.text or check.value
    return EntryChange(*check.key, state, old, new)


def _wanted(state: State, which: Which) -> bool:
    if state == "new" or which == "all":
        return True
    return which == "failed" and state in ("worse", "improved", "removed")


def _parts(verdict: Verdict, which: Which, broken: set[tuple[str, str]]) -> Iterator[EntryChange]:
    """Numbers of the parts, recorded with a site that is new, and where all is rewritten."""
    for measured in verdict.measured:
        if measured.key in broken or (measured.accepted and which != "all"):
            continue
        for metric in measured.part_metrics():
            if metric not in measured.compared:
                yield EntryChange(*measured.key, metric, "new", None, measured.value(metric))


def hint(failed: tuple[Check, ...]) -> str:
    """What to do about failures that --update-baselines cannot accept; empty without one."""
    kinds = dict.fromkeys(check.kind for check in failed)
    sources = {check.kind: check.source for check in reversed(failed) if check.source}
    advice = {
        "nonfinite": "find what overflows or divides by zero",
        "absolute": f"fix the mode or change the limit ({sources.get('absolute', 'its suite')})",
        "budget": f"fix the quantizer or raise budget_db ({sources.get('budget', 'default')})",
        "nothing": "give the site metrics or an absolute limit to compare",
    }
    parts = [text for kind, text in advice.items() if kind in kinds]
    return f"{'; '.join(parts)}: --update-baselines cannot accept this" if parts else ""
