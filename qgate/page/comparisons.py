"""Two runs side by side: before and after a change, CPU and GPU, one format and another.

Results files are read once and let go record by record; of a comparison at a site stay its checked
numbers, so that memory depends on how many sites there are and not on what records carry.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from qgate.charts.overviews import Overview, Overviewed
from qgate.metrics import METRICS
from qgate.results.checks import binding, binding_checks, is_counted, severity
from qgate.results.movements import EQUAL, NOISE
from qgate.results.run_facts import ended_badly, is_finished, other_tests_of, other_tests_text
from qgate.results.schema import Record
from qgate.text import distinct, one_line

Group = Literal["broke", "fixed", "worse", "better", "new", "gone", "equal"]
GROUPS: tuple[Group, ...] = ("broke", "fixed", "worse", "better", "new", "gone", "equal")

# Whatever is written about these, numbers may differ because of it.
_PLAIN = ("commit", "device", "torch", "python", "qgate", "seed", "reference", "command")
_LONGEST = 60


class ComparisonKey(NamedTuple):
    """The identity of a comparison; the mode is empty where modes are compared."""

    suite: str
    model: str
    mode: str
    layer: str
    site: str
    scope: str


_KEY_OF = itemgetter(*ComparisonKey._fields)


class MetricValue(NamedTuple):
    """The value of a metric; `times` its limit, None without a limit."""

    metric: str
    value: float | None
    times: float | None
    side: str


class SiteResult(NamedTuple):
    """The result at one site, reduced to what a comparison of runs needs."""

    node: str
    attempt: int
    mode: str
    order: int
    passed: bool
    severity: tuple[int, int, float]
    metric: str
    numbers: tuple[MetricValue, ...]

    def number(self, metric: str) -> MetricValue | None:
        for number in self.numbers:
            if number.metric == metric:
                return number
        return None


class ComparedRun:
    """A run to compare: collects the results of its records."""

    def __init__(self, name: str, header: Record, records: Iterable[Record] = ()) -> None:
        self.name = name
        self.header = header
        self._results: dict[ComparisonKey, SiteResult] = {}
        self._attempts: dict[str, int] = {}
        for _ in self.collecting(records):
            pass

    def collecting(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records, and collect their results."""
        for record in records:
            if is_counted(record):
                self._add(record)
            yield record

    def _add(self, record: Mapping[str, Any]) -> None:
        node, attempt = str(record["node"]), record.get("attempt", 0)
        self._attempts[node] = max(attempt, self._attempts.get(node, 0))
        key = ComparisonKey._make(map(str, _KEY_OF(record)))
        previous = self._results.get(key)
        result = _site_result(record, node, attempt)
        if previous is not None and previous.node == node and previous.attempt != attempt:
            newer = attempt > previous.attempt
        else:
            # Two tests that hold the same comparison: the worse of them.
            newer = previous is None or result.severity > previous.severity
        if newer:
            self._results[key] = result

    @cached_property
    def latest(self) -> dict[ComparisonKey, SiteResult]:
        """Return the results of the last attempt of every test, and let go of the others."""
        results, last = self._results, self._attempts
        for key in [k for k, result in results.items() if result.attempt < last[result.node]]:
            del results[key]
        return results


def _site_result(record: Mapping[str, Any], node: str, attempt: int) -> SiteResult:
    bound = binding(record)
    checks = binding_checks(record)
    numbers = tuple(
        MetricValue(metric, check["value"], check["times"], check["side"])
        for metric, check in checks.items()
    )
    if "relative_mse" in record["values"] and "relative_mse" not in checks:
        error = record["values"]["relative_mse"]
        numbers = (*numbers, MetricValue("relative_mse", error, None, "<="))
    return SiteResult(
        node,
        attempt,
        str(record["mode"]),
        record.get("order", 0),
        bool(record["passed"]),
        severity(bound) if bound else (int(not record["passed"]), 0, 0.0),
        str(bound["metric"]) if bound else "",
        numbers,
    )


