"""Pass or fail, with reasons: every site is checked, whatever the first one says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qgate.charts.overviews import Overview, Overviewed
from qgate.errors import QgateError
from qgate.gate.checks import Check, checks_of
from qgate.gate.limits import Limits
from qgate.gate.measured import Measured
from qgate.text import counted

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
