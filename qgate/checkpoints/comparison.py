"""Compare a quantized checkpoint with its recipe and its parent, one weight at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qgate.checkpoints.causes import find_cause
from qgate.checkpoints.compute import measure, over_codes_db
from qgate.checkpoints.findings import (
    LIMIT_DB,
    declared_causes,
    error_cause,
    scale_causes,
)
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.packings import StoredWeight, decode, find_weights
from qgate.checkpoints.pairing import (
    FUSIONS,
    ParentMatch,
    match_by_content,
    match_by_name,
)
from qgate.checkpoints.recipes import DeclaredFormat, Recipe, read_recipe
from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord, WeightRecord
from qgate.checkpoints.stored import Checkpoint, open_checkpoint
from qgate.errors import QgateError

Progress = Callable[[int, int], None]
NOT_LINEAR = ("embed", "norm", "wte", "wpe", "router", "conv")
"""Words in the names of two-dimensional weights that a recipe's "Linear" does not mean."""
ALIKE = 0.3
"""Least cosine of a weight and its parent; unrelated weights have about 0."""
TIED = "lm_head"
HELPERS = ("input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale")
"""Endings of tensors that belong to activations and caches, which a parent has not."""
FUSED = (FUSIONS["qkv_proj"], FUSIONS["gate_up_proj"])
"""Weights that serving engines fuse, so that they need one scale of the whole tensor."""


def compare(
    child: str, parent: str | None = None, progress: Progress | None = None
) -> CheckpointRecord:
    """Compare a quantized checkpoint with what it declares, and with its parent.

    child, parent   folders of safetensors shards or single files, at paths or URLs
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
        _check_pair(child, parent or "", matches, weights)
    for number, weight in enumerate(weights):
        if progress is not None:
            progress(number, len(weights))
        match = matches.get(weight.name)
        if weight.packing is None:
            record.weights.append(_plain_record(stored, weight, source, match, record))
        else:
            record.weights.append(_quantized_record(stored, weight, source, match, recipe, record))
    _check_alike(record)
    _account(record, recipe, source, matches, weights)
    record.findings += _fused_scales(stored, weights)
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
    taken = {name for match in matches.values() for name in match.names}
    unmatched = {w.name: w for w in weights if w.name not in matches and w.packing is not None}
    if not unmatched:
        return matches

    def values(name: str) -> Tensor:
        return decode(child, unmatched[name], recipe.bits).values()

    open_parents = {
        name: entry.shape
        for name, entry in parent.entries.items()
        if name not in taken and len(entry.shape) == 2
    }
    return matches | match_by_content(unmatched, open_parents, values, parent.read)


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


# Weights ------------------------------------------------------------------------------------------


def _quantized_record(
    child: Checkpoint,
    weight: StoredWeight,
    parent: Checkpoint | None,
    match: ParentMatch | None,
    recipe: Recipe,
    record: CheckpointRecord,
) -> WeightRecord:
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
        record.findings.append(CheckpointFinding(weight.name, str(error)))
        return result
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
    record.findings += [CheckpointFinding(weight.name, cause, over) for cause in causes]
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
    record.findings += declared_causes(recipe, result, form)
    return result


def _form(weight: QuantizedWeight) -> DeclaredFormat:
    rows, columns = weight.elements.shape
    tile = (
        None if weight.tile[0] >= rows and rows > 1 else weight.tile[0],
        None if weight.tile[1] >= columns else weight.tile[1],
    )
    return DeclaredFormat(weight.element, tile, weight.zero_points is not None)


def _plain_record(
    child: Checkpoint,
    weight: StoredWeight,
    parent: Checkpoint | None,
    match: ParentMatch | None,
    record: CheckpointRecord,
) -> WeightRecord:
    """Compare a tensor that is not quantized: equal bits, or a cast of the parent's."""
    entry = next(iter(weight.parts.values()))
    count = math.prod(entry.shape)
    result = WeightRecord(weight.name, "", entry.dtype, weight.size, count)
    values = child.read(entry.name)
    if values.is_floating_point():
        finite = values.float().isfinite()
        if not bool(finite.all()):
            cause = f"{int((~finite).sum()):,} of {count:,} values are NaN or infinite"
            record.findings.append(CheckpointFinding(weight.name, cause))
    if parent is None or match is None:
        return result
    source = parent.read(match.names[0])
    if len(match.names) > 1:
        source = torch.cat([source, *(parent.read(name) for name in match.names[1:])])
    return replace(
        result,
        parents=match.names,
        matched=match.how,
        outcome=_outcome(weight.name, values, source, record),
    )


