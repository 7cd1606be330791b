"""Errors of single rows and groups beside those of an ideal quantizer.

The mean of a weight hides one output channel of a thousand. A group is a tile that is less than a
row, or a tile of several rows. An ideal error may happen to be small, if all values are near codes:
half of the usual one is what a row or a group is measured by at least. The usual error of a row is
that of its energy, the usual one of a group that of its ideal scale.

Measured over seeds and distributions of weights, beside what is broken (in dB over ideal):

    right exporters   rows up to 10.6, groups up to 11.3 (the nearest scales of MXFP4, amax / 8 of
                      INT4, powers of two of FP8; half of the values zero, or single large ones);
                      GPTQ: rows up to 8.3 (12.7 in one export), groups up to 33; clips of
                      AWQ: rows 13.8, groups 13.6
    scales doubled    groups of INT4 and MXFP4: 99 of 100 from 11 on, 15 to 20 at the median; of
                      NVFP4 from 14.6 on, of FP8 from 26 on, of INT8 from 27 (per tensor 20)
    foreign codes     rows of INT4 and MXFP4: 99 of 100 from 13.6 on, 20 to 22 at the median, as
                      groups; of FP8 from 30 on
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qgate.checkpoints.chunk_memory import Workspace

ROW_DB, GROUP_DB = 12.0, 12.0
"""Error of a row, and of a group, over the ideal one that right exporters stay under."""
CHANGED_DB = 16.0
"""The same where AWQ may have clipped groups, or GPTQ has passed errors on."""
Place = tuple[int, int]
TILES = 1 << 16
"""Tiles that are looked at at once, of several chunks."""
USUAL = 0.5
"""Share of the usual error that counts as the ideal one at least."""


@dataclass
class GroupSums:
    """The worst group of a weight, and how many are over the limit, with their errors."""

    over: int = 0
    own: float = 0.0
    least: float = 0.0
    worst: tuple[int, int, float] | None = None
    _most: float = field(default=-1.0, init=False)
    _waiting: list[tuple[Tensor, Tensor, Tensor, Place, Place]] = field(default_factory=list)

    def add(self, own: Tensor, least: Tensor, scales: Tensor, start: Place, tile: Place) -> None:
        """Add the errors of tiles of a chunk, and those of an ideal quantizer.

        start   the row and the column of the weight at which the chunk begins
        """
        if self._waiting and scales.shape != self._waiting[0][2].shape:
            self.finish()
        self._waiting.append((own, least, scales, start, tile))
        if len(self._waiting) * scales.numel() >= TILES:
            self.finish()

    def finish(self) -> None:
        """Look at the chunks that were added, each with a usual error of its own."""
        if not self._waiting:
            return
        sums = zip(*((own, least, scales) for own, least, scales, *_ in self._waiting), strict=True)
        own, least, scales = (_stacked(chunks) for chunks in sums)
        units = scales.square()
        usual = (least / units).mean(1, keepdim=True)
        floor = units.mul_(USUAL * usual)
        # Tiles without a value have the scale 1.
        if (scales.numpy() == 1).any():
            floor[(scales == 1) & (least < usual / 100)] = 0.0
        torch.maximum(floor, 1e-3 * least.mean(1, keepdim=True) + 1e-30, out=floor)
        torch.maximum(floor, least, out=floor)
        ratios = torch.div(own, floor, out=floor)
        for number, most in enumerate(ratios.amax(1).tolist()):
            if most > 10 ** (GROUP_DB / 10):
                is_over = ratios[number] > 10 ** (GROUP_DB / 10)
                self.over += int(is_over.sum())
                self.own += float(own[number][is_over].sum(dtype=torch.float64))
                self.least += float(least[number][is_over].sum(dtype=torch.float64))
            if most > self._most:
                self._most = most
                _, _, of_chunk, start, tile = self._waiting[number]
                down, across = divmod(int(ratios[number].argmax()), of_chunk.shape[1])
                tile_place = start[0] + down * tile[0], start[1] + across * tile[1]
                self.worst = *tile_place, round(10 * math.log10(max(most, 1e-9)), 4) + 0.0
        self._waiting = []


def _stacked(chunks: tuple[Tensor, ...]) -> Tensor:
    """Return chunks as rows, a single one without a copy."""
    rows = [x.reshape(1, -1) for x in chunks]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def tile_sums(work: Workspace, errors: Tensor) -> Tensor:
    """Return the sums of squares of each row of each tile; the errors are lost."""
    down, height, across, width = errors.shape
    rows, columns = work.shape
    flat = errors.view(down * height, across * width)
    if flat.shape != (rows, columns):
        flat[rows:] = 0
        flat[:, columns:] = 0
    flat.square_()
    return torch.mv(flat.view(-1, width), torch.ones(width)).view(down, height, across)
