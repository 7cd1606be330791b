"""The error that a code book of the I types allows, estimated on a sample of tiles.

Code books hold few of the combinations that their levels have, so that the nearest entry is worse
than the nearest levels, by how much depends on the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.gguf.codebooks import code_book

SAMPLE = 128
"""Tiles of a chunk that are searched: each for the best of several scales."""
SHARES = (0.7, 0.8, 0.87, 0.94, 1.0, 1.08)
"""Scales to try, over that of the largest magnitude and the largest level."""


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


def book_error(book: CodeBook, tiles: Tensor) -> float:
    """Return the least squared error of sampled rows x elements, each with its best scale."""
    table = code_book(book.name).float()
    largest = tiles.abs().amax(1) / book.reach
    best = torch.full((len(tiles),), torch.inf)
    for share in SHARES:
        scales = torch.where(largest > 0, largest * share, 1.0)
        for shift in {book.shift, -book.shift}:
            groups = (tiles / scales[:, None] - shift).reshape(len(tiles), -1, table.shape[1])
            entries = _nearest(table, _positive(groups, book.signs))
            errors = (groups.abs() if book.signs else groups) - entries
            if book.signs == "even":
                errors = _positive(groups, book.signs) - entries
            # The scale that is best for these entries.
            values = (tiles.reshape(groups.shape) - errors * scales[:, None, None]).flatten(1)
            energy = values.square().sum(1)
            ratio = torch.where(energy > 0, (values * tiles).sum(1) / energy, 1.0)
            fitted = (values * ratio[:, None] - tiles).square().sum(1)
            best = torch.minimum(best, fitted)
    return float(best.sum(dtype=torch.float64))


def _positive(groups: Tensor, signs: str) -> Tensor:
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


def _nearest(table: Tensor, groups: Tensor) -> Tensor:
    rows = groups.reshape(-1, table.shape[1])
    # |x - t|^2 less |x|^2, which is the same for all entries.
    scores = torch.addmm(table.square().sum(1), rows, table.T, alpha=-2)
    # NumPy's argmin is several times faster than torch's.
    nearest = torch.from_numpy(scores.numpy().argmin(1))
    return table.index_select(0, nearest).reshape(groups.shape)
