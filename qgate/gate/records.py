"""Records of a verdict: one per site and scope, the worst with pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qgate.gate.checks import Check
from qgate.gate.texts import finding
from qgate.gate.verdict import Verdict
from qgate.metrics.grades import grades_of
from qgate.results import binding
from qgate.results.pictures import Plots
from qgate.results.ranking import severity

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
    diagnoses: Mapping[tuple[str, str], str] | None = None,
) -> list[dict[str, object]]:
    """Return one record per site and scope; those that may be drawn carry what that takes.

    `diagnoses` say what is wrong at sites and scopes, where tensors told.
    """
    about = {"suite": suite, "model": model, "mode": mode}
    broken: dict[tuple[str, str], Check] = {}
    for failure in failed:
        key = (failure.site, failure.scope)
        broken[key] = min(broken.get(key, failure), failure, key=lambda c: c.badness)
    rows = []
    for measured in verdict.measured:
        checks = [c for c in verdict.checks if (c.site, c.scope) == measured.key]
        row: dict[str, object] = {
            **about,
            "layer": measured.layer or where,
            "site": measured.site,
            "scope": measured.scope,
            "order": measured.order,
            "values": dict(measured.values),
            "ideal": dict(measured.ideal or {}),
            "accepted": dict(measured.accepted or {}),
            "checks": [check.to_dict() for check in checks],
            "passed": measured.key not in broken,
        }
        if (check := broken.get(measured.key)) is not None:
            row["finding"] = finding(check, (diagnoses or {}).get(measured.key, ""))
        if calm := measured.parts.get("without_massive"):
            row["without_massive"] = dict(calm)
        if measured.about.has_grades and (grades := grades_of(measured.values)):
            row["grades"] = grades
        rows.append(row)
    drawable = [index for index, row in enumerate(verdict.measured) if row.pictures]
    for index in _rows_to_draw(rows, drawable, plots):
        rows[index]["pictures"] = [dict(picture) for picture in verdict.measured[index].pictures]
    nothing: dict[str, object] = {"values": {}, "ideal": {}, "accepted": {}}
    return rows + [
        {**about, "layer": where, "order": check.order, "site": check.site, "scope": check.scope}
        | {**nothing, "checks": [check.to_dict()], "passed": False, "finding": finding(check)}
        for check in failed
        if check.limit.is_absent
    ]


def _rows_to_draw(
    rows: Sequence[Mapping[str, Any]], drawable: Sequence[int], plots: Plots
) -> list[int]:
    """Return the indices of rows that failed, or of the one that came nearest to its limit."""
    if plots == "none":
        return []

    def rank(index: int) -> tuple[Any, ...]:
        check = binding(rows[index])
        return (not rows[index]["passed"], *(severity(check) if check else ()))

    ranked = sorted(drawable, key=rank, reverse=True)
    failed = [index for index in ranked if not rows[index]["passed"]][:MOST_DRAWN]
    return failed or (ranked[:1] if plots != "failed" else [])
