"""Judge one weight of a checkpoint: its figures, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

from qgate.checkpoints.causes import find_cause
from qgate.checkpoints.code_causes import code_causes
from qgate.checkpoints.compute import DecodedRows, SourceRows, measure
from qgate.checkpoints.conventions import CONVENTIONS
from qgate.checkpoints.findings import LIMIT_DB, declared_causes, error_cause, scale_causes
from qgate.checkpoints.gguf.layouts import parent_layouts
from qgate.checkpoints.grids import TALL
from qgate.checkpoints.methods.explanations import ErrorExplanation, explain_error
from qgate.checkpoints.methods.steps import over_codes_db
from qgate.checkpoints.methods.surroundings import Surroundings
from qgate.checkpoints.misplaced import UNLIKE, other_parent
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.plain import judge_plain
from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import CheckpointFinding, WeightFigures, WeightRecord
from qgate.checkpoints.rows import ParentRows, WeightRows
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import MisfitError, StoredWeight

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
        figures, source, misplaced = _measured(child, weight, parent, match, rows)
    except MisfitError as error:
        return result, [CheckpointFinding(weight.name, str(error))]
    causes = [*scale_causes(figures), *code_causes(rows.element, figures)]
    if source is not None and layer is not None and match is not None and _is_over(figures):
        explanation = None
        if misplaced:
            explanation = ErrorExplanation(figures, cause=error_cause(figures, misplaced))
        elif rows.element in CONVENTIONS:
            # Other bytes than those meant look like scales of all kinds.
            explanation = _explain_blocks(rows, source, figures, is_wrong=bool(causes))
        elif not causes:
            explanation = explain_error(layer, rows, source, figures)
        if explanation is not None:
            explanation = _from_other_parent(explanation, layer.parent, match, rows)
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
    return result, [*findings, *declared_causes(recipe, result, form, rows.shape[1])]


def _explain_blocks(
    rows: WeightRows, source: SourceRows, figures: WeightFigures, *, is_wrong: bool
) -> ErrorExplanation | None:
    """Find the fault of blocks with rules of their own; None for none where more is wrong."""
    if figures.zero_share == 1:
        return None
    weight, parent = rows.sample(), source[0 : rows.sampled]
    words = find_cause(weight, parent, is_part=rows.sampled < rows.shape[0])
    if is_wrong and not words:
        return None
    figures = replace(figures, over_codes_db=over_codes_db(weight, parent))
    return ErrorExplanation(figures, cause=error_cause(figures, words))


def _from_other_parent(
    explanation: ErrorExplanation, parent: Checkpoint, match: ParentMatch, rows: WeightRows
) -> ErrorExplanation:
    """Name the other tensor of the parent that a weight was made from, where it was."""
    figures = explanation.figures
    if explanation.method or (figures.cosine or 0.0) >= UNLIKE:
        return explanation
    words = other_parent(rows.sample(), rows.shape[0], parent, match)
    return replace(explanation, cause=error_cause(figures, words)) if words else explanation


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


def _is_over(figures: WeightFigures) -> bool:
    return figures.over_ideal_db is not None and figures.over_ideal_db > LIMIT_DB


def _form(weight: DecodedRows) -> DeclaredFormat:
    rows, columns = weight.shape
    tile = (
        None if weight.tile[0] >= rows and rows > 1 else weight.tile[0],
        None if weight.tile[1] >= columns else weight.tile[1],
    )
    return DeclaredFormat(weight.element, tile, weight.has_zero_points)
