"""Why the first tensor of a dump differs from that of another one, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.causes.tensors import NOISE, tensor_fault
from qgate.comparing.dump_differences import PairErrors
from qgate.dumps import Dump

LARGEST = 1 << 22
"""Elements of a tensor above which its first rows are looked at."""
ROUNDINGS = 2.0
"""Roundings to the dtype of a tensor that are no fault."""
SAYS_NOTHING = "elements are wrong, the first at"


def fault_of_pair(actual: Dump, reference: Dump, pair: PairErrors) -> str:
    """Say what is wrong with a tensor beside that of the other dump; empty if nothing plain is."""
    sides = []
    for dump, order in ((actual, pair.order), (reference, pair.reference_order)):
        record = next((r for r in dump.records(rank=pair.rank) if r.order == order), None)
        if record is None or record.tensor is None:
            return ""
        sides.append(_leading_rows(dump.tensor(record)))
    own, other = sides
    if own.shape != other.shape or not other.is_floating_point() or not other.numel():
        return ""
    eps = max(torch.finfo(side.dtype).eps for side in sides)
    words = tensor_fault(own.float(), other.float(), noise=max(NOISE, ROUNDINGS * eps))
    return "" if SAYS_NOTHING in words else words


def _leading_rows(tensor: Tensor) -> Tensor:
    if tensor.numel() <= LARGEST:
        return tensor
    per_row = tensor.numel() // len(tensor)
    return tensor[: max(1, LARGEST // per_row)]
