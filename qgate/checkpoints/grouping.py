"""Group the tensors of a checkpoint into weights: by packing, by what describes them, or alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from qgate.checkpoints.gguf.weights import block_weights
from qgate.checkpoints.own_layouts import LayoutFile
from qgate.checkpoints.packings import PACKINGS
from qgate.checkpoints.stored import Checkpoint, GraphWeight, StoredEntry
from qgate.checkpoints.torchao_weights import torchao_weights
from qgate.checkpoints.weight_parts import Packing, StoredWeight

TELLING = (
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale",
    "weight_scale_2", "weight_shape", "weight_zero_point", "qweight", "qzeros", "SCB", "W_q",
)  # fmt: skip
"""Endings of tensors that quantized weights alone have; `weight` in dtypes of codes."""


def find_weights(checkpoint: Checkpoint) -> list[StoredWeight]:
    """Group the tensors of a checkpoint into weights; those of no packing stand alone."""
    weights = list(_described_weights(checkpoint))
    grouped = {entry.name for weight in weights for entry in weight.parts.values()}
    if isinstance(checkpoint.layout, LayoutFile):
        grouped |= checkpoint.layout.unused(checkpoint)
    for packing in () if checkpoint.has_graph else PACKINGS:
        first = next(iter(packing.parts))
        for entry_name in checkpoint.entries:
            prefix, separator = _prefix(entry_name, first)
            if separator is None or entry_name in grouped:
                continue
            parts = _parts(checkpoint, packing, prefix, separator)
            if parts is None or grouped & {entry.name for entry in parts.values()}:
                continue
            grouped |= {entry.name for entry in parts.values()}
            name = f"{prefix}.weight" if separator == "." else prefix
            weights.append(StoredWeight(name, packing, parts))
    if not checkpoint.has_graph:
        weights += _incomplete_weights(checkpoint, weights, grouped)
    weights += [
        StoredWeight(name, None, {"": entry})
        for name, entry in checkpoint.entries.items()
        if name not in grouped
    ]
    order = {name: number for number, name in enumerate(checkpoint.entries)}
    return sorted(weights, key=lambda w: order[next(iter(w.parts.values())).name])


def _incomplete_weights(
    checkpoint: Checkpoint, weights: list[StoredWeight], grouped: set[str]
) -> list[StoredWeight]:
    """Group tensors of weights that lack some, and add the names of all to `grouped`.

    The packing is the one that needs the fewest more; of several, the one that other weights have.
    """
    by_module: dict[str, dict[str, StoredEntry]] = {}
    for name, entry in checkpoint.entries.items():
        module, _, ending = name.rpartition(".")
        if name not in grouped and ending in TELLING:
            by_module.setdefault(module, {})[ending] = entry
    usual = Counter(weight.packing.name for weight in weights if weight.packing)
    incomplete = []
    for module, parts in by_module.items():
        fitting = [packing for packing in PACKINGS if _may_have(packing, parts)]
        if not fitting:
            continue
        packing = min(fitting, key=lambda p: (len(_missing(p, parts)), -usual[p.name]))
        beside = {ending: checkpoint.entries.get(f"{module}.{ending}") for ending in packing.parts}
        parts |= {
            ending: entry
            for ending, entry in beside.items()
            if entry is not None and entry.dtype in packing.parts[ending]
        }
        grouped |= {entry.name for entry in parts.values()}
        missing = _missing(packing, parts)
        incomplete.append(StoredWeight(f"{module}.weight", packing, parts, missing))
    return incomplete


def _may_have(packing: Packing, parts: Mapping[str, StoredEntry]) -> bool:
    """Return True if a packing has all these tensors, one of which belongs to no other tensor."""
    return bool(_missing(packing, parts)) and all(
        entry.dtype in packing.parts.get(ending, ()) for ending, entry in parts.items()
    )


def _missing(packing: Packing, parts: Mapping[str, StoredEntry]) -> tuple[str, ...]:
    return tuple(e for e in packing.parts if e not in parts and e not in packing.optional)


def _described_weights(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Yield weights that layouts, graphs, types of tensors or heads of files describe."""
    if isinstance(checkpoint.layout, LayoutFile):
        yield from checkpoint.layout.weights(checkpoint)
    for graph_weight in checkpoint.weights or ():
        entries = {role: checkpoint.entries[name] for role, name in graph_weight.parts.items()}
        yield StoredWeight(graph_weight.name, _packing_of(graph_weight), entries)
    for finder in (block_weights, torchao_weights):
        yield from finder(checkpoint)


def _packing_of(weight: GraphWeight) -> Packing:
    return Packing(
        weight.packing,
        lambda parts: weight.decode(parts.tensors),
        by_rows=weight.by_rows,
        by_columns=weight.by_columns,
        count_rows=(lambda _checkpoint, _parts: weight.rows) if weight.rows else None,
    )


def _prefix(name: str, ending: str) -> tuple[str, str | None]:
    """Split `up.weight` or `up_blocks` into its stem and what joins it with the ending."""
    for separator in (".", "_"):
        if name.endswith(separator + ending):
            return name[: -len(ending) - 1], separator
    return "", None


def _parts(
    checkpoint: Checkpoint, packing: Packing, prefix: str, separator: str
) -> dict[str, StoredEntry] | None:
    parts = {}
    for ending, dtypes in packing.parts.items():
        entry = checkpoint.entries.get(f"{prefix}{separator}{ending}")
        if entry is not None and entry.dtype in dtypes:
            parts[ending] = entry
        elif ending not in packing.optional or entry is not None:
            return None
    return parts
