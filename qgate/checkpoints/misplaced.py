"""Weights that are those of another tensor of the parent, told by sampled elements."""

from __future__ import annotations

from torch import Tensor

from qgate.checkpoints.gguf.layouts import ParentLayout
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.pairing import ALIKE, ParentMatch, cosine, sampled
from qgate.checkpoints.rows import ParentRows
from qgate.checkpoints.stored import Checkpoint
from qgate.text import one_line

UNLIKE = 0.5
"""Cosine with its parent below which a weight may have been made from another tensor."""
LEADING = 1 << 20
"""Elements in leading rows of a weight, of which some are compared."""


def other_parent(weight: QuantizedWeight, rows: int, parent: Checkpoint, match: ParentMatch) -> str:
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
        if cosine(sample, _sample(parent, name, shape, count, match.heads)) >= ALIKE:
            return f"it was made from {one_line(name)}, not from {one_line(own)}"
    return ""


def _sample(
    parent: Checkpoint, name: str, shape: tuple[int, int], count: int, heads: int
) -> Tensor:
    """Return a sample of leading rows of a parent's tensor, which are read once."""
    key = name, count * shape[1], heads
    if key not in parent.samples:
        source = ParentRows(parent, ParentMatch((name,), ""), *shape)
        parent.samples[key] = sampled(ParentLayout(heads).of(source, shape[0])[0:count])
    return parent.samples[key]
