"""Judge one weight of a checkpoint: its figures, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

from qgate.checkpoints.causes import find_cause
from qgate.checkpoints.compute import DecodedRows, SourceRows, measure, over_codes_db
from qgate.checkpoints.conventions import CONVENTIONS
from qgate.checkpoints.findings import LIMIT_DB, declared_causes, error_cause, scale_causes
from qgate.checkpoints.gguf_layouts import parent_layouts
from qgate.checkpoints.grids import TALL
from qgate.checkpoints.misplaced import UNLIKE, other_parent
from qgate.checkpoints.packings import MisfitError, StoredWeight
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.plain import judge_plain
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding, WeightFigures, WeightRecord
from qgate.checkpoints.rows import ParentRows, WeightRows
from qgate.checkpoints.stored import Checkpoint

KEPT = 256 << 20
"""Bytes of a parent that are kept for a second pass, which a scale of many rows needs."""
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
        figures, source, misplaced = _measured(child, weight, parent, match, rows)
    except MisfitError as error:
        return result, [CheckpointFinding(weight.name, str(error))]
    over = figures.over_ideal_db
    causes = list(scale_causes(figures))
    # Other bytes than those meant look like scales of all kinds.
    if not causes or (rows.element in CONVENTIONS and figures.zero_share < 1):
        wrong = source is not None and over is not None and over > LIMIT_DB
        explained = ""
        if wrong and source is not None:
            decoded, values = rows.sample(), source[0 : rows.sampled]
            is_part = rows.sampled < rows.shape[0]
            explained = misplaced or find_cause(decoded, values, is_part=is_part)
            if not explained and parent and match and (figures.cosine or 0.0) < UNLIKE:
                explained = other_parent(decoded, rows.shape[0], parent, match)
            figures = replace(figures, over_codes_db=over_codes_db(decoded, values))
        if explained or not causes:
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
    return result, [*findings, *declared_causes(recipe, result, form, rows.shape[1])]


def _measured(
    child: Checkpoint,
    weight: StoredWeight,
    parent: Checkpoint | None,
    match: ParentMatch | None,
    rows: WeightRows,
) -> tuple[WeightFigures, SourceRows | None, str]:
    """Measure a weight beside its parent in the layout it should have, or in one that it has.

    The third is the cause where it has another layout than it should have.
    """
    if parent is None or match is None:
        return measure(rows), None, ""
    first: tuple[WeightFigures, SourceRows] | None = None
    for layout in parent_layouts(child, parent, weight.name, match):
        ahead = KEPT if rows.tile[0] > TALL else 0
        source = layout.of(ParentRows(parent, match, *rows.shape, ahead), rows.shape[0])
        figures = measure(rows, source)
        first = first or (figures, source)
        if (figures.cosine or 0.0) > MISPLACED:
            return (*first, layout.cause) if layout.cause else (figures, source, "")
    assert first is not None
    return *first, ""


def source_rows(
    child: Checkpoint,
    parent: Checkpoint,
    weight: StoredWeight,
    match: ParentMatch,
    rows: WeightRows,
) -> SourceRows:
    """Return the parent's rows in the layout in which a weight is compared with them."""
    layouts = list(parent_layouts(child, parent, weight.name, match))
    if any(not layout.cause for layout in layouts[1:]):
        _, source, _ = _measured(child, weight, parent, match, rows)
        assert source is not None
        return source
    return layouts[0].of(ParentRows(parent, match, *rows.shape), rows.shape[0])


def _form(weight: DecodedRows) -> DeclaredFormat:
    rows, columns = weight.shape
    tile = (
        None if weight.tile[0] >= rows and rows > 1 else weight.tile[0],
        None if weight.tile[1] >= columns else weight.tile[1],
    )
    return DeclaredFormat(weight.element, tile, weight.has_zero_points)
