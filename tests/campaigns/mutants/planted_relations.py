"""Defects that show only where the same is computed in another way: batches, lengths, repeats."""

from __future__ import annotations

import torch
from torch import Tensor

import qgate
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Sow, of_relations

UP = "model.layers.2.mlp.up_proj"
OUTPUT = r"model\.layers\.2\.mlp\.up_proj:output"


def _with_the_mean_of_rows(y: Tensor) -> Tensor:
    """Mix a thousandth of the other rows of the batch into each."""
    return torch.lerp(y, y.mean(0, keepdim=True), 1e-3)


def _with_noise(y: Tensor) -> Tensor:
    return y + 1e-3 * torch.randn_like(y)


def _with_one_scale(y: Tensor) -> Tensor:
    """Cast to INT8 with a scale of all rows."""
    return qgate.quantize(y, "int8", granularity="tensor")


def _otherwise_at_whole_tiles(y: Tensor) -> Tensor:
    """Lose a thousandth where the number of tokens is a multiple of 64."""
    return y * (1 - 1e-3 * (y.shape[-2] % 64 == 0))


def _after(change: object) -> Sow:
    def sow(bed: Bed) -> None:
        bed.after(UP, change)  # type: ignore[arg-type]

    return sow


MUTANTS = (
    of_relations("relations_rows_mixed", _after(_with_the_mean_of_rows), OUTPUT, "breaks 'alone'"),
    of_relations("relations_noise_drawn", _after(_with_noise), OUTPUT, "it draws random numbers"),
    of_relations("relations_scale_of_all_rows", _after(_with_one_scale), OUTPUT, "breaks 'alone'"),
    of_relations("relations_other_tile", _after(_otherwise_at_whole_tiles), OUTPUT, "breaks "),
)  # fmt: skip
