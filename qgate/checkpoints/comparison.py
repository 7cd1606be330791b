"""Compare a quantized checkpoint with its recipe and its parent, one weight at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qgate.checkpoints.accounting import account, fused_scales, odd_scales
from qgate.checkpoints.activation_scales import activation_findings
from qgate.checkpoints.calibrated_scales import Calibration, calibration_findings
from qgate.checkpoints.compute import DecodedRows, SourceRows
from qgate.checkpoints.dequantized import as_declared
from qgate.checkpoints.findings import makes_unlike
from qgate.checkpoints.gguf.layouts import layout_notes
from qgate.checkpoints.gguf.names import match_llama_names
from qgate.checkpoints.graph_pairs import (
    fit_shapes,
    leave_out_unused,
    match_plain,
    name_sources,
    without_constants,
)
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.methods.explanations import FOUR_OVER_SIX, settle_methods
from qgate.checkpoints.methods.surroundings import WeightPair
from qgate.checkpoints.opening import open_again, open_checkpoint
from qgate.checkpoints.own_layouts import with_layout
from qgate.checkpoints.packings import decode
from qgate.checkpoints.pairing import ParentMatch, match_by_content, match_by_name
from qgate.checkpoints.plain import tied_weights
from qgate.checkpoints.recipe_files import write_out
from qgate.checkpoints.recipe_texts import recipe_lines
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import CheckpointRecord, WorstBlock, worst_first
from qgate.checkpoints.running import judgements
from qgate.checkpoints.shipped.checks import shipped_findings
from qgate.checkpoints.shipped.shards import leave_out_lost
from qgate.checkpoints.stacked_experts import list_experts
from qgate.checkpoints.stored import Checkpoint, Stamps
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.checkpoints.weights import Judgement, judge_weight, source_rows, weight_rows
from qgate.engine import Workers, workers_of
from qgate.errors import QgateError

Progress = Callable[[int, int], None]
NO_RECIPE = (
    "its configuration declares no recipe: formats are those of the tensors, and no layer counts "
    "as left out; --recipe FILE says what was meant"
)
ALIKE = 0.3
"""Least cosine of a weight and its parent; unrelated weights have about 0."""

WIDTH = 64
"""Columns of a block that are kept, around the element with the most error."""


@dataclass(frozen=True)
class CheckpointPair:
    """A quantized checkpoint beside its parent: which weights there are, and what they match.

    Values are read when a weight is judged. Another process opens the files itself.
    """

    child: Checkpoint
    parent: Checkpoint | None
    recipe: Recipe
    weights: list[StoredWeight]
    matches: dict[str, ParentMatch]

    def __reduce__(self) -> tuple[Callable[..., CheckpointPair], tuple[object, ...]]:
        return _opened_again, (
            *((x and x.label, x and x.stamps) for x in (self.child, self.parent)),
            self.recipe,
            [weight.name for weight in self.weights],
            self.matches,
            self.child.layout,
        )

    def judge(self, weight: StoredWeight) -> Judgement:
        """Compare one weight with what is declared, and with its parent."""
        return judge_weight(self._pair_of(weight))

    def _pair_of(self, weight: StoredWeight) -> WeightPair:
        match = self.matches.get(weight.name)
        return WeightPair(self.child, weight, self.parent, match, self.recipe)

    def worst_block(self, name: str) -> WorstBlock | None:
        """Find the worst block of a weight; None where it has no parent."""
        weight = next(weight for weight in self.weights if weight.name == name)
        if weight.packing is None:
            return None
        pair = self._pair_of(weight)
        rows = weight_rows(pair)
        source = source_rows(pair, rows)
        return None if source is None else worst_block(name, rows, source)

    def name_sources(self, record: CheckpointRecord) -> None:
        """Name the tensor of the parent that a weight unlike its counterpart was made from."""
        if self.parent is not None:
            name_sources(record, self.child, self.weights, self.parent, self.matches, self.recipe)

    def with_source(self, judgement: Judgement) -> Judgement:
        """Name the source in the findings of one weight."""
        weight, findings = judgement
        record = CheckpointRecord("", None, "", [weight], list(findings))
        self.name_sources(record)
        return weight, record.findings

    def account(self, record: CheckpointRecord, calibration: Calibration | None = None) -> None:
        """Add to a record what is missing, unexpected, left out, or cannot be fused.

        calibration  tensors of activations, beside which static scales are held
        """
        if self.parent is not None:
            record.notes += layout_notes(self.child, self.parent)
        account(record, self.recipe, self.parent, self.matches, self.weights)
        leave_out_lost(record, self.child)
        if self.parent is not None and (self.child.has_graph or self.parent.has_graph):
            leave_out_unused(record, self.parent, self.matches)
        record.findings += fused_scales(self.child, self.weights)
        record.findings += odd_scales(self.child, self.weights)
        record.findings += tied_weights(self.child)
        record.findings += activation_findings(self.child, self.weights, self.recipe.method)
        record.findings += shipped_findings(
            self.child, self.parent, self.weights, self.matches, self.recipe
        )
        if calibration is not None:
            record.findings += calibration_findings(self.child, self.weights, calibration)


def open_pair(
    child: str, parent: str | None, recipe_file: str | None = None, layout_file: str | None = None
) -> CheckpointPair:
    """Open a checkpoint and its parent, and match their weights; an error if they are no pair."""
    stored = open_checkpoint(child)
    recipe = with_layout(recipe_file, layout_file, stored)[0]
    weights = find_weights(stored)
    source = None if parent is None else _source(open_checkpoint(parent), weights)
    _check_quantized(child, weights, recipe)
    matches: dict[str, ParentMatch] = {}
    if source is not None:
        _check_parent(source)
        matches = _match(stored, weights, source, recipe)
        weights = without_constants(stored, weights, matches)
        weights = as_declared(stored, source, weights, matches, recipe)
        _check_pair(child, parent or "", matches, weights)
    return CheckpointPair(stored, source, recipe, weights, matches)


def compare(
    child: str,
    parent: str | None = None,
    progress: Progress | None = None,
    recipe_file: str | None = None,
    *,
    layout_file: str | None = None,
    workers: Workers | int = 1,
    unfinished: Path | None = None,
    blocks: int = 0,
    calibration: Calibration | None = None,
) -> CheckpointRecord:
    """Compare a quantized checkpoint with what it declares, and with its parent.

    child, parent   folders or single files, at paths or URLs
    progress        called with the number of weights done, and of all
    recipe_file     what was meant, instead of what the child declares
    layout_file     the layout of the child's weights, where it is one of your own
    workers         processes on this machine, or a Ray cluster; the record is the same
    unfinished      a folder for the results of a run that is killed, which the next one takes over
    blocks          weights whose worst block is kept, which reads them once more
    calibration     tensors of activations, beside which static scales are held
    """
    pair = open_pair(child, parent, recipe_file, layout_file)
    record = CheckpointRecord(child, parent, pair.recipe.method)
    record.recipe = recipe_lines(pair.recipe)
    if not pair.recipe.method and not pair.child.has_graph and not pair.child.is_gguf:
        record.notes.append(NO_RECIPE)
    for judged, findings in judgements(pair, workers_of(workers), unfinished, progress):
        record.weights.append(judged)
        record.findings += findings
    check_alike(record, layout_file)
    pair.name_sources(record)
    settle_methods(record)
    pair.account(record, calibration)
    record.written_recipe = write_out(record, pair.recipe, pair.weights)
    worst = [pair.worst_block(weight.name) for weight, _ in worst_first(record.weights)[:blocks]]
    record.blocks = [block for block in worst if block is not None]
    record.findings.sort(key=lambda finding: -(finding.over_ideal_db or 0.0))
    return record


def _opened_again(
    child: tuple[str, Stamps],
    parent: tuple[str | None, Stamps | None],
    recipe: Recipe,
    names: list[str],
    matches: dict[str, ParentMatch],
    layout: object,
) -> CheckpointPair:
    """Open a pair as another process has opened it."""
    stored = open_again(*child)
    stored.layout = layout
    weights = find_weights(stored)
    source = None if parent[0] is None else _source(open_again(parent[0], parent[1] or {}), weights)
    by_name = {w.name: w for w in as_declared(stored, source, weights, matches, recipe)}
    return CheckpointPair(stored, source, recipe, [by_name[name] for name in names], matches)


def _source(parent: Checkpoint, weights: Iterable[StoredWeight]) -> Checkpoint:
    """Return the parent with its experts as the child has them."""
    return list_experts(parent, [weight.name for weight in weights])


# What can be compared -----------------------------------------------------------------------------


def _check_quantized(child: str, weights: list[StoredWeight], recipe: Recipe) -> None:
    if any(weight.packing for weight in weights) or recipe.method:
        return
    raise QgateError(
        f"{child!r} holds no quantized weight and declares none; is it the parent? Give the "
        "quantized checkpoint first. If its weights have a layout of your own, --layout FILE "
        "describes it; if they were quantized and stored as floats again, give their recipe with "
        "--recipe FILE."
    )


def _check_parent(parent: Checkpoint) -> None:
    for weight in find_weights(parent):
        if weight.packing is not None and not weight.missing:
            raise QgateError(
                f"{parent.label!r} is quantized itself: {weight.name!r} is stored as "
                f"{weight.packing.name}. Give the checkpoint that the child was made from."
            )


def _check_pair(
    child: str, parent: str, matches: dict[str, ParentMatch], weights: list[StoredWeight]
) -> None:
    quantized = [weight.name for weight in weights if weight.packing]
    matched = sum(name in matches for name in quantized)
    if quantized and matched < len(quantized) / 2:
        raise QgateError(
            f"{parent!r} is not the parent of {child!r}: {matched} of {len(quantized)} quantized "
            "weights have a counterpart in it."
        )


def check_alike(record: CheckpointRecord, layout: str | None = None) -> None:
    """Refuse a parent of equal names and other values, unless a fault makes them so."""
    causes: dict[str, list[str]] = {}
    for finding in record.findings:
        causes.setdefault(finding.subject, []).append(finding.cause)
    compared = [
        weight.method not in ("", FOUR_OVER_SIX)
        or weight.figures.cosine > ALIKE
        or makes_unlike(weight.figures, causes.get(weight.name, ()))
        for weight in record.weights
        if weight.figures is not None and weight.figures.cosine is not None
    ]
    alike = sum(compared)
    if compared and alike < len(compared) / 2:
        words = (
            f"{record.parent!r} is not the parent of {record.child!r}: {alike} of {len(compared)} "
            "quantized weights are like their counterparts in it"
        )
        if layout is not None:
            words += (
                f", or {layout!r} is wrong: check its code_offset, packing, order and axes first"
            )
        raise QgateError(f"{words}.")


# Pairs --------------------------------------------------------------------------------------------


def _match(
    child: Checkpoint, weights: list[StoredWeight], parent: Checkpoint, recipe: Recipe
) -> dict[str, ParentMatch]:
    """Match weights by name, and quantized ones without a counterpart by content."""
    names = [weight.name for weight in weights]
    matches = match_by_name(names, parent.entries) | match_llama_names(child, names, parent)
    matches = fit_shapes(child, parent, matches)
    matched = {name for match in matches.values() for name in match.names}
    unmatched = {w.name: w for w in weights if w.name not in matches and w.packing is not None}
    if unmatched:

        def decoded(name: str) -> QuantizedWeight:
            return decode(child, unmatched[name], recipe)

        open_parents = {
            name: entry.shape
            for name, entry in parent.entries.items()
            if name not in matched or child.has_graph
        }
        matches |= match_by_content(unmatched, open_parents, decoded, parent.read)
    return matches | match_plain(child, parent, weights, matches)


def worst_block(name: str, weight: DecodedRows, parent: SourceRows) -> WorstBlock | None:
    """Find the block with the most error, what is not finite first; None for an empty weight.

    Of a block with very many rows, a part counts as a block.
    """
    most, worst = -1.0, None
    for start, stop in weight.spans():
        chunk = weight.rows(start, stop)
        source = parent[start:stop].float()
        if not source.numel():
            continue
        squares = (chunk.values() - source).square().nan_to_num(torch.inf)
        of_tiles = chunk.in_tiles(squares).sum((1, 3))
        if float(of_tiles.max()) <= most:
            continue
        most = float(of_tiles.max())
        tile = divmod(int(of_tiles.argmax()), of_tiles.shape[1])
        worst = _cut(name, chunk, source, start, tile)
    return worst


def _cut(
    name: str, weight: QuantizedWeight, parent: Tensor, start: int, tile: tuple[int, int]
) -> WorstBlock:
    """Keep some columns of a block in the row of its largest error; `start` is its first row."""
    height, width = min(weight.tile[0], len(parent)), weight.tile[1]
    rows = slice(tile[0] * height, min(tile[0] * height + height, len(parent)))
    numbers = torch.arange(parent.shape[1]) if weight.order is None else weight.order
    columns = numbers[tile[1] * width : tile[1] * width + width]
    values, source = weight.values()[rows, columns], parent[rows, columns]
    squares = (values - source).square().nan_to_num(torch.inf)
    row, column = divmod(int(squares.argmax()), squares.shape[1])
    first = min(max(column - WIDTH // 2, 0), max(squares.shape[1] - WIDTH, 0))
    of = slice(first, min(first + WIDTH, squares.shape[1]))
    energy = float(source.square().sum(dtype=torch.float64)) or 1.0
    error = float((values - source).square().sum(dtype=torch.float64)) / energy
    return WorstBlock(
        name=name,
        row=start + rows.start + row,
        column=int(columns[first]),
        scale=_finite(weight.scales[tile].reshape(1))[0],
        error=error if math.isfinite(error) else None,
        values=_finite(values[row, of]),
        parent=_finite(source[row, of]),
    )


def _finite(values: Tensor) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())
