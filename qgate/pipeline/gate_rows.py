"""Rows between rooms: from errors to what the gate judges, from a verdict to what is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qgate.baselines import Key
from qgate.gate import Check, Measured, Verdict, grades_of
from qgate.pipeline.site_errors import SiteErrors

FLOOR = 1e-12
GATED = ("relative_mse", "one_minus_correlation")


def record_rows(
    suite: str,
    model: str,
    mode: str,
    where: str,
    verdict: Verdict,
    failed: Sequence[Check],
) -> list[dict[str, Any]]:
    """One record per site and scope."""
    rows = []
    for each in verdict.measured:
        here = [c for c in verdict.checks if (c.site, c.scope) == each.key]
        grades = grades_of(each.values) if each.scope in ("carried", "local") else {}
        parts = {"without_massive": dict(each.without_massive)} if each.without_massive else {}
        rows.append(
            {
                "suite": suite,
                "model": model,
                "mode": mode,
                "layer": each.layer or where,
                "site": each.site,
                "scope": each.scope,
                "order": each.order,
                "values": dict(each.values),
                "ideal": dict(each.ideal or {}),
                "accepted": dict(each.accepted or {}),
                "checks": [check.to_dict() for check in here],
                "passed": not any((c.site, c.scope) == each.key for c in failed),
                **parts,
                **({"grades": grades} if grades else {}),
            }
        )
    return rows


def measured_of(
    row: SiteErrors,
    suite: str,
    accepted: Mapping[Key, float],
    gated: tuple[str, ...] = GATED,
) -> Measured:
    """The errors of a site with what was accepted for them."""
    found = accepted_of(accepted, suite, row)
    return Measured(
        site=row.site,
        layer=row.layer,
        scope=row.scope,  # type: ignore[arg-type]
        values=row.values,
        order=row.order,
        nonfinite=row.nonfinite,
        nonfinite_reference=row.nonfinite_reference,
        ideal=None if row.ideal is None else {"relative_mse": row.ideal},
        quantizer=row.quantizer,
        floor=FLOOR,
        accepted=found or None,
        worst_channel=None if row.worst_channel is None else {"relative_mse": row.worst_channel},
        without_massive=row.without_massive,
        gated=gated,
    )


def accepted_of(
    accepted: Mapping[Key, float], suite: str, row: SiteErrors | Measured
) -> dict[str, float]:
    """The accepted errors of one site and scope, by metric."""
    return {
        key.metric: value
        for key, value in accepted.items()
        if (key.suite, key.site, key.scope) == (suite, row.site, row.scope)
    }
