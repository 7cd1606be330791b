"""Check that a kernel agrees with itself where it splits its sums."""

import torch
from torch.nn.functional import linear

from qgate.testing import RelationFailure, check_relations


def row_by_row(x, w):
    return torch.stack([(row * w).sum(1) for row in x]) if len(x) else linear(x, w)


def split_at_powers_of_two(x, w):
    terms = x.shape[1]
    if terms & (terms - 1) or len(x) > 20:
        return row_by_row(x, w)
    half = terms // 2
    return row_by_row(x[:, :half], w[:, :half]) + row_by_row(x[:, half:], w[:, half:])


x, w = torch.randn(40, 128), torch.randn(24, 128)
check_relations(split_at_powers_of_two, x, w, like=linear)
try:
    check_relations(split_at_powers_of_two, x, w, like=linear, bitwise=True)
except RelationFailure as failure:
    assert "only where K is 16, 32, 64, 128, powers of two" in str(failure)
