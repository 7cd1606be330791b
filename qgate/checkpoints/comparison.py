"""Compare a quantized checkpoint with its recipe and its parent, one weight at a time."""

from __future__ import annotations

from collections.abc import Callable

from qgate.checkpoints.accounting import account, fused_scales
from qgate.checkpoints.graph_pairs import (
    fit_shapes,
    leave_out_unused,
    match_plain,
    name_sources,
    without_constants,
)
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.packings import StoredWeight, decode, find_weights
from qgate.checkpoints.pairing import ParentMatch, match_by_content, match_by_name
from qgate.checkpoints.recipes import Recipe, read_recipe
from qgate.checkpoints.record import CheckpointRecord
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weights import judge_weight
from qgate.errors import QgateError

Progress = Callable[[int, int], None]
ALIKE = 0.3
"""Least cosine of a weight and its parent; unrelated weights have about 0."""


def compare(
    child: str, parent: str | None = None, progress: Progress | None = None
) -> CheckpointRecord:
    """Compare a quantized checkpoint with what it declares, and with its parent.

    child, parent   folders or single files, at paths or URLs
    progress        called with the number of weights done, and of all
    """
    stored = open_checkpoint(child)
    recipe = read_recipe(child, stored.configuration)
    source = None if parent is None else open_checkpoint(parent)
    record = CheckpointRecord(child, parent, recipe.method)
    weights = find_weights(stored)
    _check_quantized(child, weights, recipe)
    matches: dict[str, ParentMatch] = {}
    if source is not None:
        _check_parent(source)
        matches = _match(stored, weights, source, recipe)
        weights = without_constants(stored, weights, matches)
        _check_pair(child, parent or "", matches, weights)
    for number, weight in enumerate(weights):
        if progress is not None:
            progress(number, len(weights))
        judged, findings = judge_weight(stored, weight, source, matches.get(weight.name), recipe)
        record.weights.append(judged)
        record.findings += findings
    _check_alike(record)
    name_sources(record, stored, weights, source, matches, recipe.bits)
    account(record, recipe, source, matches, weights)
    if source is not None and (stored.has_graph or source.has_graph):
        leave_out_unused(record, source, matches)
    record.findings += fused_scales(stored, weights)
    record.findings.sort(key=lambda finding: -(finding.over_ideal_db or 0.0))
    return record


# What can be compared -----------------------------------------------------------------------------


def _check_quantized(child: str, weights: list[StoredWeight], recipe: Recipe) -> None:
    if any(weight.packing for weight in weights) or recipe.method:
        return
    raise QgateError(
        f"{child!r} holds no quantized weight and declares none; is it the parent? Give the "
        "quantized checkpoint first."
    )


def _check_parent(parent: Checkpoint) -> None:
    for weight in find_weights(parent):
        if weight.packing is not None:
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


def _check_alike(record: CheckpointRecord) -> None:
    """Refuse a parent of equal names and other values."""
    cosines = [
        weight.figures.cosine
        for weight in record.weights
        if weight.figures is not None and weight.figures.cosine is not None
    ]
    alike = sum(cosine > ALIKE for cosine in cosines)
    if cosines and alike < len(cosines) / 2:
        raise QgateError(
            f"{record.parent!r} is not the parent of {record.child!r}: {alike} of {len(cosines)} "
            "quantized weights are like their counterparts in it."
        )


# Pairs --------------------------------------------------------------------------------------------


def _match(
    child: Checkpoint, weights: list[StoredWeight], parent: Checkpoint, recipe: Recipe
) -> dict[str, ParentMatch]:
    """Match weights by name, and quantized ones without a counterpart by content."""
    matches = match_by_name([weight.name for weight in weights], parent.entries)
    matches = fit_shapes(child, parent, matches)
    taken = {name for match in matches.values() for name in match.names}
    unmatched = {w.name: w for w in weights if w.name not in matches and w.packing is not None}
    if unmatched:

        def decoded(name: str) -> QuantizedWeight:
            return decode(child, unmatched[name], recipe.bits)

        open_parents = {
            name: entry.shape
            for name, entry in parent.entries.items()
            if name not in taken or child.has_graph
        }
        matches |= match_by_content(unmatched, open_parents, decoded, parent.read)
    return matches | match_plain(child, parent, weights, matches)
