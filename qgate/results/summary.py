"""The terminal summary: it looks across all layers, worst first."""

from __future__ import annotations

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
        def having(test: str, value: object) -> int:
            return sum(any(c[test] == value for c in record["checks"]) for record in records)

        passed = sum(bool(record["passed"]) for record in records)
        checks = sum(len(record["checks"]) for record in records)
        improved, missing = having("improved", True), having("kind", "missing")
        return cls(passed, len(records) - passed, checks, improved, missing)

    def text(self) -> str:
        if not self.passed + self.failed:
            return "nothing was compared"
        return (
            f"{self.passed} passed, {self.failed} failed | {self.checks} checks | "
            f"improved: {self.improved} | missing: {self.missing}"
        )


def summary_lines(records: Iterable[Mapping[str, Any]], rows: int = 10) -> list[str]:
    """Counts, the worst against its limit per mode, then the failures, worst first.

    Of tests that were run again only the last attempt counts.
    """
    ranked = worst_first(latest(records))
    counts = Counts.of(ranked)
    lines = [counts.text()]
    for mode in sorted({str(record["mode"]) for record in ranked}):
        here = [record for record in ranked if str(record["mode"]) == mode]
        lines += [f"worst vs limit: {one_line(mode)} {text}" for text in _worst(here)]
    failed = [record for record in ranked if not record["passed"]]
    lines += [f"failed: {_failure(record)}" for record in failed[:rows]]
    if len(failed) > rows:
        lines.append(f"+{len(failed) - rows} more in results.jsonl")
    if counts.improved:
        lines.append(f"{counts.improved} improved: bank it with --update-baselines")
    return lines


def _worst(records: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [(severity(c), record, c) for record in records if (c := binding(record))]
    if not found:
        return []
    _, record, check = max(found, key=lambda each: each[0])
    return [f"{one_line(record['site'])} {check['metric']} {times_text(check)}"]


def _failure(record: Mapping[str, Any]) -> str:
    check = binding(record)
    what = check_text(check) if check else "nothing compared"
    where = f"{record['site']} ({record['scope']}, {record['model']}, mode {record['mode']})"
    return one_line(f"{where}: {what}")
