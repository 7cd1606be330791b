"""Compare the same tensors under two quant types of a dump, or in two formats."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from torch import Tensor

from qgate import formats
from qgate.comparing.pairing import pair_records, rule_of
from qgate.drawing.tensor_pass import values_of
from qgate.dumps import Record
from qgate.dumps.choosing import ChosenRecords, LocatedRecord, batches, nbytes
from qgate.engine import Failure, Workers, map_items
from qgate.errors import QgateError, unknown
from qgate.results.rows import StoredRows
from qgate.stats import errors, serial
from qgate.summaries.record import FormatComparison, Pair, Scatter, TensorSummary

if TYPE_CHECKING:
    from qgate.storage.locations import Location

Kind = Literal["quant_types", "formats"]
LocatedPair = tuple[LocatedRecord, LocatedRecord]
_USUAL = ("hif8", "mxfp8_e4m3")
_METRICS = ("correlation", "relative_mse")
_FIELDS = ("title", "layer", "layer_type", "operation", "name", "rank")
_GRID, _REACH = 64, 5.0
_SAMPLE, _CHUNK = 2**16, 2**17


def compared_names(
    tensors: Mapping[str, int], names: tuple[str, str] | None
) -> tuple[tuple[str, str], Kind]:
    """Choose two quant types, or two formats; `tensors` counts the tensors of each quant type."""
    labels = {label: count for label, count in tensors.items() if label}
    if names is None:
        common = sorted(labels, key=lambda label: (-labels[label], label))
        if len(common) < 2:
            return _USUAL, "formats"
        usual = [name for name in ("hifp8", "mxfp8") if name in labels]
        first, second = usual if len(usual) == 2 else sorted(common[:2])
        return (first, second), "quant_types"
    if len(names) != 2 or names[0] == names[1]:
        raise QgateError(f"compare {', '.join(names)}: give two different names.")
    if all(name in labels for name in names):
        return names, "quant_types"
    try:
        first, second = (formats.get(name).name for name in names)
    except QgateError:
        allowed = [*sorted(labels), *formats.names()]
        missing = next(name for name in names if name not in allowed)
        raise unknown("quant type of this dump or format", missing, allowed) from None
    if first == second:
        raise QgateError(f"compare {', '.join(names)}: both are {first}.")
    return (first, second), "formats"


def compare_formats(tensors: Sequence[TensorSummary], names: tuple[str, str]) -> FormatComparison:
    """Compare two formats without pairs: every tensor has figures of both."""
    paired_tensors = sum(
        all(name in tensor.get("formats", {}) for name in names) for tensor in tensors
    )
    return {
        "kind": "formats",
        "first": names[0],
        "second": names[1],
        "pairs": [],
        "unpaired": len(tensors) - paired_tensors,
    }


def compare_quant_types(
    chosen: ChosenRecords, names: tuple[str, str],
    *, workers: Workers | int = 1, most: int | None = None,
) -> FormatComparison:  # fmt: skip
    """Compare tensors labeled with the second name with the same tensors labeled with the first."""
    pairs: StoredRows[Pair] = StoredRows()
    orders, labeled = array("q"), Counter[str]()
    scatter: Scatter | None = None
    parts = batches(_pairs(chosen, names, labeled), lambda pair: sum(nbytes(p[1]) for p in pair))
    for outcome in map_items(_compare, parts, workers, shared=(most,)):
        if isinstance(outcome, Failure):
            raise QgateError(f"comparing {' and '.join(names)}: {outcome.reason}.")
        for order, pair in outcome[0]:
            orders.append(order)
            pairs.append(pair)
        scatter = add_scatters(scatter, outcome[1])
    comparison: FormatComparison = {
        "kind": "quant_types",
        "first": names[0],
        "second": names[1],
        "pairs": pairs.ordered(np.argsort(np.array(orders), kind="stable").tolist()),
        "unpaired": labeled.total() - 2 * len(pairs),
    }
    if scatter is not None:
        comparison["scatter"] = {**scatter, "unit": "rms"}
    return comparison


def _pairs(
    chosen: ChosenRecords, names: tuple[str, str], labeled: Counter[str]
) -> Iterator[LocatedPair]:
    """Pair records rank after rank; `labeled` counts the tensors of either name."""
    rule = rule_of(
        *((item.record for item in chosen if item.record.quant_type == name) for name in names)
    )
    any_run = False
    if not any(pair_records(*_sides(rank, names)[0], rule).pairs for rank in chosen.by_rank()):
        # The dumps are two runs that differ in their labels alone.
        rule = replace(
            rule, run_fields=tuple(name for name in rule.run_fields if name == "micro_batch")
        )
        any_run = True
    for records in chosen.by_rank():
        sides, folders = _sides(records, names, any_run=any_run)
        labeled.update(record.quant_type for side in sides for record in side)
        for a, r in pair_records(*sides, rule).pairs:
            if a.tensor is not None and r.tensor is not None and a.shape == r.shape:
                yield LocatedRecord(folders[id(a)], a), LocatedRecord(folders[id(r)], r)


def _sides(
    located: Sequence[LocatedRecord], names: tuple[str, str], *, any_run: bool = False
) -> tuple[tuple[list[Record], list[Record]], dict[int, Location]]:
    """Return the records of a rank with either name, actual ones first, and their dumps by id."""
    sides: tuple[list[Record], list[Record]] = ([], [])
    folders: dict[int, Location] = {}
    for folder, record in located:
        if record.quant_type in names:
            own = replace(record, iteration=None, sample=None) if any_run else record
            sides[record.quant_type == names[0]].append(own)
            folders[id(own)] = folder
    return sides, folders


# The same tensor twice ---------------------------------------------------------------------------


def _compare(
    pairs: Sequence[LocatedPair], shared: tuple[int | None]
) -> tuple[list[tuple[int, Pair]], Scatter | None]:
    """Compare pairs, each with the number of the actual one in the order of execution."""
    rows: list[tuple[int, Pair]] = []
    scatter: Scatter | None = None
    with serial():
        for actual, reference in pairs:
            a, r = (values_of(side).reshape(-1)[: shared[0]] for side in (actual, reference))
            fields = {name: getattr(reference.record, name) for name in _FIELDS}
            rows.append((actual.record.order, cast(Pair, {**fields, **pair_figures(a, r)})))
            scatter = add_scatters(scatter, _scatter_in_rms(a, r))
    return rows, scatter


def pair_figures(actual: Tensor, reference: Tensor) -> dict[str, float]:
    """Return the number of elements, and correlation and relative MSE of the pairs that are finite
    on both sides, as far as they exist."""
    _require_same(actual, reference)
    a, r = (x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x for x in (actual, reference))
    sums = errors(a, r, worst=0)
    numbers = {name: sums.metric(name, finite_only=True) for name in _METRICS}
    return {
        **{name: value for name, value in numbers.items() if math.isfinite(value)},
        "elements": actual.numel(),
    }


def _require_same(actual: Tensor, reference: Tensor) -> None:
    if actual.shape != reference.shape:
        raise QgateError(
            f"actual has shape {tuple(actual.shape)} and reference {tuple(reference.shape)}: "
            "a pair has one shape."
        )
    for side in (actual, reference):
        if not side.is_floating_point():
            raise QgateError(f"a pair is of floating point numbers, not of {side.dtype}.")


def _scatter_in_rms(a: Tensor, r: Tensor) -> Scatter | None:
    """Scatter in root mean squares of the reference, so that tensors of all sizes add up."""
    step = max(1, len(a) // _SAMPLE)
    a, r = a[::step].float(), r[::step].float()
    rms = float(r[r.isfinite()].double().square().mean().sqrt())
    if not 0 < rms < math.inf:
        return None
    return scatter_of(a / rms, r / rms, _GRID, _REACH)


def scatter_of(actual: Tensor, reference: Tensor, grid: int, reach: float) -> Scatter:
    """Count pairs in equal bins up to `reach` on either side of zero: `counts[i][j]` have the
    reference in bin i and actual in bin j; `outside` are all others, NaN and Inf included."""
    _require_same(actual, reference)
    counts = np.zeros(grid * grid, dtype=np.int64)
    for sides in zip(*(x.detach().reshape(-1).split(_CHUNK) for x in (actual, reference)),
                     strict=True):  # fmt: skip
        a, r = (side.cpu().to(torch.float64).numpy() for side in sides)
        inside = (np.abs(a) <= reach) & (np.abs(r) <= reach)
        i, j = (
            np.minimum(((x[inside] + reach) / (2 * reach) * grid).astype(np.int64), grid - 1)
            for x in (r, a)
        )
        counts += np.bincount(i * grid + j, minlength=grid * grid)
    return {
        "low": -reach,
        "high": reach,
        "counts": counts.reshape(grid, grid).tolist(),
        "outside": actual.numel() - int(counts.sum()),
    }


def add_scatters(a: Scatter | None, b: Scatter | None) -> Scatter | None:
    """Add the pairs of two scatters over the same axes."""
    if a is None or b is None:
        return a or b
    counts = np.array(a["counts"], dtype=np.int64) + np.array(b["counts"], dtype=np.int64)
    return {**a, "counts": counts.tolist(), "outside": a["outside"] + b["outside"]}
