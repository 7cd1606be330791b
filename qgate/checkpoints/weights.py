"""Judge one weight of a checkpoint: its figures, and what is wrong with it or with its codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qgate.checkpoints.causes import find_cause, scale_type_faults
from qgate.checkpoints.code_rules import describe_codes
from qgate.checkpoints.compute import DecodedRows, SourceRows, measure, squared
from qgate.checkpoints.conventions import CONVENTIONS
from qgate.checkpoints.findings import (
    EQUAL_CODES,
    LIMIT_DB,
    NOT_NEAREST,
    UNEXPLAINED,
    declared_causes,
    error_cause,
    scale_causes,
)
from qgate.checkpoints.gguf.layouts import ParentLayout, parent_layouts
from qgate.checkpoints.grids import TALL, QuantizedWeight, leading_rows
from qgate.checkpoints.local_errors import local_cause
from qgate.checkpoints.methods.explanations import (
    CHOSEN,
    FOUR_OVER_SIX,
    GPTQ,
    NOT_COMPARED,
    ROTATED,
    ErrorExplanation,
    explain_error,
)
from qgate.checkpoints.methods.steps import over_codes_db
from qgate.checkpoints.methods.surroundings import WeightPair
from qgate.checkpoints.pairing import ALIKE, ParentMatch, cosine, sampled
from qgate.checkpoints.plain import judge_plain
from qgate.checkpoints.recipes import DeclaredFormat
from qgate.checkpoints.record import CheckpointFinding, WeightFigures, WeightRecord
from qgate.checkpoints.rows import ParentRows, WeightRows
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import MisfitError
from qgate.formats import get
from qgate.text import one_line

KEPT = 256 << 20
"""Bytes of a parent that are kept for a second pass, which a scale of many rows needs."""
MISPLACED = 0.7
"""Cosine of a weight and its parent that rows in another order do not reach."""
UNLIKE = 0.5
"""Cosine with its parent below which a weight may have been made from another tensor."""
LEADING = 1 << 20
"""Elements in leading rows of a weight, of which some are compared."""
SUBNORMAL_SHARE = 0.1
"""Share of subnormal scales in E4M3 that right exporters stay under."""
UNUSED_SHARE = 0.3
"""Share of codes without an element that right exporters stay under."""
MANY_SCALES, MANY_ELEMENTS = 64, 4096
"""Scales and elements from which on the largest values of groups have the codes at the ends."""
Judgement = tuple[WeightRecord, list[CheckpointFinding]]


def judge_weight(pair: WeightPair) -> Judgement:
    """Compare one weight with what is declared, and with its parent where there is one."""
    weight, match, layer = pair.weight, pair.match, pair.surroundings
    if weight.packing is None:
        return judge_plain(pair)
    result = WeightRecord(weight.name, weight.packing.name, "", weight.size, 0)
    try:
        rows = weight_rows(pair)
        figures, source, misplaced = _measured(pair, rows)
    except MisfitError as error:
        return result, [CheckpointFinding(weight.name, str(error))]
    own_causes = [*scale_causes(figures), *_code_causes(rows.element, figures)]
    if source is not None and figures.scales.negative and not misplaced:
        own_causes = _scale_types(rows, source, figures) or own_causes
    causes = own_causes
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
            source = explanation.source or source
    elif not causes:
        causes = [error_cause(figures, "")]
    if source is not None and any(cause.startswith(NOT_NEAREST) for cause in causes):
        words = describe_codes(rows.sample(), source[0 : rows.sampled])
        causes = [error_cause(figures, words)] if words else causes
    if source is not None and not misplaced and not own_causes:
        causes = _with_local_cause(pair, rows, source, figures, causes, result.method)
    findings = [
        CheckpointFinding(weight.name, cause, figures.over_ideal_db) for cause in causes if cause
    ]
    if not result.method and (figures.fours_share or 0) > CHOSEN and not any(causes):
        result = replace(result, method=FOUR_OVER_SIX)
    form = _form(rows, pair.recipe.tile_of(weight.name.removesuffix(".weight")))
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
    findings += declared_causes(pair.recipe, result, form, rows.shape[1])
    findings += _ignored_zeros(pair, rows)
    return result, findings


FEW_ZEROS = 16
"""Zero points that may all be the middle of the codes by chance."""


def _ignored_zeros(pair: WeightPair, rows: WeightRows) -> Iterator[CheckpointFinding]:
    """Find zero points of codes that a recipe declares symmetric, and the other way round."""
    recipe, module = pair.recipe, pair.weight.name.removesuffix(".weight")
    declared = recipe.format_of(module)
    is_symmetric = declared is not None and not declared.has_zero_points
    expected = 0 if recipe.method == "compressed-tensors" and is_symmetric else recipe.zero
    if recipe.zero is not None and recipe.bits_of(module) != recipe.bits:
        return
    if not rows.has_zero_points or (expected is None and not recipe.has_zeros):
        return
    zeros = rows.rows(*next(iter(rows.spans()))).zero_points
    if expected is None:
        middle = 1 << (recipe.bits_of(module) - 1)
        if zeros is not None and zeros.numel() > FEW_ZEROS and bool(torch.all(zeros == middle)):
            cause = f"all zero points are {middle}, and the recipe declares zero points: codes are "
            yield CheckpointFinding(pair.weight.name, f"{cause}symmetric; declare them so")
        return
    if zeros is not None and not bool(torch.all(zeros == expected)):
        words = f"from {float(zeros.min()):g} to {float(zeros.max()):g}, and the recipe declares "
        cause = f"it has zero points {words}symmetric codes: some kernels leave them out"
        yield CheckpointFinding(pair.weight.name, cause)


def _with_local_cause(
    pair: WeightPair,
    rows: WeightRows,
    source: SourceRows,
    figures: WeightFigures,
    causes: list[str],
    method: str,
) -> list[str]:
    """Name rows or groups that are broken, if they are few or no other cause is known."""
    if method in (ROTATED, NOT_COMPARED):
        return causes
    is_known = any(cause and not UNEXPLAINED.match(cause) for cause in causes)
    words = local_cause(
        rows,
        source,
        figures,
        is_known=is_known,
        has_groups=GPTQ not in method and not (pair.recipe.method == "gptq" and _is_over(figures)),
        is_changed=pair.recipe.method == "awq" or bool(method),
    )
    return [words] if words else causes


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


def _scale_types(rows: WeightRows, source: SourceRows, figures: WeightFigures) -> list[str]:
    """Name the format that the codes of scales have, where they are read as another one."""
    weight, parent = rows.sample(), source[0 : rows.sampled]
    faults = list(scale_type_faults(weight, parent))
    is_part = rows.sampled < rows.shape[0]
    words = find_cause(weight, parent, faults=faults, is_part=is_part) if faults else ""
    return [error_cause(figures, words)] if words else []


def _from_other_parent(
    explanation: ErrorExplanation, parent: Checkpoint, match: ParentMatch, rows: WeightRows
) -> ErrorExplanation:
    """Name the other tensor of the parent that a weight was made from, where it was."""
    figures = explanation.figures
    if explanation.method or (figures.cosine or 0.0) >= UNLIKE:
        return explanation
    words = _other_parent(rows.sample(), rows.shape[0], parent, match)
    return replace(explanation, cause=error_cause(figures, words)) if words else explanation


def _measured(pair: WeightPair, rows: WeightRows) -> tuple[WeightFigures, SourceRows | None, str]:
    """Measure a weight beside its parent in the layout it should have, or in one that it has.

    The third is the cause where it has another layout than it should have.
    """
    parent, match = pair.parent, pair.match
    if parent is None or match is None:
        return measure(rows), None, ""
    first: tuple[WeightFigures, SourceRows] | None = None
    for layout in parent_layouts(pair.child, parent, pair.weight.name, match):
        ahead = KEPT if rows.tile[0] > TALL else 0
        source = layout.of(ParentRows(parent, match, *rows.shape, ahead), rows.shape[0])
        figures = measure(rows, source)
        first = first or (figures, source)
        if (figures.cosine or 0.0) > MISPLACED:
            return (*first, layout.cause) if layout.cause else (figures, source, "")
    assert first is not None
    return *first, ""


def weight_rows(pair: WeightPair) -> WeightRows:
    """Return the rows of a weight; of several tiles that its scales fit, those of least error."""
    rows = WeightRows(pair.child, pair.weight, pair.recipe)
    if len(rows.choices) < 2 or pair.parent is None or pair.match is None:
        return rows
    choices = [
        WeightRows(pair.child, pair.weight, pair.recipe, choice)
        for choice in range(len(rows.choices))
    ]
    tallest = max(height for height, _ in rows.choices)
    count = leading_rows(rows.shape, 1, LEADING)
    shares = [_leading_error(pair, rows, max(count, 2 * tallest)) for rows in choices]
    return choices[shares.index(min(shares))]


def _leading_error(pair: WeightPair, rows: WeightRows, count: int) -> float:
    """Return the squared error of about so many leading rows, by the row."""
    source = source_rows(pair, rows)
    assert source is not None
    total, stop = 0.0, 0
    for start, stop in rows.spans():
        values = rows.rows(start, stop).values()
        total += squared((values - source[start:stop].float()).nan_to_num(0, 0, 0))
        if stop >= count:
            break
    return total / max(1, stop)


def source_rows(pair: WeightPair, rows: WeightRows) -> SourceRows | None:
    """Return the parent's rows in the layout in which a weight is compared with them."""
    parent, match = pair.parent, pair.match
    if parent is None or match is None:
        return None
    layouts = list(parent_layouts(pair.child, parent, pair.weight.name, match))
    if any(not layout.cause for layout in layouts[1:]):
        return _measured(pair, rows)[1]
    return layouts[0].of(ParentRows(parent, match, *rows.shape), rows.shape[0])


