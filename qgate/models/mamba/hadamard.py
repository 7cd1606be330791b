"""Orthonormal Hadamard transforms: widths 2^k, 12 * 2^k and 40 * 2^k.

The transform goes by butterflies, elementwise and in a fixed order, so that a row gives the same
bits alone and among others, which a matrix product does not promise.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

from qgate.errors import QgateError


@cache
def _core(size: int) -> tuple[tuple[int, ...], ...]:
    """Return a matrix of +-1 with orthogonal rows, for the odd part of a width."""
    if size == 1:
        return ((1,),)
    if size == 12:
        return _paley_two(5)
    half = _paley_one(19)
    return tuple(
        tuple(sign * entry for sign in signs for entry in row)
        for signs in ((1, 1), (1, -1))
        for row in half
    )


def _residue(q: int) -> list[int]:
    """Return the quadratic character modulo a prime: 0, 1 for squares, -1 for the others."""
    squares = {k * k % q for k in range(1, q)}
    return [0, *(1 if k in squares else -1 for k in range(1, q))]


def _paley_one(q: int) -> tuple[tuple[int, ...], ...]:
    chi = _residue(q)
    rows = [[1] * (q + 1)]
    for i in range(q):
        rows.append([-1, *(1 if i == j else chi[(j - i) % q] for j in range(q))])
    return tuple(map(tuple, rows))


def _paley_two(q: int) -> tuple[tuple[int, ...], ...]:
    """Return a symmetric matrix of size 2 (q + 1)."""
    chi = _residue(q)
    conference = [[0, *[1] * q]]
    conference += [[1, *(chi[(j - i) % q] for j in range(q))] for i in range(q)]
    plus, alone = ((1, 1), (1, -1)), ((1, -1), (-1, -1))
    rows = []
    for i, line in enumerate(conference):
        for r in range(2):
            row: list[int] = []
            for j, entry in enumerate(line):
                row += alone[r] if i == j else [entry * sign for sign in plus[r]]
            rows.append(tuple(row))
    return tuple(rows)


def split_width(width: int) -> tuple[int, int]:
    """Split a width into the size of its core and a power of two."""
    for core in (12, 40, 1):
        power = width // core
        if width % core == 0 and power > 0 and power & (power - 1) == 0:
            return core, power
    raise QgateError(
        f"there is no Hadamard transform of width {width} here; widths are 2^k, 12 * 2^k or "
        "40 * 2^k."
    )


def transform(x: Tensor) -> Tensor:
    """Return H x over the last axis, without the factor 1 / sqrt(width)."""
    width = x.shape[-1]
    size, power = split_width(width)
    # The axis of the transform comes first: butterflies then add whole rows of memory.
    columns = x.reshape(-1, width).t().contiguous()
    count = columns.shape[-1]
    if size > 1:
        columns = _mixed(columns.view(size, power, count), _core(size))
    half = 1
    while half < power:
        pairs = columns.view(width // (2 * half), 2, half, count)
        low, high = pairs[:, 0], pairs[:, 1]
        columns = torch.stack([low + high, low - high], 1)
        half *= 2
    return columns.view(width, count).t().contiguous().view(x.shape)


def _mixed(columns: Tensor, core: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return signed sums of the parts along the first axis, added from the first to the last."""
    parts = columns.unbind()
    mixed = []
    for signs in core:
        total = parts[0] * signs[0]
        for part, sign in zip(parts[1:], signs[1:], strict=True):
            total = total + part if sign > 0 else total - part
        mixed.append(total)
    return torch.stack(mixed)


def matrix(width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the orthonormal H as a matrix."""
    return transform(torch.eye(width, dtype=dtype)).t() / math.sqrt(width)


class Hadamard(nn.Module):
    """The transform h = H y, in float32 for any input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        split_width(width)
        self.width = width

    def forward(self, y: Tensor) -> Tensor:
        return transform(y.float()) * (1 / math.sqrt(self.width))
