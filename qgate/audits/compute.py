"""Judgment of one comparison: which wrong alternatives it would have accepted.

A comparison names its sides in either order, so a fault counts as accepted only if it passes in the
first tensor and also in the second. A sample is tried first, the whole where the sample passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qgate.audits.criteria import Closeness, ProductSums, Similarity
from qgate.audits.faults import FAULTS, ValueFault, coarser_format
from qgate.audits.pairs import Distances, Indices, Sides, TensorPair, pair_of
from qgate.audits.reading import LeftOut, TensorReader

_AGREES = 0.02
"""Difference between a number and the one computed again, beyond which it is something else."""


@dataclass
class Judgment:
    """Outcome of one comparison.

    accepted   fault → the largest distances that it makes, by name of distance
    refused    faults that would have failed
    differences  the largest distances between the tensors as they were compared
    coarser    the format that the coarser alternative is in
    """

    accepted: dict[str, dict[str, float]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    coarser: str = ""


def judge_closeness(
    first: Any, second: Any, criterion: Closeness, faults: Iterable[str], *, thorough: bool = True
) -> Judgment:
    """Try faults on tensors that an elementwise comparison accepted.

    A judgment that is not thorough is about few elements.
    """
    pair = pair_of(first, second, thorough=thorough)
    if criterion.exact:
        return Judgment(refused=list(faults))
    judgment = Judgment()
    for name in faults:
        _note(judgment, pair, name, _closeness_distances(pair, FAULTS[name], criterion))
    if judgment.accepted:
        judgment.differences |= pair.differences._asdict()
    return judgment


def judge_similarity(
    first: Any,
    second: Any,
    returned: Any,
    criterion: Similarity,
    faults: Iterable[str],
    *,
    thorough: bool = True,
) -> Judgment:
    """Try faults on tensors of which a test asserted a number made of product sums."""
    pair = pair_of(first, second, thorough=thorough)
    groups = 0
    if criterion.axis is not None and len(pair.x.shape) > 1:
        pair, groups = _grouped(pair, criterion.axis)
    sums = _sums(pair.whole, groups)
    judgment = Judgment()
    if thorough:
        value = criterion.value(sums)
        if not np.allclose(value, np.asarray(returned, dtype=np.float64), _AGREES, _AGREES):
            raise LeftOut("another formula than its name says")
    if not criterion.accepts(sums):
        if thorough:
            raise LeftOut("numbers that are not asserted")
        return judgment
    for name in faults:
        distances = _similarity_distances(pair, FAULTS[name], criterion, sums, groups)
        _note(judgment, pair, name, distances)
    if judgment.accepted:
        judgment.differences |= pair.differences._asdict() | {
            criterion.measure: criterion.distance(sums)
        }
    return judgment


def _note(
    judgment: Judgment, pair: TensorPair, name: str, distances: dict[str, float] | bool | None
) -> None:
    """Add the outcome of a fault: distances if accepted, False if refused, None if not tried."""
    if isinstance(distances, dict):
        judgment.accepted[name] = distances
        if name == "coarser":
            judgment.coarser = coarser_format(pair.sample.x)
    elif distances is False:
        judgment.refused.append(name)


# Elements ----------------------------------------------------------------------------------------


def _closeness_distances(
    pair: TensorPair, fault: ValueFault, criterion: Closeness
) -> dict[str, float] | bool | None:
    if fault.part != "tensor":
        part = pair.part(fault.part)
        return None if part is None else _accepted_distances(pair, part.sides, fault, criterion)
    outcome = _accepted_distances(pair, pair.sample, fault, criterion)
    if isinstance(outcome, dict) and pair.whole is not pair.sample:
        readings = [faulty for faulty in _readings(pair.whole, fault) if faulty is not None]
        return outcome if all(criterion.accepts(*faulty) for faulty in readings) else False
    return outcome


def _accepted_distances(
    pair: TensorPair, sides: Sides, fault: ValueFault, criterion: Closeness
) -> dict[str, float] | bool | None:
    return _smallest_distances(pair, sides, fault, lambda faulty: criterion.accepts(*faulty))


def _smallest_distances(
    pair: TensorPair, sides: Sides, fault: ValueFault, accepts: Callable[[Sides], bool]
) -> dict[str, float] | bool | None:
    """Return the smaller distances of both readings of a fault, if both are accepted."""
    distances: list[Distances] = []
    for faulty in _readings(sides, fault):
        if faulty is None:
            return None
        if not accepts(faulty):
            return False
        distances.append(pair.distances(faulty))
    first, second = distances
    return first.combined(second, min)._asdict()


def _readings(sides: Sides, fault: ValueFault) -> Iterable[Sides | None]:
    """Yield both sides with the fault in the first, then with the fault in the second."""
    x = fault.change(sides.x)
    yield None if x is None else Sides(x, sides.y)
    y = fault.change(sides.y)
    yield None if y is None else Sides(sides.x, y)


# Sums --------------------------------------------------------------------------------------------


def _similarity_distances(
    pair: TensorPair, fault: ValueFault, criterion: Similarity, sums: ProductSums, groups: int
) -> dict[str, float] | bool | None:
    part = None if fault.part == "tensor" else pair.part(fault.part)
    if part is None and fault.part != "tensor":
        return None
    sides = part.sides if part else pair.whole
    closest = np.inf

    def accepts(faulty: Sides) -> bool:
        nonlocal closest
        if part is None:
            changed = _sums(faulty, groups)
        else:
            owners = part.indices // (pair.size // groups) if groups else 0 * part.indices
            # A large tensor is judged on some of its elements, to which a part adds its own.
            weight = part.weight * (1 if groups else min(1.0, pair.whole.x.size / pair.size))
            removed = _sums_by_owner(sides, owners, max(groups, 1))
            added = _sums_by_owner(faulty, owners, max(groups, 1))
            changed = sums.plus(removed, -weight).plus(added, weight)
        closest = min(closest, criterion.distance(changed))
        return criterion.accepts(changed)

    outcome = _smallest_distances(pair, sides, fault, accepts)
    if not isinstance(outcome, dict):
        return outcome
    return outcome | {criterion.measure: float(closest)}


def _sums(sides: Sides, groups: int) -> ProductSums:
    """Sum over all elements, or over those of each group."""
    rows = max(groups, 1)
    return ProductSums.of(sides.x.reshape(rows, -1), sides.y.reshape(rows, -1))


def _sums_by_owner(sides: Sides, owners: Indices, groups: int) -> ProductSums:
    x, y = sides
    owners = owners[: x.size]
    sums = [np.bincount(owners, a * b, groups) for a, b in ((x, x), (y, y), (x, y))]
    return ProductSums(*(np.asarray(values, dtype=np.float64) for values in sums))


def _grouped(pair: TensorPair, axis: int) -> tuple[TensorPair, int]:
    """Return the pair as arrays with a row for each group along an axis."""
    if pair.size > pair.whole.x.size:
        raise LeftOut("cosines of large or non-finite rows")
    rows = []
    for reader in (pair.x, pair.y):
        values = np.moveaxis(reader.at(0, reader.size).reshape(reader.shape), axis, -1)
        values = values.reshape(-1, values.shape[-1])
        rows.append(TensorReader(values, values.shape, reader.eps))
    x, y = rows
    return TensorPair(x, y), len(x.source)
