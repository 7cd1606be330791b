"""Codebooks of vectors: GGUF's IQ types name rows of four or eight elements by one code.

The gguf package has the tables; signs may be stored apart.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError

NEEDS_GGUF = "GGUF files need the package gguf: pip install 'pytest-qgate[checkpoints]'."
DELTA = 8
"""The unit of the IQ1 types is an eighth, by which their elements are shifted up or down."""


@functools.cache
def code_book(name: str) -> Tensor:
    """Return the rows of elements that the codes of a type name."""
    try:
        from gguf import quants
    except ImportError:
        raise QgateError(NEEDS_GGUF) from None
    kind = getattr(quants, name)
    if name == "IQ4_NL":
        return torch.tensor(kind.kvalues, dtype=torch.int8)
    kind.init_grid()
    return torch.from_numpy(kind.grid.reshape(kind.grid_shape).astype(np.int8))


@functools.cache
def sign_rows(name: str) -> Tensor:
    """Return the signs of eight elements for each code: of 7 bits (IQ2_XXS), else of 8 bits."""
    codes = torch.arange(256, dtype=torch.uint8)
    if name == "IQ2_XXS":
        from gguf import quants

        codes = torch.tensor(list(quants.IQ2_XXS.ksigns), dtype=torch.uint8)
    bits = (codes[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return 1 - 2 * bits.to(torch.int8)


@dataclass(frozen=True)
class CodeBook:
    """A code book and its signs.

    signs   "free", "even" (of eight signs an even number is negative) or "" (entries have signs)
    shift   what is added to or taken from the elements of a tile
    reach   the largest magnitude of a tile over its scale
    """

    name: str
    reach: float
    signs: str = ""
    shift: float = 0.0


def positive(groups: Tensor, signs: str) -> Tensor:
    """Return magnitudes; where signs must be even and are not, the smallest has the wrong one."""
    if not signs:
        return groups
    sizes = groups.abs()
    if signs == "even":
        eights = sizes.reshape(len(sizes), -1, 8)
        is_odd = (groups < 0).reshape(eights.shape).sum(2) % 2 == 1
        smallest = eights.argmin(2, keepdim=True)
        flipped = eights.scatter(2, smallest, -eights.gather(2, smallest))
        sizes = torch.where(is_odd[..., None], flipped, eights).reshape(sizes.shape)
    return sizes


def nearest_rows(table: Tensor, groups: Tensor) -> Tensor:
    """Return the row of a table that is nearest to each group."""
    rows = groups.reshape(-1, table.shape[1])
    # |x - t|^2 less |x|^2, which is the same for all entries.
    scores = torch.addmm(table.square().sum(1), rows, table.T, alpha=-2)
    # NumPy's argmin is several times faster than torch's.
    nearest = torch.from_numpy(scores.numpy().argmin(1))
    return table.index_select(0, nearest).reshape(groups.shape)
