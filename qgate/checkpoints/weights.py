"""Judge one weight of a checkpoint: its figures, and what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from qgate.checkpoints.causes import find_cause
from qgate.checkpoints.compute import measure, over_codes_db
from qgate.checkpoints.findings import LIMIT_DB, declared_causes, error_cause, scale_causes
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.packings import StoredWeight, decode
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding, WeightRecord
from qgate.checkpoints.stored import Checkpoint
from qgate.errors import QgateError

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
    figures = measure(decoded, source)
    over = figures.over_ideal_db
    causes = list(scale_causes(figures))
    if not causes:
        wrong = source is not None and over is not None and over > LIMIT_DB
        explained = ""
        if wrong and source is not None:
            explained = find_cause(decoded, source.float())
            figures = replace(figures, over_codes_db=over_codes_db(decoded, source.float()))
        causes = [cause for cause in (error_cause(figures, explained),) if cause]
    findings = [CheckpointFinding(weight.name, cause, over) for cause in causes]
    form = _form(decoded)
    result = replace(
        result,
        format=str(form),
        count=figures.count,
        parents=() if match is None else match.names,
        matched="" if match is None else match.how,
        outcome="quantized",
        figures=figures,
    )
    return result, [*findings, *declared_causes(recipe, result, form)]


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
        outcome, cause = _outcome(values, source.T if match.transposed else source)
        causes += [cause] if cause else []
        result = replace(result, parents=match.names, matched=match.how, outcome=outcome)
    return result, [CheckpointFinding(weight.name, cause) for cause in causes]


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