class RunValue(NamedTuple):
    """The value of a run in a row."""

    mode: str
    value: float | None
    times: float | None
    passed: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison in both runs; None where a run does not have it.

    `ratio` is the value of the second run to that of the first, None where there is none; `moved`
    is how far it went, as a logarithm, and positive where it got worse.
    """

    group: Group
    suite: str
    model: str
    mode: str
    layer: str
    site: str
    scope: str
    metric: str
    order: int
    cells: tuple[RunValue | None, RunValue | None]
    ratio: float | None
    moved: float

    @property
    def failed(self) -> bool:
        before, after = self.cells
        return not ((before is None or before.passed) and (after is None or after.passed))


@dataclass(frozen=True, repr=False)
class RunComparison(Overviewed):
    """A comparison of two runs: rows by group, largest change first; differences of the headers."""

    names: tuple[str, str]
    differences: tuple[Difference, ...]
    rows: tuple[Row, ...]

    def of(self, group: Group) -> list[Row]:
        return [row for row in self.rows if row.group == group]

    @cached_property
    def counts(self) -> dict[Group, int]:
        counts = Counter(row.group for row in self.rows)
        return {group: counts[group] for group in GROUPS}

    def overview(self) -> Overview:
        """Describe the comparison: how many rows are in each group, and those that moved most."""
        counts = ", ".join(f"{count:,} {group}" for group, count in self.counts.items() if count)
        lines = [difference.text(self.names) for difference in self.differences[:3]]
        title = f"{self.names[1]} compared with {self.names[0]}: {counts}"
        return Overview(title, self.rows, self._table_row, "row", lines)

    def _table_row(self, row: Row) -> dict[str, object]:
        values = zip(distinct(self.names), row.cells, strict=True)
        return {
            "group": row.group, "site": row.site, "scope": row.scope, "mode": row.mode,
            "metric": row.metric, **{name: cell and cell.value for name, cell in values},
        }  # fmt: skip

    @property
    def still_failing(self) -> int:
        """Count the rows that are equal and fail."""
        return sum(row.failed for row in self.of("equal"))

    @property
    def is_clean(self) -> bool:
        return not self.counts["broke"]


def compare(first: ComparedRun, second: ComparedRun) -> RunComparison:
    """Compare a run with the first one; both let go of their results on the way."""
    runs = first, second
    free = _free_suites(first, second)
    before, after = (
        {
            (key._replace(mode="") if key.suite in free else key): result
            for key, result in run.latest.items()
        }
        if free
        else run.latest
        for run in runs
    )
    lower = {
        str(metric["name"]): metric.get("direction") != "higher"
        for run in runs
        for metric in run.header["metrics"]
    }
    keys = [*dict.fromkeys((*before, *after))]
    rows = [_row(key, before.pop(key, None), after.pop(key, None), lower) for key in keys]
    rank = {group: number for number, group in enumerate(GROUPS)}
    rows.sort(key=lambda row: (rank[row.group], not row.failed, -abs(row.moved), row.model,
                               row.mode, row.order, row.site, row.scope, row.suite))  # fmt: skip
    names = first.name, second.name
    differing = differences(names, [run.header for run in runs])
    if all(row.group in ("new", "gone") for row in rows):
        about = "no comparison is in both runs"
        differing = [Difference("nothing in common", about, ()), *differing]
    return RunComparison(names, tuple(differing), tuple(rows))


def _free_suites(first: ComparedRun, second: ComparedRun) -> set[str]:
    """Return the suites in which each run has one mode of its own: there, modes are compared."""
    free = set()
    for suite in {key.suite for run in (first, second) for key in run.latest}:
        before, after = (
            {k.mode for k in run.latest if k.suite == suite} for run in (first, second)
        )
        if len(before) == len(after) == 1 and before != after:
            free.add(suite)
    return free


def _row(
    key: ComparisonKey,
    first: SiteResult | None,
    later: SiteResult | None,
    lower: Mapping[str, bool],
) -> Row:
    present = [result for result in (first, later) if result is not None]
    metric = _metric(present, lower)
    a = first.number(metric) if first else None
    b = later.number(metric) if later else None
    move = _move(metric, a, b, lower)
    group = _group(first, later, move)
    cells = _cell(first, a), _cell(later, b)
    order = min(present[0].order, present[-1].order)
    ratio = _ratio(metric, a, b)
    moved = 0.0 if group in ("new", "gone") else move
    return Row(group, *key, metric, order, cells, ratio, moved)


def _cell(result: SiteResult | None, number: MetricValue | None) -> RunValue | None:
    if result is None:
        return None
    value, times = (number.value, number.times) if number else (None, None)
    return RunValue(result.mode, value, times, result.passed)


def _metric(present: list[SiteResult], lower: Mapping[str, bool]) -> str:
    """Choose the metric of a row.

    It is the one that decided where verdicts differ or fail, else the one that moved most.
    """
    first, later = present[0], present[-1]
    worst = later if later.severity > first.severity else first
    names = [number.metric for number in worst.numbers]
    if first is later or not worst.passed:
        return worst.metric or next(iter(names), "")
    other = first if worst is later else later
    common = [name for name in names if other.number(name)]
    if len(common) < 2:
        return next(iter(common), worst.metric or next(iter(names), ""))

    def far(name: str) -> tuple[float, bool]:
        move = _move(name, first.number(name), later.number(name), lower)
        return abs(move), name == worst.metric

    return max(common, key=far)


def _move(
    metric: str,
    first: MetricValue | None,
    later: MetricValue | None,
    lower: Mapping[str, bool],
) -> float:
    """Return the change of the later value as a logarithm; positive is worse."""
    if first is None or later is None:
        return 0.0
    a, b = first.value, later.value
    # What has to be equal, an exponent or the name of a quantizer, is not better or worse.
    if a == b or "==" in (first.side, later.side):
        return 0.0
    if a is None or b is None:
        # A value that is not finite is worse than any other.
        return math.inf if b is None else -math.inf
    if METRICS.find(metric).relative and max(abs(a), abs(b)) < NOISE:
        return 0.0
    is_less_better = lower.get(METRICS.find(metric).base or metric, first.side != ">=")
    sign = 1.0 if is_less_better else -1.0
    ratio = _ratio(metric, first, later)
    if ratio is not None and ratio > 0:
        return sign * math.log(ratio)
    return sign * math.copysign(math.inf, b - a)


def _ratio(metric: str, first: MetricValue | None, later: MetricValue | None) -> float | None:
    """Return later over first; for logarithms and decibels, the factor that they stand for."""
    if first is None or later is None or first.value is None or later.value is None:
        return None
    if "==" in (first.side, later.side):
        return None
    return METRICS.find(metric).ratio(first.value, later.value)


def _group(first: SiteResult | None, later: SiteResult | None, move: float) -> Group:
    if first is None:
        return "new"
    if later is None:
        return "gone"
    if first.passed != later.passed:
        return "broke" if first.passed else "fixed"
    if abs(move) <= math.log1p(EQUAL):
        return "equal"
    return "worse" if move > 0 else "better"


class Difference(NamedTuple):
    """A difference between runs; a warning where it changes the meaning of their values.

    `values` has one text per run, or none where `about` says it all.
    """

    what: str
    about: str
    values: tuple[str, ...]
    warning: bool = True

    def text(self, names: Sequence[str]) -> str:
        """Return `commit: before 1a2b, after 3c4d`."""
        values = [f"{name} {value}" for name, value in zip(names, self.values, strict=False)]
        return f"{self.what}: {': '.join(filter(None, [self.about, ', '.join(values)]))}"


def differences(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return all differences, warnings first."""
    collected = [*_models(headers), *_limits(headers), *_plans(headers)]
    collected += [*_incomplete(names, headers), *_unwell(names, headers)]
    for key in _PLAIN:
        values = [header.get(key) for header in headers]
        if any(value != values[0] for value in values):
            texts = tuple(_shown(key, value) for value in values)
            collected.append(Difference(key, "", texts, warning=key in ("seed", "reference")))
    return sorted(collected, key=lambda difference: not difference.warning)


