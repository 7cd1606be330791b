"""Rows between rooms: from errors to what the gate judges, from a verdict to what is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qgate.errors import QgateError
from qgate.gate import Check, Measured, Verdict, grades_of
from qgate.pipeline.gates.site_errors import SiteErrors
from qgate.results import binding
from qgate.results.pictures import Plots
from qgate.results.ranking import severity

FLOOR = 1e-12
GATED = ("relative_mse", "one_minus_correlation")
# What quantizes a site, as a text: a plan that covers less is no improvement.
_QUANTIZER, _NOTHING = "quantizer", "nothing"
# Failing rows of a gate that can be drawn, worst first: a broken mode fails at every site.
MOST_DRAWN = 8


def record_rows(
    suite: str,
    model: str,
    mode: str,
    where: str,
    verdict: Verdict,
    failed: Sequence[Check],
    plots: Plots = "none",
) -> list[dict[str, Any]]:
    """One record per site and scope; those that may be drawn carry what that takes."""
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
    for place in _drawn(rows, plots):
        if pictures := verdict.measured[place].pictures:
            rows[place]["pictures"] = [dict(each) for each in pictures]
    gone = [check for check in verdict.checks if check.kind == "absent"]
    return rows + [_absent(check, suite, model, mode, where) for check in gone]


def _drawn(rows: Sequence[Mapping[str, Any]], plots: Plots) -> list[int]:
    """The places of rows that failed, and of the one that came nearest to its limit."""
    if plots == "none":
        return []

    def rank(place: int) -> tuple[Any, ...]:
        check = binding(rows[place])
        return (not rows[place]["passed"], *(severity(check) if check else ()))

    ranked = sorted(range(len(rows)), key=rank, reverse=True)
    failed = [place for place in ranked if not rows[place]["passed"]][:MOST_DRAWN]
    return failed or (ranked[:1] if plots != "failed" else [])


def _absent(check: Check, suite: str, model: str, mode: str, where: str) -> dict[str, Any]:
    about = {"suite": suite, "model": model, "mode": mode, "layer": where, "order": check.order}
    nothing: dict[str, Any] = {"values": {}, "ideal": {}, "accepted": {}}
    checks = {"checks": [check.to_dict()], "passed": False}
    return {**about, "site": check.site, "scope": check.scope, **nothing, **checks}


def measured_of(row: SiteErrors, gated: tuple[str, ...] = GATED) -> Measured:
    """The errors of a site, and what quantizes it."""
    texts = {_QUANTIZER: row.quantizer} if row.quantizer else {}
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
        worst_channel=None if row.worst_channel is None else {"relative_mse": row.worst_channel},
        without_massive=row.without_massive,
        texts=texts,
        gated=(*gated, *texts) if gated else (),
        pictures=row.pictures,
    )


def with_accepted(row: Measured, found: Mapping[str, float | str]) -> Measured:
    """Add what was accepted to a row; where something quantized it once, that is asked for."""
    if row.accepted is not None:
        raise QgateError(
            f"what was measured at {row.site} brings accepted errors of its own: leave `accepted` "
            "out, they come from the baseline."
        )
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    numbers = {name: value for name, value in found.items() if not isinstance(value, str)}
    now = {**dict.fromkeys(texts, _NOTHING), **row.texts}
    return replace(row, accepted=numbers or None, accepted_texts=texts, texts=now)
