"""Summary of the records of a run: counts, the worst of each mode, failures, and the verdict.

Records are added one at a time and not kept, so that a file of any size can be summed up while it
is read for another purpose; memory depends on the number of tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from qgate.metrics import METRICS
from qgate.metrics.plan_changes import PlanChange, is_plan_change, merged, plan_changes
from qgate.results.checks import CheckView, binding, is_counted, rank, view_of
from qgate.results.coverage import extent_of, partial_head, total_text
from qgate.results.failure_causes import (
    MOST_SUSPECTS,
    FailureCause,
    Suspect,
    causes_of_mode,
    joined_causes,
    suspect_of,
)
from qgate.results.kinds import limit_kind_of, scope_of
from qgate.results.pictures import LONG_TEXT
from qgate.results.run_facts import (
    ended_badly,
    is_finished,
    other_tests_of,
    other_tests_text,
)
from qgate.results.schema import Record
from qgate.text import counted, figure_text, listed, shortened, times_figure

# Failures kept per test and mode, worst first; the others are counted.
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


class ComparisonSummary(NamedTuple):
    """One comparison as tables show it, with its binding check."""

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
        """True if the only problem is that no errors were accepted yet."""
        return self.check is not None and limit_kind_of(self.check["kind"]).is_new

    @property
    def is_plan_change(self) -> bool:
        """True if what decides is that the site has another quantizer than was accepted."""
        return not self.is_new and self.check is not None and is_plan_change(self.check)

    @property
    def view(self) -> CheckView:
        """The texts of its check."""
        return view_of(self.check, self.accepted)


class CarriedError(NamedTuple):
    """Worst value of one metric that a mode carries to the outputs of blocks, with its grade."""

    metric: str
    value: float
    grade: str

    def text(self, *, graded: bool = True) -> str:
        """Write `MSE 2.0e-02 poor`, without its grade where something failed."""
        metric = METRICS.find(self.metric)
        return f"{metric.short} {figure_text(self.value)} {self.grade if graded else ''}".rstrip()

    @property
    def badness(self) -> float:
        """Key that sorts the worst last."""
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
    worst: ComparisonSummary | None
    carried: tuple[CarriedError, ...]
    errors: Mapping[str, float]
    long_text: str = ""

    def carried_text(self) -> str:
        """Write what the mode carries, with grades if none of its gates failed."""
        return ", ".join(carried.text(graded=not self.failed) for carried in self.carried)


@dataclass(slots=True)
class _TestTally:
    """Sums of one test in one mode; most tests have no failure, and so no list of its own."""

    attempt: int
    passed: int = 0
    failed: int = 0
    checks: int = 0
    improved: int = 0
    missing: int = 0
    unknown: int = 0
    worst: ComparisonSummary | None = None
    failures: Sequence[ComparisonSummary] = ()
    carried: dict[str, CarriedError] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    plan: Sequence[PlanChange] = ()
    planned: int = 0
    folded: int = 0
    suspects: Sequence[Suspect] = ()
    long_text: str = ""


class Tally:
    """A running sum of records; of repeated tests only the last attempt counts."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._attempts: dict[str, int] = {}
        self._tests: dict[tuple[str, str, str], _TestTally] = {}
        for record in records:
            self.add(record)

    def pass_through(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records, and add each on the way."""
        for record in records:
            self.add(record)
            yield record

    def add(self, record: Mapping[str, Any]) -> None:
        if not is_counted(record):
            return
        node, attempt = record["node"], record.get("attempt", 0)
        if attempt < self._attempts.get(node, 0):
            return
        self._attempts[node] = attempt
        for computed in ("_last", "_by_mode"):
            self.__dict__.pop(computed, None)
        key = node, str(record["model"]), str(record["mode"])
        part = self._tests.get(key)
        if part is None or part.attempt < attempt:
            part = self._tests[key] = _TestTally(attempt)
        _add(part, record)

    def keep_sums(self) -> None:
        """Let go of all that only `modes` needs of tests that passed."""
        for part in self._tests.values():
            part.errors, part.worst = {}, part.worst if part.failed else None

    @property
    def counts(self) -> GateCounts:
        parts = self._last.values()
        return GateCounts(
            *(
                sum(getattr(part, name) for part in parts)
                for name in ("passed", "failed", "checks", "improved", "missing")
            )
        )

    @property
    def gates(self) -> int:
        return len(self._attempts)

    @property
    def failed_gates(self) -> int:
        return len({node for (node, _, _), part in self._last.items() if part.failed})

    @property
    def new_gates(self) -> int:
        """Number of failed gates that only lack accepted errors."""
        failed = [(node, part) for (node, _, _), part in self._last.items() if part.failed]
        wrong = {node for node, part in failed if part.failed > part.unknown}
        return len({node for node, _ in failed} - wrong)

    @property
    def failures(self) -> list[ComparisonSummary]:
        """Failed comparisons, worst first, at most `MOST_FAILED` per test; `counts` has all."""
        return sorted(
            (comparison for part in self._last.values() for comparison in part.failures),
            key=lambda comparison: comparison.rank,
        )

    @property
    def unknown(self) -> dict[tuple[str, str], int]:
        """Number of comparisons that only lack accepted errors, by model and mode."""
        counts: dict[tuple[str, str], int] = {}
        for key, parts in self._by_mode.items():
            if count := sum(part.unknown for part in parts):
                counts[key] = count
        return counts

    @property
    def causes(self) -> list[FailureCause]:
        """Causes of the failures, the likeliest first; every failed gate follows from one."""
        changes = self.plan_changes
        return joined_causes(
            causes_of_mode(
                (suspect for part in parts for suspect in part.suspects), changes.get(key, ())
            )
            for key, parts in self._by_mode.items()
        )

    @property
    def refused(self) -> dict[tuple[str, str], FailureCause]:
        """Model and mode of what no update accepts anything of, each with its first cause."""
        causes = [cause for cause in self.causes if not cause.is_acceptable]
        return {place: cause for cause in reversed(causes) for place in cause.places}

    @property
    def plan_changes(self) -> dict[tuple[str, str], list[PlanChange]]:
        """Changes of the plan by model and mode, over all its tests."""
        changes = {
            key: merged(
                (change for part in parts for change in part.plan),
                sum(part.planned for part in parts),
            )
            for key, parts in self._by_mode.items()
        }
        return {key: of_mode for key, of_mode in changes.items() if of_mode}

    @property
    def folded(self) -> int:
        """Number of failed comparisons that `plan_changes` are about."""
        return sum(part.folded for part in self._last.values())

    @property
    def modes(self) -> list[ModeSummary]:
        """Every mode of every model, the worst against its limit first."""
        summaries = [_mode(*key, parts) for key, parts in self._by_mode.items()]
        return sorted(
            summaries,
            key=lambda m: (m.worst is None, m.worst.rank if m.worst else (), m.model, m.mode),
        )

    @cached_property
    def _last(self) -> Mapping[tuple[str, str, str], _TestTally]:
        """Return the sums of the last attempt of every test by node, model and mode."""
        attempts = self._attempts
        return {key: part for key, part in self._tests.items() if part.attempt == attempts[key[0]]}

    @cached_property
    def _by_mode(self) -> dict[tuple[str, str], list[_TestTally]]:
        by_mode: dict[tuple[str, str], list[_TestTally]] = {}
        for (_, model, mode), part in self._last.items():
            by_mode.setdefault((model, mode), []).append(part)
        return by_mode


def _add(part: _TestTally, record: Mapping[str, Any]) -> None:
    checks = record["checks"]
    part.checks += len(checks)
    part.improved += any(check["improved"] for check in checks)
    if texts := sum(bool(check.get("text")) for check in checks):
        part.planned += texts
        part.plan = merged([*part.plan, *plan_changes(checks)])
    is_missing = any(limit_kind_of(check["kind"]).is_new for check in checks)
    check = binding(record)
    is_worst = (
        # A value that an update has just recorded has no limit yet.
        check is not None
        and not (record["passed"] and is_missing)
        and (part.worst is None or rank(record) < part.worst.rank)
    )
    if is_worst:
        part.worst = summarize_comparison(record)
    if record["passed"]:
        part.passed += 1
    else:
        finding = summarize_comparison(record)
        part.failed += 1
        part.missing += is_missing
        part.unknown += is_missing and is_unknown(record)
        part.folded += finding.is_plan_change
        part.failures = [*part.failures, finding]
        if (suspect := suspect_of(record)) is not None:
            part.suspects = [*part.suspects, suspect]
            if len(part.suspects) > 2 * MOST_SUSPECTS:
                part.suspects = sorted(part.suspects)[:MOST_SUSPECTS]
        if len(part.failures) > 2 * MOST_FAILED:
            part.failures = sorted(part.failures, key=lambda carried: carried.rank)[:MOST_FAILED]
    error, scope = record["values"].get("relative_mse"), record["scope"]
    if error is not None and math.isfinite(error):
        part.errors[scope] = max(part.errors.get(scope, 0.0), error)
    if record["site"] == LONG_TEXT:
        part.long_text = long_text_words(record["values"])
    if scope_of(scope).over_tokens and record.get("grades"):
        for metric, grade in record["grades"].items():
            value = record["values"].get(metric)
            if value is None:
                continue
            carried = CarriedError(metric, value, grade)
            worst = part.carried.get(metric)
            if worst is None or carried.badness > worst.badness:
                part.carried[metric] = carried


def summarize_comparison(record: Mapping[str, Any]) -> ComparisonSummary:
    """Return a record reduced to the fields that tables show."""
    check = binding(record)
    accepted: Mapping[str, float | None] = record["accepted"] or {}
    return ComparisonSummary(
        rank(record),
        node=str(record["node"]),
        model=str(record["model"]),
        mode=str(record["mode"]),
        layer=str(record["layer"]),
        site=str(record["site"]),
        scope=str(record["scope"]),
        passed=bool(record["passed"]),
        check=check,
        accepted=accepted.get(str(check["metric"])) if check else None,
    )


def long_text_words(values: Mapping[str, float | None]) -> str:
    """Write how the error grows along a long text, and where the mode stops predicting it."""
    names = ("compared_tokens", "kl_divergence", "error_growth", "predicted_tokens")
    figures = [values.get(name) for name in names]
    if not all(value is not None and math.isfinite(value) for value in figures):
        return ""
    tokens, kl, growth, predicted = (float(value or 0) for value in figures)
    text = f"KL {kl:.1e} along {tokens:,.0f} tokens, {times_figure(2**growth)}x at the end"
    return text if predicted >= tokens else f"{text}, stops predicting at token {predicted:,.0f}"


def is_unknown(record: Mapping[str, Any]) -> bool:
    """Tell whether the only problem is that no errors were accepted yet."""
    return all(check["passed"] or limit_kind_of(check["kind"]).is_new for check in record["checks"])


def _mode(model: str, mode: str, parts: list[_TestTally]) -> ModeSummary:
    worst = min((p.worst for p in parts if p.worst), key=lambda item: item.rank, default=None)
    if worst is not None and worst.passed and worst.check is not None and not worst.check["value"]:
        worst = None  # Where all values are zero, the one nearest to its limit says nothing.
    carried = []
    for metric in dict.fromkeys(name for part in parts for name in part.carried):
        values = [part.carried[metric] for part in parts if metric in part.carried]
        carried.append(max(values, key=lambda item: item.badness))
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
        next((part.long_text for part in parts if part.long_text), ""),
    )


def set_up_lines(broken: Mapping[str, str]) -> list[str]:
    """Write set-up errors, each text once, as one cause fails many tests."""
    by_text: dict[str, list[str]] = {}
    for node, text in broken.items():
        by_text.setdefault(text, []).append(node)
    return [
        f"set-up failed, no verdict: {listed(nodes, 1)}: {text}" for text, nodes in by_text.items()
    ]


# The verdict in words, the same in terminal, Markdown, comment and page ---------------------------


_LISTED, _GREEN, _LONGEST = 4, 2, 60


def verdict_texts(
    tally: Tally, header: Mapping[str, Any], errors: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return the verdict of a run, and what else is to be said of it, the worst first.

    errors   what failed beside gates, such as files that could not be written
    """
    gates, is_ended = counted(tally.gates, "gate"), is_finished(header)
    broken, partial = header.get("broken") or {}, partial_head(header)
    other = other_tests_text(other_tests_of(header))
    failed, new = tally.failed_gates - tally.new_gates, tally.new_gates
    passed = f"{gates} passed" if tally.gates else "nothing was compared"
    also = [
        other,
        "" if is_ended else "the run did not finish",
        f"partial run, {partial}" if partial else "",
    ]
    if broken:
        of_gates = f"{len(broken):,} gates, their" if len(broken) > 1 else "one gate, its"
        also.insert(0, f"no verdict for {of_gates} set-up failed")
    if failed:
        first = f"{failed:,} of {gates} failed{f', {new:,} new' * (new > 0)}{_faults_text(tally)}"
    elif new:
        verb = "has" if new == 1 else "have"
        first = f"{new:,} of {gates} {verb} nothing to be compared with yet"
    elif errors and not broken:
        first = "the run failed"
    elif any(also):
        first, also = next(filter(None, also)), [*also, "" if broken else passed]
    elif not tally.gates:
        first = "no gate ran, and nothing was compared"
    elif ended := ended_badly(header):
        first, also = "the run failed", [f"{passed}, and {ended}"]
    else:
        first = f"{passed}{_extent_text(header)}"
    return first, [text for text in also if text and text != first]


def verdict_text(tally: Tally, header: Mapping[str, Any], errors: Sequence[str] = ()) -> str:
    """Return the verdict of a run in one line."""
    first, also = verdict_texts(tally, header, errors)
    return "; ".join([first, *also])


def _faults_text(tally: Tally) -> str:
    """Write `, 1 fault in my_int8 (green: int8)`."""
    causes, modes = tally.causes, tally.modes
    failed = _names(mode for cause in causes for _, mode in cause.places)
    failed = failed or _names(mode.mode for mode in modes if mode.failed)
    green = _names(mode.mode for mode in modes if not mode.failed)
    faults = f", {counted(len(causes), 'fault')}" if causes else ""
    where = f" in {listed(failed, _LISTED)}" if failed else ""
    return f"{faults}{where}{f' (green: {listed(green, _GREEN)})' if green else ''}"


def _extent_text(header: Mapping[str, Any]) -> str:
    """Write ` of shard 1/2: mode 2-1 of tiny-mamba; 30/30 modules, 5/5 layers`."""
    shard = header.get("shard") or {}
    part = f" of shard {shard.get('number')}/{shard.get('of')}" if shard else ""
    extent = extent_of(header)
    coverage = [] if extent is None else extent.get("coverage") or []
    modes, models = (_names(of[name] for of in coverage) for name in ("mode", "model"))
    if not modes:
        return part
    word = "mode" if len(modes) == 1 else "modes"
    about = f"{word} {listed(modes, _LISTED)} of {listed(models, _LISTED)}"
    return f"{part}: {about}; {total_text(coverage)}"


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(shortened(name, _LONGEST) for name in names))
