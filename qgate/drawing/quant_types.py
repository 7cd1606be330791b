"""The same tensors under two quant types of one dump, or in two formats, side by side."""

from __future__ import annotations

import functools
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from qgate import formats
from qgate.comparing.pairing import paired, rule_of
from qgate.drawing.tensor_pairs import merged_scatter, pair_figures, scatter_of
from qgate.drawing.tensor_pass import values_of
from qgate.dumps import Record
from qgate.dumps.choosing import ChosenRecords, Located, together
from qgate.dumps.summing import nbytes
from qgate.engine import Failure, Workers, outcomes
from qgate.errors import QgateError, unknown
from qgate.results.rows import StoredRows
from qgate.stats import serial
from qgate.summaries.record import FormatComparison, Pair, TensorPortrait

if TYPE_CHECKING:
    from qgate.storage.places import Place

Kind = Literal["quant_types", "formats"]
Twin = tuple[Located, Located]
_USUAL = ("hif8", "mxfp8_e4m3")
_GRID, _REACH = 64, 5.0
_SHOWN = 2**16


def compared_names(
    carried: Mapping[str, int], asked: tuple[str, str] | None
) -> tuple[tuple[str, str], Kind]:
    """Which two, and whether they are labels that tensors carry or formats to put them in.

    `carried` says how many tensors have which label.
    """
    labels = {name: count for name, count in carried.items() if name}
    if asked is None:
        common = [name for name, _ in sorted(labels.items(), key=lambda each: (-each[1], each[0]))]
        if len(common) < 2:
            return _USUAL, "formats"
        usual = [name for name in ("hifp8", "mxfp8") if name in labels]
        first, second = usual if len(usual) == 2 else sorted(common[:2])
        return (first, second), "quant_types"
    if len(asked) != 2 or asked[0] == asked[1]:
        raise QgateError(f"compare {', '.join(asked)}: give two different names.")
    if all(name in labels for name in asked):
        return asked, "quant_types"
    try:
        first, second = (formats.get(name).name for name in asked)
    except QgateError:
        known = [*sorted(labels), *formats.names()]
        lacking = next(name for name in asked if name not in known)
        raise unknown("quant type of this dump or format", lacking, known) from None
    if first == second:
        raise QgateError(f"compare {', '.join(asked)}: both are {first}.")
    return (first, second), "formats"


def compare_formats(tensors: Sequence[TensorPortrait], names: tuple[str, str]) -> FormatComparison:
    """Two formats need no pairs: every tensor has been put in both."""
    known = sum(all(name in tensor.get("formats", {}) for name in names) for tensor in tensors)
    return {
        "kind": "formats",
        "first": names[0],
        "second": names[1],
        "pairs": [],
        "unpaired": len(tensors) - known,
    }


def compare_quant_types(
    chosen: ChosenRecords,
    names: tuple[str, str],
    *,
    workers: Workers | int = 1,
    most: int | None = None,
) -> FormatComparison:
    """Tensors labeled with the second name, against the same tensors labeled with the first."""
    pairs: StoredRows[Pair] = StoredRows()
    places, of = array("q"), Counter[str]()
    scatter: dict[str, Any] | None = None
    parts = (_Part(tuple(part), most) for part in together(_twins(chosen, names, of), _size))
    for done in outcomes(_compare, parts, workers):
        if isinstance(done, Failure):
            raise QgateError(f"comparing {' and '.join(names)}: {done.reason}.")
        for order, pair in done.pairs:
            places.append(order)
            pairs.append(pair)
        scatter = _both(scatter, done.scatter)
    found: FormatComparison = {
        "kind": "quant_types",
        "first": names[0],
        "second": names[1],
        "pairs": pairs.ordered(np.argsort(np.array(places), kind="stable").tolist()),
        "unpaired": of.total() - 2 * len(pairs),
    }
    if scatter is not None:
        found["scatter"] = {**scatter, "unit": "rms"}
    return found


def _twins(chosen: ChosenRecords, names: tuple[str, str], of: Counter[str]) -> Iterator[Twin]:
    """Rank after rank; `of` counts the tensors of either name."""
    rule = rule_of(
        *((place.record for place in chosen if place.record.quant_type == name) for name in names)
    )
    sides = functools.partial(_sides, names=names)
    plain = any(paired(*sides(rank).records, rule).pairs for rank in chosen.by_rank())
    if not plain:  # two runs that are told apart by their labels alone
        rule = replace(rule, known=tuple(name for name in rule.known if name == "micro_batch"))
        sides = functools.partial(_sides, names=names, of_any_run=True)
    for places in chosen.by_rank():
        rank = sides(places)
        of.update(record.quant_type for side in rank.records for record in side)
        for a, r in paired(*rank.records, rule).pairs:
            if a.tensor is not None and r.tensor is not None and a.shape == r.shape:
                yield Located(rank.homes[id(a)], a), Located(rank.homes[id(r)], r)


@dataclass
class _Sides:
    """Records of a rank with either name, the actual ones first, and the dumps that they are of."""

    records: tuple[list[Record], list[Record]]
    homes: dict[int, Place]


def _sides(
    places: Sequence[Located], names: tuple[str, str], *, of_any_run: bool = False
) -> _Sides:
    found = _Sides(([], []), {})
    for folder, record in places:
        if record.quant_type in names:
            told = replace(record, iteration=None, sample=None) if of_any_run else record
            found.records[record.quant_type == names[0]].append(told)
            found.homes[id(told)] = folder
    return found


def _both(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any] | None:
    return merged_scatter(a, b) if a is not None and b is not None else a or b


@dataclass(frozen=True)
class _Part:
    twins: tuple[Twin, ...]
    most: int | None


@dataclass
class _Compared:
    """Pairs with the places of the actual ones in the order of execution."""

    pairs: list[tuple[int, Pair]] = field(default_factory=list)
    scatter: dict[str, Any] | None = None


def _size(twin: Twin) -> int:
    return sum(nbytes(place.record) for place in twin)


def _compare(part: _Part) -> _Compared:
    with serial():
        return _compared(part)


def _compared(part: _Part) -> _Compared:
    found = _Compared()
    for twin in part.twins:
        a, r = (values_of(place).reshape(-1)[: part.most] for place in twin)
        reference = twin[1].record
        pair: Pair = {
            "title": reference.title,
            "layer": reference.layer,
            "layer_type": reference.layer_type,
            "operation": reference.operation,
            "name": reference.name,
            "rank": reference.rank,
            "elements": reference.elements,
            **pair_figures(a, r),  # type: ignore[typeddict-item]
        }
        found.pairs.append((twin[0].record.order, pair))
        found.scatter = _both(found.scatter, _scatter(a, r))
    return found


def _scatter(a: Tensor, r: Tensor) -> dict[str, Any] | None:
    """Of tensors of all sizes in one picture: in root mean squares of the reference."""
    step = max(1, len(a) // _SHOWN)
    a, r = a[::step].float(), r[::step].float()
    rms = float(r[r.isfinite()].double().square().mean().sqrt())
    if not 0 < rms < math.inf:
        return None
    return scatter_of(a / rms, r / rms, grid=_GRID, ends=(-_REACH, _REACH))
