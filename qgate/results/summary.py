"""The terminal summary: it looks across all layers, worst first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qgate.results.ranking import binding, check_text, one_line, severity, times_text, worst_first
from qgate.results.schema import latest


@dataclass(frozen=True)
class Counts:
    """Comparisons that passed and failed, checks, and comparisons improved or without baseline."""

    passed: int
    failed: int
    checks: int
    improved: int
    missing: int

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Counts:
        passed = sum(bool(record["passed"]) for record in records)
        checks = sum(len(record["checks"]) for record in records)
        improved = sum(any(c["improved"] for c in record["checks"]) for record in records)
        missing = sum(
            not record["passed"] and any(c["kind"] == "missing" for c in record["checks"])
            for record in records
        )
        return cls(passed, len(records) - passed, checks, improved, missing)

    def text(self) -> str:
        if not self.passed + self.failed:
            return "nothing was compared"
        return (
            f"{self.passed} passed, {self.failed} failed | {self.checks} checks | "
            f"improved: {self.improved} | missing: {self.missing}"
        )


def summary_lines(records: Iterable[Mapping[str, Any]], rows: int = 10) -> list[str]:
    """Counts, the worst against its limit per mode, then the failures; all of it worst first.

    Of tests that were run again only the last attempt counts.
    """
    ranked = worst_first(latest(records))
    counts = Counts.of(ranked)
    lines = [counts.text()]
    modes: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in ranked:
        modes.setdefault((str(record["model"]), str(record["mode"])), []).append(record)
    several = len({model for model, _ in modes}) > 1
    told = [_worst(here, several) for here in modes.values()]
    lines += _cut([line for line in told if line], rows, "more modes")
    failed = [record for record in ranked if not record["passed"]]
    unknown = [record for record in failed if _is_missing(record)]
    if unknown:
        where = dict.fromkeys(f"{one_line(r['model'])} {one_line(r['mode'])}" for r in unknown)
        shown = ", ".join([*where][:5]) + (", ..." if len(where) > 5 else "")
        lines.append(
            f"no accepted errors yet for {len(unknown)} comparisons ({shown}): record them with "
            "--update-baselines"
        )
    known = [f"failed: {_failure(record)}" for record in failed if not _is_missing(record)]
    lines += _cut(known, rows, "more in results.jsonl")
    if counts.improved:
        lines.append(f"{counts.improved} improved: bank it with --update-baselines")
    return lines


def _cut(lines: list[str], most: int, rest: str) -> list[str]:
    return [*lines[:most], *([f"+{len(lines) - most} {rest}"] if len(lines) > most else [])]


def _is_missing(record: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong but that no errors were accepted yet."""
    return all(check["passed"] or check["kind"] == "missing" for check in record["checks"])


def _is_new(record: Mapping[str, Any]) -> bool:
    return any(check["kind"] == "missing" for check in record["checks"])


def _worst(records: Sequence[Mapping[str, Any]], with_model: bool) -> str:
    """Of one mode: what is nearest to its limit or beyond it, and the grades of what it carries."""
    # What an update has just recorded was held against nothing yet.
    held = [r for r in records if not (r["passed"] and r["checks"] and _is_new(r))]
    found = [(severity(c), record, c) for record in held if (c := binding(record))]
    if not found:
        return ""
    _, record, check = max(found, key=lambda each: each[0])
    name = f"{record['model']} {record['mode']}" if with_model else record["mode"]
    line = f"worst vs limit: {name} {record['site']} {check['metric']} {times_text(check)}"
    return one_line(line + _grades(records))


def _grades(records: Sequence[Mapping[str, Any]]) -> str:
    carried = [r for r in records if r["scope"] == "carried" and r.get("grades")]
    parts = []
    for metric, label, sign in (("mse", "MSE", 1), ("correlation", "correlation", -1)):
        known = [
            (sign * r["values"][metric], r["grades"][metric])
            for r in carried
            if r["values"].get(metric) is not None
        ]
        if known:
            worst, grade = max(known)
            shown = f"{worst:.1e}" if metric == "mse" else correlation_text(-worst)
            parts.append(f"{label} {shown} {grade}")
    return f"; carries {', '.join(parts)}" if parts else ""


def correlation_text(value: float) -> str:
    """With digits enough to tell it from 1: `0.99987`."""
    gap = abs(1.0 - value)
    digits = 4 if not 0 < gap < 1e-3 else min(12, 2 + int(-math.log10(gap)))
    return f"{value:.{digits}f}"


def _failure(record: Mapping[str, Any]) -> str:
    check = binding(record)
    what = check_text(check) if check else "nothing compared"
    where = f"{record['site']} ({record['scope']}, {record['model']}, mode {record['mode']})"
    return one_line(f"{where}: {what}")