def _models(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    models_by_run = [header["models"] for header in headers]
    everywhere = set(models_by_run[0]).intersection(*models_by_run[1:])
    collected = []
    if any(set(models) != set(models_by_run[0]) for models in models_by_run):
        texts = tuple(", ".join(map(one_line, models)) or "none" for models in models_by_run)
        other = not everywhere
        collected.append(
            Difference("models", "different models are compared" if other else "", texts, other)
        )
    for model in sorted(everywhere):
        for field, words in (("weights", "other weights"), ("inputs", "other samples")):
            values = [str(models[model].get(field, "")) for models in models_by_run]
            if len(set(values)) > 1:
                texts = tuple(_cut(value, 12) for value in values)
                collected.append(Difference(one_line(model), words, texts))
    return collected


def _limits(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Compare limits by model and source: each verdict depends on them."""
    limits_by_run = [
        {
            (str(limits.get("model", "")), str(limits.get("source", ""))): limits
            for limits in h["limits"]
        }
        for h in headers
    ]
    collected = []
    for model, source in dict.fromkeys(key for limits in limits_by_run for key in limits):
        rows = [limits.get((model, source)) for limits in limits_by_run]
        present = [row for row in rows if row is not None]
        if len(present) < len(rows):
            values = tuple("none" if row is None else "there" for row in rows)
            collected.append(Difference("limits", one_line(f"{source} of {model}"), values))
            continue
        for key in dict.fromkeys(key for row in present for key in row):
            if any(row.get(key) != present[0].get(key) for row in present):
                texts = tuple(_shown(key, row.get(key)) for row in present)
                collected.append(
                    Difference("limits", one_line(f"{key}, {source} of {model}"), texts)
                )
    return collected


def _plans(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return modes of one name whose plans differ."""
    plans_by_run = [header["plans"] for header in headers]
    collected = []
    for name in set(plans_by_run[0]).intersection(*plans_by_run[1:]):
        plans = [plans_of_run[name] for plans_of_run in plans_by_run]
        sites = dict.fromkeys(site for plan in plans for site in plan)
        other = [site for site in sites if any(p.get(site) != plans[0].get(site) for p in plans)]
        if other:
            about = f"{len(other)} sites are quantized otherwise, such as {other[0]}"
            values = tuple(_cut(str(plan.get(other[0], "not at all")), _LONGEST) for plan in plans)
            collected.append(Difference(f"plan of {one_line(name)}", one_line(about), values))
    return sorted(collected)


def _unwell(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return runs that failed apart from their gates, and shards: their equal gates say little."""
    collected = []
    for name, header in zip(names, headers, strict=True):
        broken, errors = len(header.get("broken") or {}), len(header.get("errors") or [])
        shard = header.get("shard") or {}
        reasons = [
            f"{broken} tests had no verdict" if broken else "",
            other_tests_text(other_tests_of(header)).partition(",")[0],
            f"{errors} errors" if errors else "",
            f"it is shard {shard.get('number')} of {shard.get('of')}" if shard else "",
        ]
        problems = [reason for reason in reasons if reason] or [ended_badly(header)]
        if any(problems):
            collected.append(Difference("verdict", one_line(f"{name}: {', '.join(problems)}"), ()))
    return collected


def _incomplete(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return runs of a part of the tests: gates that they lack are not gone."""
    ended = [is_finished(header) for header in headers]
    if not all(ended):
        off = ", ".join(name for name, whole in zip(names, ended, strict=True) if not whole)
        return [Difference("complete", f"{off} was broken off before its end", ())]
    complete = [header.get("complete", True) for header in headers]
    if all(complete) or not any(complete):
        return []
    less = [name for name, whole in zip(names, complete, strict=True) if not whole]
    about = f"{', '.join(less)} ran a part of the tests, or was broken off"
    return [Difference("complete", about, ())]


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key == "commit":
        return _cut(one_line(value), 12)
    if key == "command" and isinstance(value, list):
        return _cut(one_line(" ".join(map(str, value))) or "none", 200)
    text = value if isinstance(value, str) else json.dumps(value)
    return _cut(one_line(text), _LONGEST)


def _cut(text: str, most: int) -> str:
    return one_line(text)[:most]