def _is_over(figures: WeightFigures) -> bool:
    return figures.over_ideal_db is not None and figures.over_ideal_db > LIMIT_DB


def _form(weight: DecodedRows, declared: tuple[int | None, int | None]) -> DeclaredFormat:
    """Return the format of a weight: a tile as it is declared, even of a weight that is smaller."""
    height, width = weight.tile
    rows, columns = weight.shape
    is_all_rows, is_all_columns = height >= rows > 1, width >= columns
    tile: tuple[int | None, int | None] = weight.tile
    if tile != declared or height == 1:
        is_square = height == width and not (is_all_rows and is_all_columns)
        tile = (
            None if is_all_rows and not is_square else height,
            None if is_all_columns and not is_square else width,
        )
    return DeclaredFormat(weight.element, tile, weight.has_zero_points)


# Codes and other tensors ------------------------------------------------------------------------


def _code_causes(element: str, figures: WeightFigures) -> Iterator[str]:
    """Name scales with fewer bits, zero points that are no codes, and codes that never occur."""
    count = figures.scales.count
    subnormal = figures.subnormal_scales
    if subnormal > SUBNORMAL_SHARE * count:
        yield (
            f"{subnormal:,} of {count:,} scales are subnormal in E4M3: the scale of the whole "
            "tensor does not fit them"
        )
    if figures.outside_zero_points:
        yield f"{figures.outside_zero_points:,} zero points are no codes of the elements"
    if element in CONVENTIONS:
        return  # code books have codes that right exporters leave out
    codes = _count_values(element)
    is_one = figures.unused_codes == codes - 1 or figures.at_ends_share == 1.0
    if is_one and figures.count >= MANY_SCALES and codes > 4 and figures.zero_share < 1:
        yield f"{EQUAL_CODES}, or at the ends of the format: nothing wrote them"
        return
    is_sampled = figures.count > MANY_ELEMENTS and count >= MANY_SCALES
    if is_sampled and figures.unused_codes > UNUSED_SHARE * codes:
        yield f"{figures.unused_codes} of {codes} codes never occur"


