"""Weights that are those of another tensor of the parent, told by sampled elements."""

from __future__ import annotations

from torch import Tensor

from qgate.checkpoints.gguf_layouts import in_rope_order
from qgate.checkpoints.pairing import ALIKE, ParentMatch, cosine, sampled
from qgate.checkpoints.stored import Checkpoint
from qgate.text import one_line

UNLIKE = 0.5
"""Cosine with its parent below which a weight may have been made from another tensor."""


def other_parent(values: Tensor, parent: Checkpoint, match: ParentMatch) -> str:
    """Say which other tensor of the parent a weight was made from; empty where it is none."""
    if len(match.names) > 1 or match.transposed:
        return ""
    (own,) = match.names
    shape = parent.entries[own].shape
    sample = sampled(values)
    for name, entry in parent.entries.items():
        if name == own or entry.shape != shape:
            continue
        if cosine(sample, _sample(parent, name, match.heads)) >= ALIKE:
            return f"it was made from {one_line(name)!r} of the parent, not from {one_line(own)!r}"
    return ""


def _sample(parent: Checkpoint, name: str, heads: int) -> Tensor:
    """Return a sample of a parent's tensor, which is read once."""
    key = name, heads
    if key not in parent.samples:
        parent.samples[key] = sampled(in_rope_order(parent.read(name), heads))
    return parent.samples[key]
