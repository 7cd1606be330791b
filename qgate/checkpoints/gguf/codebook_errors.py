"""The error that a code book of the I types allows, estimated on a sample of tiles.

Code books hold few of the combinations that their levels have, so that the nearest entry is worse
than the nearest levels, by how much depends on the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.formats.vector_books import CodeBook, code_book, nearest_rows, positive

SAMPLE = 128
"""Tiles of a chunk that are searched: each for the best of several scales."""
SHARES = (0.7, 0.8, 0.87, 0.94, 1.0, 1.08)
"""Scales to try, over that of the largest magnitude and the largest level."""


def book_error(book: CodeBook, tiles: Tensor) -> float:
    """Return the least squared error of sampled rows x elements, each with its best scale."""
    table = code_book(book.name).float()
    largest = tiles.abs().amax(1) / book.reach
    best = torch.full((len(tiles),), torch.inf)
    for share in SHARES:
        scales = torch.where(largest > 0, largest * share, 1.0)
        for shift in {book.shift, -book.shift}:
            groups = (tiles / scales[:, None] - shift).reshape(len(tiles), -1, table.shape[1])
            sizes = positive(groups, book.signs)
            entries = nearest_rows(table, sizes)
            elements = torch.where(groups * sizes < 0, -entries, entries) + shift
            # The scale that is best for these elements.
            values = elements.flatten(1) * scales[:, None]
            energy = values.square().sum(1)
            ratio = torch.where(energy > 0, (values * tiles).sum(1) / energy, 1.0)
            fitted = (values * ratio[:, None] - tiles).square().sum(1)
            best = torch.minimum(best, fitted)
    return float(best.sum(dtype=torch.float64))
