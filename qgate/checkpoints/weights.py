"""Judge one weight of a checkpoint: its figures, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qgate.checkpoints.code_causes import code_causes
from qgate.checkpoints.compute import measure
from qgate.checkpoints.findings import LIMIT_DB, declared_causes, error_cause, scale_causes
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.methods import explain_change, explain_error
from qgate.checkpoints.packings import StoredWeight, decode
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding, WeightFigures, WeightRecord
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.surroundings import Surroundings
from qgate.errors import QgateError

UNWRITTEN = 1e15
"""Magnitude that no parameter has; memory that was not written has it often."""
Judgement = tuple[WeightRecord, list[CheckpointFinding]]


def judge_weight(
    child: Checkpoint,
    weight: StoredWeight,
    parent: Checkpoint | None,
    match: ParentMatch | None,
    recipe: Recipe,
) -> Judgement:
    """Compare one weight with what is declared, and with its parent where there is one."""
    layer = None if parent is None else Surroundings(child, parent, weight.name, recipe)
    if weight.packing is None:
        return _plain_judgement(child, weight, parent, match, layer)
    return _quantized_judgement(child, weight, parent, match, recipe, layer)


def _quantized_judgement(
    child: Checkpoint,
    weight: StoredWeight,
    parent: Checkpoint | None,
    match: ParentMatch | None,
    recipe: Recipe,
    layer: Surroundings | None,
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
    causes = [*scale_causes(figures), *code_causes(decoded, figures)]
    if not causes and source is not None and layer is not None and _is_over(figures):
        explanation = explain_error(layer, decoded, source.float(), figures)
        figures, causes = explanation.figures, [explanation.cause]
        method = explanation.method, explanation.undone_by
        result = replace(result, method=method[0], undone_by=method[1])
    elif not causes:
        causes = [error_cause(figures, "")]
    findings = [
        CheckpointFinding(weight.name, cause, figures.over_ideal_db) for cause in causes if cause
    ]
    form = _form(decoded)
    result = replace(
        result,
        format=str(form),
        stored=form,
        count=figures.count,
        parents=() if match is None else match.names,
        matched="" if match is None else match.how,
        outcome="quantized",
        figures=figures,
    )
    return result, [*findings, *declared_causes(recipe, result, form)]


def _is_over(figures: WeightFigures) -> bool:
    return figures.over_ideal_db is not None and figures.over_ideal_db > LIMIT_DB


def _form(weight: QuantizedWeight) -> DeclaredFormat:
    rows, columns = weight.elements.shape
    tile = (
        None if weight.tile[0] >= rows and rows > 1 else weight.tile[0],
        None if weight.tile[1] >= columns else weight.tile[1],
    )
    return DeclaredFormat(weight.element, tile, weight.zero_points is not None)


def _plain_judgement(
    child: Checkpoint,
    weight: StoredWeight,
    parent: Checkpoint | None,
    match: ParentMatch | None,
    layer: Surroundings | None,
) -> Judgement:
    """Compare a tensor that is not quantized: equal bits, or a cast of the parent's."""
    entry = next(iter(weight.parts.values()))
    count = math.prod(entry.shape)
    result = WeightRecord(weight.name, "", entry.dtype, weight.size, count)
    values = child.read(entry.name)
    causes = []
    if entry.dtype.startswith("F8_"):
        causes.append(
            f"it is {entry.dtype} without scales: codes are stored, and not what they mean"
        )
    elif values.is_floating_point():
        causes += _memory_causes(values)
    if parent is not None and match is not None and not causes:
        source = parent.read(match.names[0])
        if len(match.names) > 1:
            source = torch.cat([source, *(parent.read(name) for name in match.names[1:])])
        outcome, cause = _outcome(values, source)
        if layer is not None and values.dim() == 2 and values.shape == source.shape and cause:
            method, undone_by = explain_change(layer, values, source)
            result = replace(result, method=method, undone_by=undone_by)
        causes += [cause] if cause and not result.method else []
        result = replace(result, parents=match.names, matched=match.how, outcome=outcome)
    return result, [CheckpointFinding(weight.name, cause) for cause in causes]


def _memory_causes(values: Tensor) -> Iterator[str]:
    """Name values that no training leaves: NaN, a constant matrix, memory that nothing wrote."""
    if not values.numel():
        return
    low, high = (float(x) for x in values.aminmax())
    if not math.isfinite(low) or not math.isfinite(high):
        count = int((~values.isfinite()).sum())
        yield f"{count:,} of {values.numel():,} values are NaN or infinite"
    elif values.dim() > 1 and low == high and values.numel() > 1:
        yield f"all values are {_constant(values)}: nothing wrote them"
    elif max(-low, high) > UNWRITTEN:
        yield f"values are as large as {max(-low, high):.2g}: it is memory that nothing wrote"


def _constant(values: Tensor) -> str:
    value = float(values.reshape(-1)[0])
    return f"{value:.4g}" if value else "zero"


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
    if bool((values == values.reshape(-1)[:1]).all()) and source.unique().numel() > 1:
        value = float(values.reshape(-1)[0])
        return (
            "changed",
            f"all values are {f'{value:.4g}' if value else 'zero'}, the parent's are not",
        )
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