def _count_values(element: str) -> int:
    if element.startswith(("int", "uint")):
        return 1 << int(element.removeprefix("u").removeprefix("int"))
    return len(set(get(element).values().tolist()))


def _other_parent(
    weight: QuantizedWeight, rows: int, parent: Checkpoint, match: ParentMatch
) -> str:
    """Say which other tensor of the parent a weight was made from; empty where it is none.

    weight   leading rows of a weight that has so many rows
    """
    if len(match.names) > 1 or match.transposed:
        return ""
    (own,) = match.names
    shape = rows, weight.shape[1]
    count = min(weight.shape[0], -(-LEADING // max(1, shape[1])))
    sample = sampled(weight.rows(0, count).values())
    for name, entry in parent.entries.items():
        if name == own or entry.shape != parent.entries[own].shape:
            continue
        if cosine(sample, _sample_of_parent(parent, name, shape, count, match.heads)) >= ALIKE:
            return f"it was made from {one_line(name)}, not from {one_line(own)}"
    return ""


def _sample_of_parent(
    parent: Checkpoint, name: str, shape: tuple[int, int], count: int, heads: int
) -> Tensor:
    """Return a sample of leading rows of a parent's tensor, which are read once."""
    key = name, count * shape[1], heads
    if key not in parent.samples:
        source = ParentRows(parent, ParentMatch((name,), ""), *shape)
        parent.samples[key] = sampled(ParentLayout(heads).of(source, shape[0])[0:count])
    return parent.samples[key]
