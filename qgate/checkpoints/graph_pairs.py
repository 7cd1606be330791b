"""Pairs of a graph and its parent: names that exporters make up, constants, unused tensors."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace

from qgate.checkpoints.accounting import ALONE
from qgate.checkpoints.findings import UNEXPLAINED
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.packings import decode
from qgate.checkpoints.pairing import ParentMatch, match_by_content
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import CheckpointRecord, WeightRecord
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight

EQUAL = 0.9999
"""Least cosine of a tensor that is not quantized and its parent, which may be cast."""
UNLIKE = 0.3
"""Cosine of a weight and its counterpart under which another one is looked for."""
_LAYER = re.compile(r"(.*?\.\d+)\.")


def fit_shapes(
    child: Checkpoint, parent: Checkpoint, matches: dict[str, ParentMatch]
) -> dict[str, ParentMatch]:
    """Leave out matches by name that have another shape, and mark transposed ones, in graphs.

    Square weights are taken to be stored as most of the others are: those of GPT-2 are inputs x
    outputs, as a graph has them.
    """
    if not child.has_graph:
        return matches
    shapes = {name: entry.shape for name, entry in child.entries.items()}
    shapes |= {weight.name: weight.shape for weight in child.weights or ()}
    fitted, squares, balance = {}, [], 0
    for name, match in matches.items():
        shape = shapes[name]
        stored = [parent.entries[other].shape for other in match.names]
        if shape and sum(map(math.prod, stored)) != math.prod(shape):
            continue
        fitted[name] = match
        if len(shape) != 2 or len(stored) != 1:
            continue
        if shape == stored[0] == shape[::-1]:
            squares.append(name)
        elif stored[0] == shape[::-1]:
            fitted[name] = replace(match, transposed=True)
            balance += 1
        else:
            balance -= 1
    if balance > 0:
        fitted |= {name: replace(fitted[name], transposed=True) for name in squares}
    return fitted


def match_plain(
    child: Checkpoint,
    parent: Checkpoint,
    weights: list[StoredWeight],
    matches: dict[str, ParentMatch],
) -> dict[str, ParentMatch]:
    """Match tensors of a graph that are not quantized, and whose names say nothing, by content."""
    if not child.has_graph:
        return {}
    unmatched = [w.name for w in weights if w.packing is None and w.name not in matches]
    used = {name for match in matches.values() for name in match.names}
    open_parents = {name: entry.shape for name, entry in parent.entries.items() if name not in used}
    return match_by_content(unmatched, open_parents, child.read, parent.read, EQUAL)


def without_constants(
    child: Checkpoint, weights: list[StoredWeight], matches: dict[str, ParentMatch]
) -> list[StoredWeight]:
    """Leave out the constants of a graph: what has no counterpart, but for quantized matrices."""
    if not child.has_graph:
        return weights
    matrices = {weight.name for weight in child.weights or () if len(weight.shape) != 1}
    return [w for w in weights if w.name in matrices or w.name in matches]


def leave_out_unused(
    record: CheckpointRecord, parent: Checkpoint, matches: dict[str, ParentMatch]
) -> None:
    """Take back findings of modules and buffers of the parent that the graph does not compute.

    A tensor of a layer of which there are others, or of a module of which there are, is missing.
    """
    used = {name for match in matches.values() for name in match.names}
    modules = {_module(name) for name in used} | {_layer(name) for name in used}
    if parent.has_graph:
        modules.discard("")  # where constants are
    unused = {
        name
        for name in record.unmatched_parents
        if not parent.entries[name].dtype.startswith(("F", "BF"))
        or not modules & {_module(name), _layer(name)}
    }
    record.findings = [finding for finding in record.findings if finding.subject not in unused]
    if unused and not parent.has_graph:
        listed = ", ".join(sorted(unused)[:4]) + (", …" if len(unused) > 4 else "")
        record.notes.append(f"The graph does not use {len(unused)} tensors of the parent: {listed}")
    _name_twins(record, matches)


def _name_twins(record: CheckpointRecord, matches: dict[str, ParentMatch]) -> None:
    """Say of a missing tensor which of its like was written twice."""
    children: dict[str, list[str]] = defaultdict(list)
    for name, match in matches.items():
        children[match.names[0]].append(name)
    twins = [(other, names) for other, names in children.items() if len(names) > 1]
    if len(twins) != 1:
        return
    other, names = twins[0]
    words = f"it is in the parent alone; {' and '.join(names[:3])} were made from {other}"
    record.findings = [replace(f, cause=words) if f.cause == ALONE else f for f in record.findings]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _layer(name: str) -> str:
    layer = _LAYER.match(name)
    return layer[1] if layer else _module(name)


def name_sources(
    record: CheckpointRecord,
    child: Checkpoint,
    weights: list[StoredWeight],
    parent: Checkpoint,
    matches: dict[str, ParentMatch],
    recipe: Recipe,
) -> None:
    """Name the tensor of the parent that a weight unlike its counterpart was made from."""
    unlike = {
        weight.name: weight
        for weight in record.weights
        if weight.figures is not None
        and weight.figures.cosine is not None
        and weight.figures.cosine < UNLIKE
    }
    if not unlike:
        return
    by_name = {weight.name: weight for weight in weights}
    shapes = {name: entry.shape for name, entry in parent.entries.items()}

    def decoded(name: str) -> QuantizedWeight:
        return decode(child, by_name[name], recipe)

    sources = match_by_content(unlike, shapes, decoded, parent.read)
    words = {
        name: _source_words(weight, sources.get(name), matches[name].transposed)
        for name, weight in unlike.items()
    }
    record.findings = [
        replace(finding, cause=words[finding.subject])
        if words.get(finding.subject)
        and finding.over_ideal_db is not None
        and UNEXPLAINED.match(finding.cause)
        else finding
        for finding in record.findings
    ]


def _source_words(weight: WeightRecord, source: ParentMatch | None, is_transposed: bool) -> str:
    assert weight.figures is not None
    stored = weight.parents[0]
    if source is None:
        return f"its values have nothing to do with {stored}: cosine {weight.figures.cosine:.2f}"
    if source.names == weight.parents:
        is_turned = source.transposed != is_transposed
        return "its rows and columns are exchanged" if is_turned else ""
    return f"it was made from {source.names[0]}, not from {stored}"
