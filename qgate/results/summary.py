"""What the records of a run come to: counts, each mode's worst, the failures.

Records are taken one at a time and let go, so that a file of any size can be summed up while it is
read for something else; what stays depends on the number of tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qgate.metrics import METRICS
from qgate.results.ranking import binding, severity, times_figure
from qgate.results.schema import Record

# Failures kept of one test and mode, worst first; the rest is counted.
MOST_FAILED = 40


@dataclass(frozen=True)
class GateCounts:
    """Comparisons that passed and failed, checks, and comparisons improved or without baseline."""

    passed: int
    failed: int
    checks: int
    improved: int
    missing: int

    def text(self) -> str:
        if not self.passed + self.failed:
            return "nothing was compared"
        return (
            f"{self.passed} passed, {self.failed} failed | {self.checks} checks | "
            f"improved: {self.improved} | missing: {self.missing}"
        )


class Finding(NamedTuple):
    """One comparison as tables show it, with the check that bound it."""

    rank: tuple[Any, ...]
    node: str
    model: str
    mode: str
    layer: str
    site: str
    scope: str
    passed: bool
    check: Mapping[str, Any] | None
    accepted: float | None

    @property
    def is_new(self) -> bool:
        """Whether nothing is wrong but that no errors were accepted yet."""
        return self.check is not None and self.check["kind"] == "missing"

    @property
    def times(self) -> float | None:
        """How many times its limit it is; None where no number says it."""
        return self.check["times"] if self.check else None


class Carried(NamedTuple):
    """The worst of one metric that a mode carries to the outputs of blocks, and its grade."""

    metric: str
    value: float
    grade: str

    def text(self) -> str:
        """`MSE 2.0e-02 poor`."""
        known = METRICS.find(self.metric)
        shown = correlation_text(self.value) if known.bounded else f"{self.value:.1e}"
        return f"{known.short} {shown} {self.grade}"

    @property
    def badness(self) -> float:
        """Sorts the worst last."""
        return -self.value if METRICS.find(self.metric).direction == "higher" else self.value


@dataclass(frozen=True)
class ModeSummary:
    """One mode of one model; `errors` is the largest relative MSE by scope."""

    model: str
    mode: str
    gates: int
    failed: int
    comparisons: int
    failures: int
    worst: Finding | None
    carried: tuple[Carried, ...]
    errors: Mapping[str, float]


@dataclass
class _Part:
    """What one test found in one mode."""

    passed: int = 0
    failed: int = 0
    checks: int = 0
    improved: int = 0
    missing: int = 0
    unknown: int = 0
    worst: Finding | None = None
    failures: list[Finding] = field(default_factory=list)
    carried: dict[str, Carried] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


class Tally:
    """Sums up records as they go by; of tests that were run again only the last attempt counts."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._tests: dict[str, tuple[int, dict[tuple[str, str], _Part]]] = {}
        for record in records:
            self.add(record)

    def watching(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records themselves, each summed up on its way."""
        for record in records:
            self.add(record)
            yield record

    def add(self, record: Mapping[str, Any]) -> None:
        node, attempt = record["node"], record.get("attempt", 0)
        known, parts = self._tests.get(node, (-1, {}))
        if attempt < known:
            return
        if attempt > known:
            parts = {}
            self._tests[node] = (attempt, parts)
        place = (str(record["model"]), str(record["mode"]))
        _add(parts.setdefault(place, _Part()), record)

    @property
    def counts(self) -> GateCounts:
        parts = list(self._parts())
        return GateCounts(
            *(
                sum(getattr(part, name) for part in parts)
                for name in ("passed", "failed", "checks", "improved", "missing")
            )
        )

    @property
    def gates(self) -> int:
        return len(self._tests)

    @property
    def failed_gates(self) -> int:
        return sum(any(p.failed for p in parts.values()) for _, parts in self._tests.values())

    @property
    def failures(self) -> list[Finding]:
        """What failed, worst first, at most `MOST_FAILED` of a test; `counts` has them all."""
        return sorted(
            (each for part in self._parts() for each in part.failures), key=lambda each: each.rank
        )

    @property
    def unknown(self) -> dict[tuple[str, str], int]:
        """By model and mode, how many comparisons only lack errors that were accepted."""
        found: dict[tuple[str, str], int] = {}
        for _, parts in self._tests.values():
            for place, part in parts.items():
                if part.unknown:
                    found[place] = found.get(place, 0) + part.unknown
        return found

    @property
    def modes(self) -> list[ModeSummary]:
        """Every mode of every model, the one that is worst against its limit first."""
        places: dict[tuple[str, str], list[_Part]] = {}
        for _, parts in self._tests.values():
            for place, part in parts.items():
                places.setdefault(place, []).append(part)
        found = [_mode(*place, parts) for place, parts in places.items()]
        return sorted(
            found, key=lambda m: (m.worst is None, m.worst.rank if m.worst else (), m.model, m.mode)
        )

    def _parts(self) -> Iterator[_Part]:
        for _, parts in self._tests.values():
            yield from parts.values()


def _add(part: _Part, record: Mapping[str, Any]) -> None:
    checks = record["checks"]
    part.checks += len(checks)
    part.improved += any(check["improved"] for check in checks)
    lacks = any(check["kind"] == "missing" for check in checks)
    finding = finding_of(record)
    if record["passed"]:
        part.passed += 1
    else:
        part.failed += 1
        part.missing += lacks
        part.unknown += lacks and is_unknown(record)
        part.failures.append(finding)
        if len(part.failures) > 2 * MOST_FAILED:
            part.failures = sorted(part.failures, key=lambda each: each.rank)[:MOST_FAILED]
    # What an update has just recorded was held against nothing yet.
    held = finding.check is not None and not (record["passed"] and lacks)
    if held and (part.worst is None or finding.rank < part.worst.rank):
        part.worst = finding
    error, scope = record["values"].get("relative_mse"), record["scope"]
    if error is not None and math.isfinite(error):
        part.errors[scope] = max(part.errors.get(scope, 0.0), error)
    if scope == "carried" and record.get("grades"):
        for metric, grade in record["grades"].items():
            value = record["values"].get(metric)
            if value is None:
                continue
            each = Carried(metric, value, grade)
            known = part.carried.get(metric)
            if known is None or each.badness > known.badness:
                part.carried[metric] = each


def finding_of(record: Mapping[str, Any]) -> Finding:
    """One record, without what tables do not show."""
    check = binding(record)
    worst = severity(check) if check else (0, 0, 0.0)
    names = tuple(str(record[name]) for name in ("mode", "model", "site", "scope", "node"))
    known: Mapping[str, float | None] = record["accepted"] or {}
    return Finding(
        (bool(record["passed"]), *(-each for each in worst), record.get("order", 0), *names),
        node=str(record["node"]),
        model=str(record["model"]),
        mode=str(record["mode"]),
        layer=str(record["layer"]),
        site=str(record["site"]),
        scope=str(record["scope"]),
        passed=bool(record["passed"]),
        check=check,
        accepted=known.get(str(check["metric"])) if check else None,
    )


def is_unknown(record: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong but that no errors were accepted yet."""
    return all(check["passed"] or check["kind"] == "missing" for check in record["checks"])


def _mode(model: str, mode: str, parts: list[_Part]) -> ModeSummary:
    worst = min((p.worst for p in parts if p.worst), key=lambda each: each.rank, default=None)
    carried = []
    for metric in dict.fromkeys(name for part in parts for name in part.carried):
        known = [part.carried[metric] for part in parts if metric in part.carried]
        carried.append(max(known, key=lambda each: each.badness))
    errors: dict[str, float] = {}
    for part in parts:
        for scope, error in part.errors.items():
            errors[scope] = max(errors.get(scope, 0.0), error)
    return ModeSummary(
        model,
        mode,
        len(parts),
        sum(part.failed > 0 for part in parts),
        sum(part.passed + part.failed for part in parts),
        sum(part.failed for part in parts),
        worst,
        tuple(carried),
        errors,
    )


def correlation_text(value: float) -> str:
    """With digits enough to tell it from 1: `0.99987`."""
    gap = abs(1.0 - value)
    digits = 4 if not 0 < gap < 1e-3 else min(12, 2 + int(-math.log10(gap)))
    return f"{value:.{digits}f}"


def change_text(finding: Finding) -> str:
    """The value against the accepted one: `+26 %`, `27x`; empty where one of them is missing."""
    value = finding.check["value"] if finding.check else None
    accepted = finding.accepted
    if value is None or accepted is None or not math.isfinite(value):
        return ""
    if finding.check and finding.check["side"] == "==":
        return f"{value - accepted:+g}" if value != accepted else ""
    metric = METRICS.find(str(finding.check["metric"])) if finding.check else None
    if metric and metric.logarithm == "log2":
        return _ratio_text(metric.factor(value - accepted))
    if accepted == 0:
        return "" if value == 0 else "from 0"
    return _ratio_text(value / accepted)


def _ratio_text(ratio: float) -> str:
    if ratio >= 1.995 or ratio < 0.5:
        return f"{times_figure(ratio)}x"
    return f"{100 * (ratio - 1):+.2g} %" if abs(ratio - 1) >= 5e-5 else "0 %"


def set_up_lines(broken: Mapping[str, str]) -> list[str]:
    """Set-up errors, each text once: one cause fails many tests."""
    by_text: dict[str, list[str]] = {}
    for node, text in broken.items():
        by_text.setdefault(text, []).append(node)
    return [
        f"set-up failed, no verdict: {nodes[0]}"
        + (f" and {len(nodes) - 1} more" if len(nodes) > 1 else "")
        + f": {text}"
        for text, nodes in by_text.items()
    ]
