"""Runs side by side: before and after a change, CPU and GPU, one format and another.

Results files are read once and let go record by record; of a comparison at a site stay its checked
numbers, so that memory depends on how many sites there are and not on what records carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from qgate.metrics import METRICS
from qgate.page._header_differences import Difference, differences
from qgate.results.ranking import binding, binding_checks, severity
from qgate.results.schema import Record

Group = Literal["broke", "fixed", "worse", "better", "new", "gone", "equal"]
GROUPS: tuple[Group, ...] = ("broke", "fixed", "worse", "better", "new", "gone", "equal")
# What a regression may be on the same device: within it, two values are called equal.
EQUAL = 0.02
# Relative errors below it are what float32 leaves, and differ from device to device.
_NOISE = 1e-9
# Suite, model, mode, layer, site, scope. The mode is empty where modes are what is compared.
Place = tuple[str, str, str, str, str, str]


class Number(NamedTuple):
    """A metric of one comparison; `times` of its limit, None where nothing limits it."""

    value: float | None
    times: float | None
    side: str


class Held(NamedTuple):
    """One comparison at one site, as far as others are compared with it."""

    node: str
    attempt: int
    mode: str
    order: int
    passed: bool
    severity: tuple[int, int, float]
    metric: str
    numbers: dict[str, Number]


class Side:
    """One of the runs; its records are kept as they go by."""

    def __init__(self, name: str, header: Record, records: Iterable[Record] = ()) -> None:
        self.name = name
        self.header = header
        self._held: dict[Place, Held] = {}
        self._attempts: dict[str, int] = {}
        for _ in self.watching(records):
            pass

    def watching(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records themselves, what is compared of them kept."""
        for record in records:
            self._add(record)
            yield record

    def _add(self, record: Mapping[str, Any]) -> None:
        node, attempt = str(record["node"]), record.get("attempt", 0)
        self._attempts[node] = max(attempt, self._attempts.get(node, 0))
        place = _place(record)
        known = self._held.get(place)
        fresh = _held(record, node, attempt)
        if known is not None and known.node == node and known.attempt != attempt:
            newer = attempt > known.attempt
        else:
            # Two tests that hold the same comparison: the worse of them.
            newer = known is None or fresh.severity > known.severity
        if newer:
            self._held[place] = fresh

    @cached_property
    def held(self) -> dict[Place, Held]:
        """What the last attempt of every test found."""
        last = self._attempts
        return {k: held for k, held in self._held.items() if held.attempt == last[held.node]}

    def modes(self) -> dict[str, set[str]]:
        """By suite."""
        found: dict[str, set[str]] = {}
        for place in self.held:
            found.setdefault(place[0], set()).add(place[2])
        return found


def _place(record: Mapping[str, Any]) -> Place:
    suite, model, mode, layer, site, scope = (
        str(record[name]) for name in ("suite", "model", "mode", "layer", "site", "scope")
    )
    return suite, model, mode, layer, site, scope


def _held(record: Mapping[str, Any], node: str, attempt: int) -> Held:
    bound = binding(record)
    numbers = {
        metric: Number(check["value"], check["times"], check["side"])
        for metric, check in binding_checks(record).items()
    }
    if "relative_mse" in record["values"] and "relative_mse" not in numbers:
        numbers["relative_mse"] = Number(record["values"]["relative_mse"], None, "<=")
    return Held(
        node,
        attempt,
        str(record["mode"]),
        record.get("order", 0),
        bool(record["passed"]),
        severity(bound) if bound else (int(not record["passed"]), 0, 0.0),
        str(bound["metric"]) if bound else "",
        numbers,
    )


class Cell(NamedTuple):
    """One run's value in a row."""

    mode: str
    value: float | None
    times: float | None
    passed: bool


