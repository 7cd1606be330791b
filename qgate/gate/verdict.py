"""Pass or fail, with reasons: all sites are looked at, whatever the first one says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qgate.errors import QgateError
from qgate.gate.checks import Check, checks_of
from qgate.gate.limits import Limits
from qgate.gate.measured import Measured


@dataclass(frozen=True)
class Verdict:
    """What was measured and every check of it, in order of execution."""

    measured: tuple[Measured, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """Worst first: not finite, then by times over the bound, then missing ones."""
        bad = (check for check in self.checks if not check.passed)
        return tuple(sorted(bad, key=lambda check: check.badness))

    @property
    def improved(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.improved)

    @property
    def missing(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.kind == "missing")

    @property
    def has_local(self) -> bool:
        return any(measured.scope == "local" for measured in self.measured)

    @property
    def first_source(self) -> str | None:
        """The first site whose local error is out: where the error enters."""
        out = (
            check
            for check in self.checks
            if check.scope == "local"
            and check.kind in ("nonfinite", "budget", "regression", "absolute")
            and not check.passed
        )
        return next((check.site for check in out), None)

    def binding(self, site: str, scope: str) -> Check:
        """The check that bound a site: the worst failure, or the one nearest to its limit."""
        here = [check for check in self.checks if (check.site, check.scope) == (site, scope)]
        if not here:
            raise QgateError(f"{site} ({scope}) is not in this verdict.")
        return min(here, key=lambda check: (check.passed, check.badness))

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "first_source": self.first_source,
            "checks": [check.to_dict() for check in self.checks],
        }


def judge(
    measured: Sequence[Measured],
    limits_of: Callable[[Measured], Limits],
    device_matches: bool,
    *,
    absent: Iterable[tuple[str, str]] = (),
) -> Verdict:
    """Hold every site against its limits.

    `absent` are the (site, scope) that have accepted values but were not measured: they fail.
    Nothing measured is an error, not a pass.
    """
    ordered = sorted(measured, key=lambda each: (each.order, each.site, each.scope))
    gone = sorted(set(absent))
    if not ordered and not gone:
        raise QgateError("nothing was measured: a gate that compared nothing does not pass.")
    for (site, scope), times in Counter([*(each.key for each in ordered), *gone]).items():
        if times > 1:
            raise QgateError(f"{site} ({scope}) is given {times} times: a site is judged once.")
    checks = [
        check for each in ordered for check in checks_of(each, limits_of(each), device_matches)
    ]
    last = ordered[-1].order + 1 if ordered else 0
    checks += [_absent(site, scope, last) for site, scope in gone]
    return Verdict(tuple(ordered), tuple(sorted(checks, key=lambda check: check.place)))


def _absent(site: str, scope: str, order: int) -> Check:
    return Check(
        site=site,
        layer="",
        scope=scope,
        order=order,
        metric="",
        kind="absent",
        passed=False,
        reason="accepted, but not measured: the set of sites changed",
    )
