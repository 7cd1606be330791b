"""The smallest defects that the checks of a gate would have seen, from noise and limits.

A defect adds to the error of a tensor. The room between an error and its bound is what it may add,
for the tensor as a whole and for the worst channel, token or sample. The defect is in a channel,
token or sample with the mean error, and a scale that is off by one halves what it scales. Where
isolated errors are compared, their limit at float noise sees less; and where quantized weights are
held bit for bit, any change of any weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from qgate.gate.checks import TASK_CHANGE, Check, Verdict
from qgate.gate.measured import Measured
from qgate.metrics import METRICS
from qgate.results.run_facts import DefectKind, SmallestDefect

# Squared relative error of what is half of what it should be.
_HALVED = 0.25
_LAST_PLACE = 2.0**-24
"""The smallest relative change that a float32 can have."""
Sizes = Iterator[tuple[DefectKind, float]]


def smallest_defects(verdict: Verdict) -> list[SmallestDefect]:
    """Return for each kind the smallest defect that would have been red at every site."""
    checks: dict[tuple[str, str], list[Check]] = {}
    for check in verdict.checks:
        checks.setdefault((check.site, check.scope), []).append(check)
    seen: dict[str, dict[DefectKind, float]] = {}
    for row in verdict.measured:
        sizes = seen.setdefault(row.site, {})
        for kind, size in _sizes(row, checks.get(row.key, ())):
            if math.isfinite(size):
                sizes[kind] = min(size, sizes.get(kind, math.inf))
    largest: dict[DefectKind, SmallestDefect] = {}
    for site, sizes in seen.items():
        for kind, size in sizes.items():
            if kind not in largest or largest[kind]["size"] < size:
                largest[kind] = SmallestDefect(kind=kind, size=size, site=site)
    return [*largest.values()]


def _sizes(row: Measured, checks: Sequence[Check]) -> Sizes:
    if row.about.is_task:
        own = [name for name in row.values if METRICS.find(name).task]
        room = min(_room(checks, name) for name in (TASK_CHANGE, *own))
        yield "metric" if own else "task", room
    elif not all(check.passed for check in checks):
        return
    elif row.about.against_noise:
        yield from _isolated_sizes(row, checks)
    elif row.about.has_budget:
        yield from _local_sizes(row, checks)


def _isolated_sizes(row: Measured, checks: Sequence[Check]) -> Sizes:
    room = _room(checks, "relative_mse@worst_token")
    if row.site.rpartition(":")[2] == "output" and math.isfinite(room):
        # Every token of a sample is compared, and a channel is one of several in each token.
        yield "token", math.sqrt(room)
        yield "sample", math.sqrt(room)
        if row.channels:
            yield "channel", math.sqrt(room * row.channels)


def _local_sizes(row: Measured, checks: Sequence[Check]) -> Sizes:
    port = row.site.rpartition(":")[2]
    # A site that is not held has one value, which says why.
    is_whole = port == "weight" and any(held.values > 1 for held in row.conformance)
    if is_whole:
        yield "weight", _LAST_PLACE
    error = row.value("relative_mse")
    if not error:
        return
    # Noise that adds to the relative MSE adds half of it to what correlation lacks.
    whole = min(_room(checks, "relative_mse"), 2 * _room(checks, "one_minus_correlation"))
    if port == "weight":
        yield "weight", math.sqrt(whole)
        if not is_whole:
            yield "scale", min(1.0, whole / _HALVED)
        return
    kinds: tuple[DefectKind, ...] = ("token", "sample", "channel")
    # Samples have about the same energy; that of a token or channel may be next to none.
    most = {"sample": whole * len(row.positions)}
    for kind in kinds if port == "output" else kinds[:2]:
        worst = row.value(f"relative_mse@worst_{kind}")
        if worst is not None:
            part = _room(checks, f"relative_mse@worst_{kind}") + worst - error
            yield kind, math.sqrt(max(0.0, min(part, most.get(kind, math.inf))))


def _room(checks: Iterable[Check], metric: str) -> float:
    """Return by how much a value may grow until a limit is red; infinite without a limit."""
    rooms = [
        check.bound - check.value
        for check in checks
        if check.metric == metric and check.limit.has_room and check.side == "<="
        if check.bound is not None and check.value is not None
    ]
    return max(0.0, min(rooms, default=math.inf))
