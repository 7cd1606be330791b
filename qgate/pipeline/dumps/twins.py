"""The same tensors under two quant types of one dump, or in two formats, side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from qgate import formats
from qgate.analysis.portraits.pairs import merged_scatter, pair_figures, scatter_of
from qgate.dumps import Record
from qgate.dumps.summing import nbytes
from qgate.engine import Failure, Workers, outcomes
from qgate.errors import QgateError, unknown
from qgate.pipeline.dumps.looks import Located, together, values_of
from qgate.pipeline.dumps.pairs import paired
from qgate.results.portraits import Comparison, Pair, TensorPortrait
from qgate.stats import serial

Kind = Literal["quant_types", "formats"]
Twin = tuple[Located, Located]
_USUAL = ("hif8", "mxfp8_e4m3")
_GRID, _REACH = 64, 5.0
_SHOWN = 2**16


def compared_names(
    records: Sequence[Record], asked: tuple[str, str] | None
) -> tuple[tuple[str, str], Kind]:
    """Which two, and whether they are labels that tensors carry or formats to put them in."""
    labels = Counter(record.quant_type for record in records if record.quant_type)
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


def compare_formats(tensors: Sequence[TensorPortrait], names: tuple[str, str]) -> Comparison:
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
    places: Sequence[Located],
    names: tuple[str, str],
    *,
    workers: Workers | int = 1,
    most: int | None = None,
) -> Comparison:
    """Tensors labeled with the second name, against the same tensors labeled with the first."""
    homes = {id(place.record): place.folder for place in places}
    sides = [[p.record for p in places if p.record.quant_type == name] for name in names]
    first, second = sides
    pairing = paired(second, first)
    if not pairing.pairs:  # two runs that are told apart by their labels alone
        for side in sides:
            for i, record in enumerate(side):
                side[i] = replace(record, iteration=None, sample=None)
                homes[id(side[i])] = homes[id(record)]
        pairing = paired(second, first)
    twins = [
        (Located(homes[id(a)], a), Located(homes[id(r)], r))
        for a, r in pairing.pairs
        if a.tensor is not None and r.tensor is not None and a.shape == r.shape
    ]
    pairs: list[Pair] = []
    scatter: dict[str, Any] | None = None
    parts = [_Part(tuple(part), most) for part in together(twins, _size)]
    for done in outcomes(_compare, parts, workers):
        if isinstance(done, Failure):
            raise QgateError(f"comparing {' and '.join(names)}: {done.reason}.")
        pairs += done.pairs
        scatter = _both(scatter, done.scatter)
    found: Comparison = {
        "kind": "quant_types",
        "first": names[0],
        "second": names[1],
        "pairs": pairs,
        "unpaired": len(first) + len(second) - 2 * len(pairs),
    }
    if scatter is not None:
        found["scatter"] = {**scatter, "unit": "rms"}
    return found


def _both(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any] | None:
    return merged_scatter(a, b) if a is not None and b is not None else a or b


def _of_any_run(records: Sequence[Record]) -> list[Record]:
    return [replace(record, iteration=None, sample=None) for record in records]


@dataclass(frozen=True)
class _Part:
    twins: tuple[Twin, ...]
    most: int | None


@dataclass
class _Compared:
    pairs: list[Pair] = field(default_factory=list)
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
        found.pairs.append(pair)
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
