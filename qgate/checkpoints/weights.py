"""Judge one weight of a checkpoint: its figures, and what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from qgate.checkpoints.causes import find_cause
from qgate.checkpoints.compute import measure, over_codes_db
from qgate.checkpoints.conventions import CONVENTIONS
from qgate.checkpoints.findings import LIMIT_DB, declared_causes, error_cause, scale_causes
from qgate.checkpoints.gguf_layouts import parent_layouts
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.misplaced import UNLIKE, other_parent
from qgate.checkpoints.packings import StoredWeight, decode
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding, WeightFigures, WeightRecord
from qgate.checkpoints.stored import Checkpoint
from qgate.errors import QgateError

MISPLACED = 0.7
"""Cosine of a weight and its parent that rows in another order do not reach."""
Judgement = tuple[WeightRecord, list[CheckpointFinding]]


def judge_weight(
    child: Checkpoint,
    weight: StoredWeight,
    parent: Checkpoint | None,
    match: ParentMatch | None,
    recipe: Recipe,
) -> Judgement:
    """Compare one weight with what is declared, and with its parent where there is one."""
    if weight.packing is None:
        return _plain_judgement(child, weight, parent, match)
    return _quantized_judgement(child, weight, parent, match, recipe)


def _quantized_judgement(
    child: Checkpoint,
    weight: StoredWeight,
    parent: Checkpoint | None,
    match: ParentMatch | None,
    recipe: Recipe,
) -> Judgement:
    assert weight.packing is not None
    result = WeightRecord(weight.name, weight.packing.name, "", weight.size, 0)
    try:
        decoded = decode(child, weight, recipe.bits)
        source = (
            None
            if parent is None or match is None
            else _parent_values(parent, match, *decoded.elements.shape)
        )
    except QgateError as error:
        return result, [CheckpointFinding(weight.name, str(error))]
    figures, source, misplaced = _measured(child, weight.name, decoded, source, parent, match)
    over = figures.over_ideal_db
    causes = list(scale_causes(figures))
    # Other bytes than those meant look like scales of all kinds.
    if not causes or (decoded.element in CONVENTIONS and figures.zero_share < 1):
        wrong = source is not None and over is not None and over > LIMIT_DB
        explained = ""
        if wrong and source is not None:
            explained = misplaced or find_cause(decoded, source.float())
            if not explained and parent and match and (figures.cosine or 0.0) < UNLIKE:
                explained = other_parent(decoded.values(), parent, match)
            figures = replace(figures, over_codes_db=over_codes_db(decoded, source.float()))
        if explained or not causes:
            causes = [cause for cause in (error_cause(figures, explained),) if cause]
    findings = [CheckpointFinding(weight.name, cause, over) for cause in causes]
    form, columns = _form(decoded), decoded.elements.shape[1]
    result = replace(
        result,
        format=str(form),
        count=figures.count,
        parents=() if match is None else match.names,
        matched="" if match is None else match.how,
        outcome="quantized",
        figures=figures,
    )
    return result, [*findings, *declared_causes(recipe, result, form, columns)]


def _measured(
    child: Checkpoint,
    name: str,
    decoded: QuantizedWeight,
    source: Tensor | None,
    parent: Checkpoint | None,
    match: ParentMatch | None,
) -> tuple[WeightFigures, Tensor | None, str]:
    """Measure a weight beside its parent in the layout it should have, or in one that it has.

    The third is the cause where it has another layout than it should have.
    """
    if source is None or match is None or parent is None:
        return measure(decoded, source), source, ""
    first: tuple[WeightFigures, Tensor] | None = None
    for expected, wrong in parent_layouts(child, parent, name, match, source):
        figures = measure(decoded, expected)
        first = first or (figures, expected)
        if not (figures.cosine or 0.0) > MISPLACED:
            continue
        if wrong:
            return *first, wrong
        return figures, expected, ""
    assert first is not None
    return *first, ""


def _form(weight: QuantizedWeight) -> DeclaredFormat:
    rows, columns = weight.elements.shape
    tile = (
        None if weight.tile[0] >= rows and rows > 1 else weight.tile[0],
        None if weight.tile[1] >= columns else weight.tile[1],
    )
    return DeclaredFormat(weight.element, tile, weight.zero_points is not None)


def _plain_judgement(
    child: Checkpoint, weight: StoredWeight, parent: Checkpoint | None, match: ParentMatch | None
) -> Judgement:
    """Compare a tensor that is not quantized: equal bits, or a cast of the parent's."""
    entry = next(iter(weight.parts.values()))
    count = math.prod(entry.shape)
    result = WeightRecord(weight.name, "", entry.dtype, weight.size, count)
    values = child.read(entry.name)
    causes = []
    if values.is_floating_point():
        finite = values.float().isfinite()
        if not bool(finite.all()):
            causes.append(f"{int((~finite).sum()):,} of {count:,} values are NaN or infinite")
    if parent is not None and match is not None:
        source = parent.read(match.names[0])
        if len(match.names) > 1:
            source = torch.cat([source, *(parent.read(name) for name in match.names[1:])])
        outcome, cause = _outcome_in_layouts(child, parent, weight.name, values, source, match)
        causes += [cause] if cause else []
        result = replace(result, parents=match.names, matched=match.how, outcome=outcome)
    return result, [CheckpointFinding(weight.name, cause) for cause in causes]


def _outcome_in_layouts(
    child: Checkpoint,
    parent: Checkpoint,
    name: str,
    values: Tensor,
    source: Tensor,
    match: ParentMatch,
) -> tuple[str, str]:
    """Compare a tensor with its parent in the layout it should have, and in others."""
    if values.numel() == source.numel() and len(match.names) > 1:
        source = source.reshape(values.shape)
    first: tuple[str, str] | None = None
    for expected, wrong in parent_layouts(child, parent, name, match, source):
        outcome, cause = _outcome(values, expected)
        if outcome != "changed":
            return ("changed", wrong) if wrong else (outcome, "")
        first = first or (outcome, cause)
    assert first is not None
    return first


def _outcome(values: Tensor, source: Tensor) -> tuple[str, str]:
    """Say what became of a tensor that is not quantized, and what is wrong with it."""
    if values.shape != source.shape:
        return (
            "changed",
            f"it has shape {tuple(values.shape)}, the parent's has {tuple(source.shape)}",
        )
    if values.dtype == source.dtype and _same(values, source):
        return "equal", ""
    if values.is_floating_point() and _same(values, source.to(values.dtype)):
        return "cast", ""
    if not bool(values.count_nonzero()) and bool(source.count_nonzero()):
        return "changed", "all values are zero, the parent's are not"
    energy = float(source.double().square().sum()) or 1.0
    error = float((values.double() - source.double()).square().sum()) / energy
    return "changed", f"it is not quantized and not the parent's: relative error {error:.2g}"


def _same(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _parent_values(parent: Checkpoint, match: ParentMatch, rows: int, columns: int) -> Tensor:
    """Read the parent's values in the shape of the child's rows."""
    read = [parent.read(name) for name in match.names]
    values = torch.cat(read) if len(read) > 1 else read[0]
    values = values.T if match.transposed else values
    if values.dim() == 3 and values.shape[-1] != columns:
        values = values.transpose(1, 2)
    if values.numel() != rows * columns:
        raise QgateError(
            f"{', '.join(match.names)} of the parent has shape {tuple(values.shape)}, and the "
            f"child's weight {rows} x {columns}."
        )
    return values.reshape(rows, columns).contiguous()
