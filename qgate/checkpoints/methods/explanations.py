"""Tell what GPTQ, AWQ, SmoothQuant and rotations change on purpose from what is broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from qgate.checkpoints.accounting import FUSED
from qgate.checkpoints.cast_causes import describe_cast
from qgate.checkpoints.causes import (
    LARGEST_DB,
    ExportFault,
    find_cause,
    wrong_groups,
    wrong_powers,
    wrong_size,
    wrong_zero_points,
)
from qgate.checkpoints.compute import SourceRows, measure, measured, squared
from qgate.checkpoints.findings import LIMIT_DB, error_cause
from qgate.checkpoints.grids import QuantizedWeight, leading_rows
from qgate.checkpoints.local_errors import wrong_columns
from qgate.checkpoints.methods.compared_rows import LEADING, ComparedRows
from qgate.checkpoints.methods.rotations import (
    Rotation,
    find_rotation,
    is_rotated_twice,
    over_rotated_db,
)
from qgate.checkpoints.methods.scalings import (
    ScaledRows,
    changed_norms,
    find_scaling,
    fit_factors,
    is_scaled,
)
from qgate.checkpoints.methods.steps import is_error_passed_on, measure_steps
from qgate.checkpoints.methods.surroundings import Surroundings
from qgate.checkpoints.orders import order_faults
from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord, WeightFigures
from qgate.checkpoints.rows import WeightRows
from qgate.text.wording import decibels

GPTQ = "as GPTQ changes it"
SCALED = "as AWQ or SmoothQuant changes it"
CLIPPED = "as AWQ clips it"
ROTATED = "as a rotation changes it"
NOT_COMPARED = "rotated: cannot be compared with this parent"
FOUR_OVER_SIX = "as 4over6 chooses the largest element of a block"
CHOSEN = 0.05
"""Least share of blocks whose largest element is 4; a scale of the largest element leaves none."""
MIXED = 0.9
"""Cosine of a weight and its parent under which it may be rotated."""
CAST_ERROR = 1e-4
"""Largest relative error of a scaled weight in 16 bits."""
DOUBTFUL_DB = 3.0
"""Error over the ideal one up to which scales of neighbors may look like the right ones."""
EXPLAINED = 0.8
"""Largest share of the error that scales may leave which explain it."""
SIZE_ERROR = 0.08
"""Largest deviation of the size of rotated values, from products of 128 lines."""
SMALLEST_CLIP = 0.45
"""Least ratio of clipped scales to ideal ones: AWQ searches down to a half."""


@dataclass(frozen=True)
class ErrorExplanation:
    """An explanation of more error than an ideal quantizer has: a method, or a cause.

    source   the parent's rows with the scales that a method moved, where it did
    """

    figures: WeightFigures
    method: str = ""
    undone_by: tuple[str, ...] = ()
    cause: str = ""
    source: SourceRows | None = None


def explain_error(
    layer: Surroundings, rows: WeightRows, source: SourceRows, figures: WeightFigures
) -> ErrorExplanation:
    """Find the method that changed a weight on purpose, or else the fault."""
    compared = ComparedRows.of_quantized(rows, source)
    scaling = find_scaling(layer, compared)
    words: tuple[str, ...] = ()
    undone_by: tuple[str, ...] = ()
    if scaling is not None:
        scaled = ScaledRows(source, scaling)
        beside = measure(rows, scaled)
        if (beside.error or 0.0) > EXPLAINED * (figures.error or 0.0):
            scaling = None
        else:
            source, undone_by, words = scaled, scaling.undone_by, (SCALED,)
            figures = replace(beside, cosine=figures.cosine)
            if _is_right(figures):
                return ErrorExplanation(figures, SCALED, undone_by, source=source)
    weight, parent = rows.sample(), source[0 : rows.sampled]
    steps = measure_steps(*_leading(weight, parent))
    figures = replace(figures, steps=steps, over_codes_db=steps.over_nearest_db)
    if is_error_passed_on(steps, weight.element) and (figures.over_codes_db or 0) < LARGEST_DB:
        if steps.share > 0.005 and (figures.over_codes_db or 0) > LIMIT_DB / 4:
            method = "; ".join((*words, GPTQ))
            return ErrorExplanation(figures, method, undone_by, source=source)
        if _is_clipped(layer, figures):
            method = "; ".join((*words, CLIPPED))
            return ErrorExplanation(figures, method, undone_by, source=source)
    if scaling is None and figures.cosine is not None and figures.cosine < MIXED:
        rotation = find_rotation(layer, compared)
        if rotation is not None:
            return _rotated(_leading(weight, parent)[0], rotation, figures)
        if is_rotated_twice(layer, compared):
            return ErrorExplanation(replace(figures, over_ideal_db=None), NOT_COMPARED)
    leading = _leading(weight, parent)
    find_fault = partial(_find_fault, weight, is_part=rows.sampled < rows.shape[0])
    explained = find_fault(parent)
    if not explained or (figures.over_ideal_db or 0.0) < DOUBTFUL_DB:
        explained = describe_cast(weight, parent) or explained
    if not explained and scaling is None:
        norms = changed_norms(layer, parent.shape[1])
        explained = next(filter(None, (find_fault(parent * x) for _, x in norms)), "")
    orders = [] if explained else [*order_faults(weight, parent)]
    explained = (
        explained
        or _find_fault(*leading, wrong_size(*leading), is_part=False)
        or wrong_columns(leading[0].values(), leading[1], measured(*leading).least)
        or (find_fault(parent, *orders) if orders else "")
        or _lone_scales(*leading)
        or _zero_rows(compared)
        or find_fault(parent, wrong_powers(weight, parent))
        or _find_fault(*leading, wrong_groups(leading[1]), is_part=False)
        or find_cause(*leading, faults=(wrong_zero_points(*leading),))
    )
    return ErrorExplanation(figures, cause=error_cause(figures, explained))


def _leading(weight: QuantizedWeight, parent: Tensor) -> tuple[QuantizedWeight, Tensor]:
    """Cut a weight and its parent to as many rows as are enough."""
    count = leading_rows(weight.shape, weight.tile[0], LEADING)
    return weight.rows(0, count), parent[:count].float()


def _find_fault(
    weight: QuantizedWeight, parent: Tensor, *faults: ExportFault, is_part: bool
) -> str:
    return find_cause(weight, parent, _is_gptq, faults, is_part=is_part)


def _is_right(figures: WeightFigures) -> bool:
    return figures.over_ideal_db is not None and figures.over_ideal_db <= LIMIT_DB


def _is_gptq(weight: QuantizedWeight, parent: Tensor) -> bool:
    return is_error_passed_on(measure_steps(*_leading(weight, parent)), weight.element)


def _is_clipped(layer: Surroundings, figures: WeightFigures) -> bool:
    """Return True for nearest codes at scales that AWQ may have made smaller."""
    ratio = figures.scales.log2_ratio
    return layer.recipe.method == "awq" and ratio is not None and SMALLEST_CLIP < 2**ratio <= 1.02


def _rotated(
    weight: QuantizedWeight, rotation: Rotation, figures: WeightFigures
) -> ErrorExplanation:
    over = over_rotated_db(weight, rotation)
    figures = replace(figures, over_ideal_db=over, over_codes_db=None, steps=None)
    folded = (rotation.folded,) if rotation.folded else ()
    cause = ""
    if rotation.otherwise:
        cause = f"its {rotation.side} are rotated otherwise than {rotation.otherwise}"
    elif abs(rotation.size - 1) > SIZE_ERROR:
        cause = f"it is rotated, and scales are {rotation.size:.3g} times the ideal ones"
    elif over > LARGEST_DB:
        cause = f"it is rotated, and {decibels(over)} worse than ideal"
    return ErrorExplanation(figures, ROTATED, folded, cause)


def _lone_scales(weight: QuantizedWeight, parent: Tensor) -> str:
    """Name factors of columns or rows that would explain the error, and that nothing undoes."""
    columns, rows = fit_factors(weight.values(), parent)
    if not (is_scaled(columns) or is_scaled(rows)):
        return ""
    scaled = parent * columns * rows[:, None]
    if not _is_right(measure(weight, scaled)) and not _is_gptq(weight, scaled):
        return ""
    lines = [
        f"its {line} are multiplied by {range_text(float(sizes.min()), float(sizes.max()))}"
        for line, sizes in (("columns", columns), ("rows", rows))
        if is_scaled(sizes)
    ]
    return f"{' and '.join(lines)}, which nothing undoes"


def range_text(low: float, high: float) -> str:
    """Write the ends of a range, or one number where both are written alike."""
    ends = [f"{low:.2g}", f"{high:.2g}"]
    return ends[0] if ends[0] == ends[1] else f"different factors from {ends[0]} to {ends[1]}"


def _zero_rows(weight: ComparedRows) -> str:
    """Count rows of zeros that the parent does not have."""
    count = sum(int((~values.any(1) & parent.any(1)).sum()) for values, parent in weight.pairs())
    return f"{count:,} rows are zero, and the parent's are not" if count else ""


# Tensors that are not quantized -------------------------------------------------------------------


def explain_change(layer: Surroundings, weight: ComparedRows) -> tuple[str, tuple[str, ...]]:
    """Name the method that changed a matrix that is not quantized, and what undoes it."""
    scaling = find_scaling(layer, weight)
    if scaling is not None:
        values, parent = weight.leading()
        error = squared(values - ScaledRows(parent, scaling)[0 : len(values)])
        if error < CAST_ERROR * squared(values):
            return SCALED, scaling.undone_by
    rotation = find_rotation(layer, weight)
    if rotation is not None and not rotation.otherwise:
        return ROTATED, (rotation.folded,) if rotation.folded else ()
    return "", ()


# Agreement of weights with what undoes them -------------------------------------------------------

SIBLINGS = (*FUSED, ("w1", "w3"))
"""Weights that read one norm."""


def settle_methods(record: CheckpointRecord) -> None:
    """Excuse tensors that undo what a method did to weights, and find weights it left out."""
    readers: dict[str, list[str]] = {}
    for weight in record.weights:
        for name in weight.undone_by:
            readers.setdefault(name, []).append(weight.name)
    records = {weight.name: weight for weight in record.weights}
    for name, weights in readers.items():
        if name not in records or records[name].undone_by:
            continue
        if records[name].outcome == "changed":
            method = f"undoes what was done to {', '.join(weights)}"
            records[name] = replace(records[name], outcome="undoes", method=method)
            record.findings = [f for f in record.findings if f.subject != name]
        record.findings += [
            CheckpointFinding(other, f"{name} undoes what was done to {weights[0]}, not to this")
            for other in dict.fromkeys(_siblings(weights))
            if other in records and other not in weights
        ]
    record.weights = list(records.values())


def _siblings(weights: list[str]) -> Iterator[str]:
    for name in weights:
        for parts in SIBLINGS:
            for part in parts:
                if f".{part}." in name:
                    yield from (name.replace(f".{part}.", f".{other}.") for other in parts)
