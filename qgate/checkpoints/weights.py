"""Judge one weight of a checkpoint: its figures, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

from qgate.checkpoints.causes import find_cause
from qgate.checkpoints.compute import DecodedRows, measure, over_codes_db
from qgate.checkpoints.findings import LIMIT_DB, declared_causes, error_cause, scale_causes
from qgate.checkpoints.grids import TALL
from qgate.checkpoints.packings import MisfitError, StoredWeight
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.plain import judge_plain
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding, WeightRecord
from qgate.checkpoints.rows import ParentRows, WeightRows
from qgate.checkpoints.stored import Checkpoint

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
    if weight.packing is None:
        return judge_plain(child, weight, parent, match)
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
        rows = WeightRows(child, weight, recipe.bits)
        source = None
        if parent is not None and match is not None:
            ahead = KEPT if rows.tile[0] > TALL else 0
            source = ParentRows(parent, match, *rows.shape, ahead)
        figures = measure(rows, source)
    except MisfitError as error:
        return result, [CheckpointFinding(weight.name, str(error))]
    over = figures.over_ideal_db
    causes = list(scale_causes(figures))
    if not causes:
        wrong = source is not None and over is not None and over > LIMIT_DB
        explained = ""
        if wrong and source is not None:
            decoded, values = rows.sample(), source[0 : rows.sampled]
            explained = find_cause(decoded, values, is_part=rows.sampled < rows.shape[0])
            figures = replace(figures, over_codes_db=over_codes_db(decoded, values))
        causes = [cause for cause in (error_cause(figures, explained),) if cause]
    findings = [CheckpointFinding(weight.name, cause, over) for cause in causes]
    form = _form(rows)
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


def _form(weight: DecodedRows) -> DeclaredFormat:
    rows, columns = weight.shape
    tile = (
        None if weight.tile[0] >= rows and rows > 1 else weight.tile[0],
        None if weight.tile[1] >= columns else weight.tile[1],
    )
    return DeclaredFormat(weight.element, tile, weight.has_zero_points)