def _outcome(name: str, values: Tensor, source: Tensor, record: CheckpointRecord) -> str:
    if values.shape != source.shape:
        cause = f"it has shape {tuple(values.shape)}, the parent's has {tuple(source.shape)}"
        record.findings.append(CheckpointFinding(name, cause))
        return "changed"
    if values.dtype == source.dtype and _same(values, source):
        return "equal"
    if values.is_floating_point() and _same(values, source.to(values.dtype)):
        return "cast"
    if not bool(values.count_nonzero()) and bool(source.count_nonzero()):
        record.findings.append(CheckpointFinding(name, "all values are zero, the parent's are not"))
        return "changed"
    energy = float(source.double().square().sum()) or 1.0
    error = float((values.double() - source.double()).square().sum()) / energy
    cause = f"it is not quantized and not the parent's: relative error {error:.2g}"
    record.findings.append(CheckpointFinding(name, cause))
    return "changed"


def _same(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())


# The whole ----------------------------------------------------------------------------------------


def _account(
    record: CheckpointRecord,
    recipe: Recipe,
    parent: Checkpoint | None,
    matches: dict[str, ParentMatch],
    weights: list[StoredWeight],
) -> None:
    """Find what is missing, unexpected, or ignored in vain."""
    # An output layer that shares the embedding's weight is a module without a tensor.
    modules = [TIED, *(weight.name.removesuffix(".weight") for weight in weights)]
    if parent is not None:
        modules += [name.removesuffix(".weight") for name in parent.entries]
        used = {name for match in matches.values() for name in match.names}
        record.unmatched_parents = [name for name in parent.entries if name not in used]
        for name in record.unmatched_parents:
            if not _is_tied(name, parent):
                record.findings.append(CheckpointFinding(name, "it is in the parent alone"))
        for weight in weights:
            if weight.name not in matches and not weight.name.endswith(HELPERS):
                record.findings.append(CheckpointFinding(weight.name, "it is in the child alone"))
    for pattern in recipe.idle_patterns(modules):
        record.findings.append(CheckpointFinding(pattern, "this ignore pattern matches no module"))
    if recipe.method:
        skipped = [weight for weight in weights if _is_skipped(weight, recipe)]
        record.findings += [
            CheckpointFinding(
                weight.name,
                f"it is not quantized, and the recipe declares "
                f"{recipe.format_of(weight.name.removesuffix('.weight'))}",
            )
            for weight in skipped
        ]


def _is_skipped(weight: StoredWeight, recipe: Recipe) -> bool:
    """Return True for a linear layer's weight that the recipe quantizes and the child does not."""
    entry = next(iter(weight.parts.values()))
    module = weight.name.removesuffix(".weight")
    return (
        weight.packing is None
        and weight.name.endswith(".weight")
        and len(entry.shape) == 2
        and entry.dtype in ("F32", "BF16", "F16")
        and not any(word in module.lower() for word in NOT_LINEAR)
        and not recipe.ignores(module)
        and recipe.format_of(module) is not None
    )


def _is_tied(name: str, parent: Checkpoint) -> bool:
    """Return True for an output layer that shares its weight with the embedding."""
    configuration = parent.configuration.get("config.json")
    tied = isinstance(configuration, dict) and configuration.get("tie_word_embeddings", False)
    return bool(tied) and TIED in name


def _fused_scales(child: Checkpoint, weights: list[StoredWeight]) -> Iterator[CheckpointFinding]:
    """Find parts of fused weights whose scales of the whole tensor differ."""
    names = {weight.name: weight for weight in weights if weight.packing}
    endings = ("weight_global_scale", "weight_scale_2")
    for weight in names.values():
        for parts in FUSED:
            if not weight.name.endswith(f"{parts[0]}.weight"):
                continue
            group = [names.get(weight.name.replace(parts[0], part)) for part in parts]
            scales = {
                part: float(child.read(member.parts[ending].name).float().reshape(-1)[0])
                for part, member in zip(parts, group, strict=True)
                if member is not None
                for ending in endings
                if ending in member.parts
            }
            if len(Counter(scales.values())) > 1:
                listed = ", ".join(f"{part} {scale:.4g}" for part, scale in scales.items())
                yield CheckpointFinding(
                    weight.name,
                    f"engines fuse {' and '.join(scales)}, whose scales of the whole tensor "
                    f"differ: {listed}",
                )