@dataclass(frozen=True)
class Row:
    """One comparison in all runs; None where a run does not have it.

    `ratios` are of the values of the later runs to that of the first, None where there is none;
    `moved` is how far the worst of them went, as a logarithm, and positive where it got worse.
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
    cells: tuple[Cell | None, ...]
    ratios: tuple[float | None, ...]
    moved: float

    @property
    def failed(self) -> bool:
        return any(cell is not None and not cell.passed for cell in self.cells)


@dataclass(frozen=True)
class RunComparison:
    """Rows by group, those that moved most first; what differs in the headers."""

    names: tuple[str, ...]
    differences: tuple[Difference, ...]
    rows: tuple[Row, ...]
    modes_compared: bool

    def of(self, group: Group) -> list[Row]:
        return [row for row in self.rows if row.group == group]

    @cached_property
    def counts(self) -> dict[Group, int]:
        found: dict[Group, int] = dict.fromkeys(GROUPS, 0)
        for row in self.rows:
            found[row.group] += 1
        return found

    @property
    def still_failing(self) -> int:
        """Rows that are equal, and fail."""
        return sum(row.failed for row in self.of("equal"))

    @property
    def is_clean(self) -> bool:
        return not self.counts["broke"]


def compare(sides: Sequence[Side]) -> RunComparison:
    """The first run is what the others are compared with."""
    free = _free_suites(sides)
    by_side = [_without_modes(side.held, free) for side in sides]
    places = {place: None for held in by_side for place in held}
    lower = _directions(sides)
    rows = [_row(place, [held.get(place) for held in by_side], lower) for place in places]
    rank = {group: number for number, group in enumerate(GROUPS)}
    rows.sort(key=lambda row: (rank[row.group], not row.failed, -abs(row.moved), row.model,
                               row.mode, row.order, row.site, row.scope, row.suite))  # fmt: skip
    shared = any(row.group not in ("new", "gone") for row in rows)
    found = differences([side.name for side in sides], [side.header for side in sides])
    if not shared:
        apart = Difference(
            "nothing in common", "no comparison is in the first run and in all the others", ()
        )
        found = [apart, *found]
    return RunComparison(tuple(side.name for side in sides), tuple(found), tuple(rows), bool(free))


def _free_suites(sides: Sequence[Side]) -> set[str]:
    """Suites in which each run has one mode, none of them that of another: modes are compared."""
    modes = [side.modes() for side in sides]
    suites = {suite for each in modes for suite in each}
    free = set()
    for suite in suites:
        given = [each.get(suite, set()) for each in modes]
        if all(len(each) == 1 for each in given) and len(set.union(*given)) == len(sides):
            free.add(suite)
    return free


def _without_modes(held: Mapping[Place, Held], free: set[str]) -> dict[Place, Held]:
    return {
        ((place[0], place[1], "", *place[3:]) if place[0] in free else place): each
        for place, each in held.items()
    }


def _directions(sides: Sequence[Side]) -> dict[str, bool]:
    """Metrics by name, and whether less of them is better."""
    return {
        str(metric["name"]): metric.get("direction") != "higher"
        for side in sides
        for metric in side.header["metrics"]
    }


def _row(place: Place, given: Sequence[Held | None], lower: Mapping[str, bool]) -> Row:
    suite, model, mode, layer, site, scope = place
    there = [each for each in given if each is not None]
    metric = _metric(given, there, lower)
    numbers = [each.numbers.get(metric) if each else None for each in given]
    cells = tuple(
        Cell(each.mode, n.value if n else None, n.times if n else None, each.passed)
        if each
        else None
        for each, n in zip(given, numbers, strict=True)
    )
    moves = _moves(metric, numbers, lower)
    group, moved = _group(given, moves)
    first = numbers[0]
    return Row(
        group, suite, model, mode, layer, site, scope, metric,
        min(each.order for each in there), cells,
        tuple(_ratio(metric, first, each) for each in numbers[1:]), moved,
    )  # fmt: skip


def _metric(given: Sequence[Held | None], there: Sequence[Held], lower: Mapping[str, bool]) -> str:
    """What decided, where verdicts differ or fail; else what moved most of what all runs have."""
    worst = max(there, key=lambda each: each.severity)
    common = [name for name in worst.numbers if all(name in each.numbers for each in there)]
    if len(there) < len(given) or not worst.passed or not common:
        return worst.metric or next(iter(worst.numbers), "")

    def far(name: str) -> tuple[float, bool]:
        moves = _moves(name, [each.numbers[name] for each in there], lower)
        return max((abs(move) for move in moves), default=0.0), name == worst.metric

    return max(common, key=far)


def _moves(metric: str, numbers: Sequence[Number | None], lower: Mapping[str, bool]) -> list[float]:
    """How far each later value is from the first; logarithms, and positive is worse."""
    first = numbers[0]
    if first is None:
        return []
    return [_move(metric, first, each, lower) for each in numbers[1:] if each is not None]


def _move(metric: str, first: Number, later: Number, lower: Mapping[str, bool]) -> float:
    a, b = first.value, later.value
    # What has to be equal, an exponent or the name of a quantizer, is not better or worse.
    if a == b or "==" in (first.side, later.side):
        return 0.0
    if a is not None and b is not None and _is_noise(metric, a, b):
        return 0.0
    if a is None or b is None:
        # A value that is not finite is worse than any other.
        return math.inf if b is None else -math.inf
    known = lower.get(METRICS.find(metric).base or metric)
    less = known if known is not None else first.side != ">="
    sign = 1.0 if less else -1.0
    ratio = _ratio(metric, first, later)
    if ratio is not None and ratio > 0:
        return sign * math.log(ratio)
    return sign * math.copysign(math.inf, b - a)


def _is_noise(metric: str, a: float, b: float) -> bool:
    return METRICS.find(metric).relative and max(abs(a), abs(b)) < _NOISE


def _ratio(metric: str, first: Number | None, later: Number | None) -> float | None:
    """Of logarithms and decibels the factor that they say."""
    if first is None or later is None or first.value is None or later.value is None:
        return None
    if "==" in (first.side, later.side):
        return None
    difference = later.value - first.value
    known = METRICS.find(metric)
    if known.logarithm:
        return known.factor(difference)
    return later.value / first.value if first.value > 0 and later.value >= 0 else None


def _group(given: Sequence[Held | None], moves: Sequence[float]) -> tuple[Group, float]:
    first, later = given[0], given[1:]
    if first is None:
        return "new", 0.0
    if any(each is None for each in later):
        return "gone", 0.0
    moved = max(moves, key=abs, default=0.0)
    worst, best = max(moves, default=0.0), min(moves, default=0.0)
    failed = [each for each in later if each and not each.passed]
    if first.passed and failed:
        return "broke", moved
    if not first.passed and not failed:
        return "fixed", moved
    if worst > math.log1p(EQUAL):
        return "worse", worst
    if best < -math.log1p(EQUAL):
        return "better", best
    return "equal", moved
