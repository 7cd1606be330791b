"""Which elements of a tensor share a scale that is made from them."""

from __future__ import annotations

from qgate.formats import Quantizer


def mixes(q: Quantizer, dims: int, dim: int) -> bool:
    """Tell if elements at several places along a dimension share a scale made from them."""
    if q.format.kind == "block" and q.format.needs_amax and not q.format.by_rows:
        return True
    if q.rotation is not None and dim == q.rotation_axis % dims:
        return True
    if q.granularity is None or q.scale is not None:
        return False
    if q.granularity == "tensor":
        return True
    if q.groups is not None:
        return dim in q.groups.along(dims)
    if q.tile is not None:
        return dim >= dims - 2
    same = q.axis_of(dims) == dim
    return same if q.granularity == "block" else not same
