"""Order of checks and records, the worst first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from qgate.results.limit_kinds import limit_kind_of


def needs_accepted(check: Mapping[str, Any]) -> bool:
    """Tell if a check needs an accepted value or a chosen limit; others say what is right."""
    return limit_kind_of(check["kind"]).needs_accepted


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
