"""Which of many checks and records is the worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_WITHOUT_NUMBER = ("missing", "absent", "nothing")


def severity(check: Mapping[str, Any]) -> tuple[int, int, float]:
    """Sorts the worst check last: passed, failed without a number, over a limit, not finite."""
    times = check["times"]
    if check["passed"]:
        return 0, 0, times or 0.0
    if check["kind"] in _WITHOUT_NUMBER:
        return 1, 0, 0.0
    unfit = check["kind"] == "nonfinite" or check["value"] is None
    return 1, 2 if unfit else 1, math.inf if times is None else times


def binding(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The check that bound a record: its worst failure, or the one nearest to its limit."""
    return max(record["checks"], key=severity, default=None)


def binding_checks(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The check that bound each metric of a record."""
    found: dict[str, Mapping[str, Any]] = {}
    for check in record["checks"]:
        name = check["metric"]
        if name not in found or severity(check) > severity(found[name]):
            found[name] = check
    return found


def worst_first(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records by their binding checks; equal ones in the order of execution and by name."""

    def rank(record: Mapping[str, Any]) -> tuple[Any, ...]:
        check = binding(record)
        worst = severity(check) if check else (0, 0, 0.0)
        failed = not record["passed"]
        names = (str(record[name]) for name in ("mode", "model", "site", "scope", "node"))
        return (not failed, *(-each for each in worst), record.get("order", 0), *names)

    return sorted(records, key=rank)


def measured_places(
    records: Iterable[Mapping[str, Any]],
) -> dict[str, dict[str, set[tuple[str, str, str]]]]:
    """By model and name of accepted errors, the (suite, site, scope) that were compared."""
    found: dict[str, dict[str, set[tuple[str, str, str]]]] = {}
    for record in records:
        place = (record["suite"], record["site"], record["scope"])
        title = record.get("title", record["mode"])
        found.setdefault(record["model"], {}).setdefault(title, set()).add(place)
    return found


def times_text(check: Mapping[str, Any]) -> str:
    """`26.6x its limit (regression)`."""
    if check["kind"] in _WITHOUT_NUMBER:
        return str(check["kind"])
    if check["kind"] == "nonfinite" or check["value"] is None:
        return "not finite"
    times = math.inf if check["times"] is None else check["times"]
    shown = f"{times_figure(times)}x its limit" if math.isfinite(times) else "over a limit of 0"
    return f"{shown} ({check['kind']})"


def times_figure(times: float) -> str:
    """Three digits, or all before the point: `26.6`, `1346`; 1 only where it is 1, else `1.001`."""
    shown = f"{times:.0f}" if 1000 <= times < 1e7 else f"{times:.3g}"
    if shown != "1" or times == 1:
        return shown
    longer = (f"{times:.{digits}g}" for digits in range(4, 9))
    return next((text for text in longer if text != "1"), ">1" if times > 1 else "<1")


def check_text(check: Mapping[str, Any]) -> str:
    """`relative_mse 9.2e-04, limit <= 3.5e-05, 26.6x its limit (regression)`."""
    parts = [f"{check['metric']} {figure(value_of(check))}".strip()]
    if check["bound"] is not None:
        parts.append(f"limit {check['side']} {figure(bound_of(check))}")
    return ", ".join(part for part in [*parts, times_text(check)] if part)


def value_of(check: Mapping[str, Any]) -> float | str | None:
    """Return what was held against a limit: a number, or a text where the metric is one."""
    shown: float | str | None = check.get("text") or check["value"]
    return shown


def bound_of(check: Mapping[str, Any]) -> float | str | None:
    """Return the limit: a number, or the accepted text where the metric is one."""
    shown: float | str | None = check.get("accepted_text") or check["bound"]
    return shown


def figure(value: float | str | None) -> str:
    """Write four digits of a number, and a text as it is."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.4g}"
