"""Judge one weight of a checkpoint: its figures, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

from qgate.checkpoints.code_causes import code_causes
from qgate.checkpoints.compute import DecodedRows, measure
from qgate.checkpoints.findings import LIMIT_DB, declared_causes, error_cause, scale_causes
from qgate.checkpoints.grids import TALL
from qgate.checkpoints.methods import explain_error
from qgate.checkpoints.packings import MisfitError, StoredWeight
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.plain import judge_plain
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding, WeightFigures, WeightRecord
from qgate.checkpoints.rows import ParentRows, WeightRows
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.surroundings import Surroundings

KEPT = 256 << 20
"""Bytes of a parent that are kept for a second pass, which a scale of many rows needs."""
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
        return judge_plain(child, weight, parent, match, layer)
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
        rows = WeightRows(child, weight, recipe.bits)
        source = None
        if parent is not None and match is not None:
            ahead = KEPT if rows.tile[0] > TALL else 0
            source = ParentRows(parent, match, *rows.shape, ahead)
        figures = measure(rows, source)
    except MisfitError as error:
        return result, [CheckpointFinding(weight.name, str(error))]
    causes = [*scale_causes(figures), *code_causes(rows.element, figures)]
    if not causes and source is not None and layer is not None and _is_over(figures):
        explanation = explain_error(layer, rows, source, figures)
        figures, causes = explanation.figures, [explanation.cause]
        method = explanation.method, explanation.undone_by
        result = replace(result, method=method[0], undone_by=method[1])
    elif not causes:
        causes = [error_cause(figures, "")]
    findings = [
        CheckpointFinding(weight.name, cause, figures.over_ideal_db) for cause in causes if cause
    ]
    form = _form(rows)
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


def _form(weight: DecodedRows) -> DeclaredFormat:
    rows, columns = weight.shape
    tile = (
        None if weight.tile[0] >= rows and rows > 1 else weight.tile[0],
        None if weight.tile[1] >= columns else weight.tile[1],
    )
    return DeclaredFormat(weight.element, tile, weight.has_zero_points)
