"""Compare scales of activations with those of other layers and experts: what nothing calibrated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from qgate.checkpoints.record import CheckpointFinding
from qgate.text import counted

EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
LAYER_NUMBER = re.compile(r"\.(\d+)\.")
CACHE_SCALES = ("q_scale", "k_scale", "v_scale")
FEWEST_EQUAL = 6
"""Scales from which on it is no chance that all are equal."""
FEWEST_EXPERTS = 3
FEWEST_LAYERS = 7
ENDS = 2
"""First and last layers, whose activations differ from those of all others."""
NEAR = 2
"""Layers before and after that a layer is compared with."""
LEAST_OCTAVES = 0.9
SPREADS = 8.0
"""How many times the usual distance of neighbors is a finding, and the least one in octaves.

Calibrated scales of neighboring layers are within 1.5 times of each other at the median.
"""
FEW, BEYOND = 2, 6.0
"""How many layers may be off at a time, and how far beyond all others such a layer is."""
GROWING = re.compile(r"\b(o_proj|down_proj|w2|c_proj|fc2|out_proj)\.")
"""Modules whose inputs some layers rightly have 100 times larger: massive activations."""


def neighbor_findings(values: Mapping[str, float], method: str) -> Iterator[CheckpointFinding]:
    """Find scales that were not calibrated, or that are off from those of neighbors.

    values   scales by name, all above 0
    method   the library that wrote them: some clip scales of caches at 1
    """
    named: set[str] = set()
    for finding in (*_equal(values, method), *_left_at_one(values, method), *_experts(values)):
        if finding.subject not in named:
            named.add(finding.subject)
            yield finding
    for finding in _off_neighbors(values):
        if finding.subject not in named:
            yield finding


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _may_be_one(ending: str, values: Sequence[float], method: str) -> bool:
    """Return True for scales of caches that ModelOpt clips at 1 from below."""
    return ending in CACHE_SCALES and method == "modelopt" and min(values) >= 1


def _equal(values: Mapping[str, float], method: str) -> Iterator[CheckpointFinding]:
    """Find scales of one kind that are equal in the whole checkpoint."""
    for ending in dict.fromkeys(map(_ending, values)):
        names = [name for name in values if _ending(name) == ending]
        if len(names) < FEWEST_EQUAL or len({values[name] for name in names}) > 1:
            continue
        value = values[names[0]]
        if _may_be_one(ending, [value], method):
            continue
        words = "they were left at 1" if value == 1 else "one value was written to all"
        yield CheckpointFinding(
            names[0],
            f"all {len(names):,} scales of this name are {value:.4g}: nothing calibrated them, "
            f"{words}; calibrate again",
        )


def _left_at_one(values: Mapping[str, float], method: str) -> Iterator[CheckpointFinding]:
    """Find scales of exactly 1 beside others that are not."""
    for ending in dict.fromkeys(map(_ending, values)):
        alike = {name: value for name, value in values.items() if _ending(name) == ending}
        sizes = list(alike.values())
        ones = [name for name, value in alike.items() if value == 1]
        if not ones or len(ones) == len(sizes) or _may_be_one(ending, sizes, method):
            continue
        others = [value for value in sizes if value != 1]
        for name in ones:
            yield CheckpointFinding(
                name,
                f"it is 1, and the {counted(len(others), 'other scale')} of this name are "
                f"{min(others):.3g} to {max(others):.3g}: nothing calibrated it; calibrate again",
            )


def _experts(values: Mapping[str, float]) -> Iterator[CheckpointFinding]:
    """Find layers whose experts all have one scale, where those of other layers differ."""
    groups: dict[str, list[str]] = {}
    for name in values:
        if EXPERT.search(name):
            groups.setdefault(EXPERT.sub("*", name), []).append(name)
    kinds: dict[str, list[str]] = {}
    for group, names in groups.items():
        if len(names) >= FEWEST_EXPERTS:
            kinds.setdefault(LAYER_NUMBER.sub(".*.", group, count=1), []).append(group)
    for members in kinds.values():
        equal = [group for group in members if len({values[n] for n in groups[group]}) == 1]
        if not equal or len(equal) >= len(members) - len(equal):
            continue
        for group in equal:
            count, value = len(groups[group]), values[groups[group][0]]
            yield CheckpointFinding(
                group,
                f"all {count} experts have {value:.4g}, and in "
                f"{counted(len(members) - len(equal), 'other layer')} they differ: one value was "
                "written to all; calibrate this layer again",
            )


def _off_neighbors(values: Mapping[str, float]) -> Iterator[CheckpointFinding]:
    """Find scales that are far from those of the layers before and after."""
    kinds: dict[str, dict[int, str]] = {}
    for name in values:
        if layer := LAYER_NUMBER.search(name):
            kind = LAYER_NUMBER.sub(".*.", name, count=1)
            kinds.setdefault(kind, {})[int(layer[1])] = name
    distances = {
        kind: _distances([values[names[layer]] for layer in sorted(names)])
        for kind, names in kinds.items()
        if len(names) >= FEWEST_LAYERS
    }
    pooled: dict[str, list[float]] = {}
    for kind, octaves in distances.items():
        pooled.setdefault(EXPERT.sub("*", kind), []).extend(map(abs, octaves[ENDS:-ENDS]))
    for kind, octaves in distances.items():
        usual = sorted(pooled[EXPERT.sub("*", kind)], reverse=True)
        limit = max(LEAST_OCTAVES, SPREADS * median(usual), BEYOND * usual[FEW])
        names = [kinds[kind][layer] for layer in sorted(kinds[kind])]
        for at in range(ENDS, len(names) - ENDS):
            is_massive = octaves[at] > 0 and GROWING.search(f"{kind}.") is not None
            if abs(octaves[at]) <= limit or is_massive:
                continue
            near = [values[names[i]] for i in _near(len(names), at)]
            times, side = 2 ** abs(octaves[at]), "larger" if octaves[at] > 0 else "smaller"
            yield CheckpointFinding(
                names[at],
                f"it is {values[names[at]]:.3g}, {times:.3g} times {side} than those of the layers "
                f"near it, {min(near):.3g} to {max(near):.3g}: calibrate it again",
            )


def _near(count: int, at: int) -> list[int]:
    return [i for i in range(max(0, at - NEAR), min(count, at + NEAR + 1)) if i != at]


def _distances(values: Sequence[float]) -> list[float]:
    """Return how many octaves each layer is above the median of those near it."""
    sizes = [math.log2(value) for value in values]
    return [size - median(sizes[i] for i in _near(len(sizes), at)) for at, size in enumerate(sizes)]
