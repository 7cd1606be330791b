"""Defects that show only where the same is computed in another way: batches, lengths, repeats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import qgate
from qgate.models import kv_cache
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


def _without_residual(bed: Bed) -> None:
    """Lose the residual of one layer where it has a cache."""
    block = bed.module("model.layers.2")
    plain = block.forward

    def forward(hidden: Tensor, cache: Any = None) -> Tensor:
        y: Tensor = plain(hidden, cache)
        return y if cache is None else y - hidden

    block.forward = forward


def _newest_key_unseen(bed: Bed) -> None:
    """Let a token that is decoded not see itself."""

    def wrapped(mask: Any) -> Any:
        def causal_mask(count: int, length: int, device: torch.device) -> Tensor:
            visible: Tensor = mask(count, length, device)
            if count == 1 < length:
                visible[:, -1] = False
            return visible

        return causal_mask

    bed.wrap(kv_cache, "causal_mask", wrapped)


def _positions_wrap(bed: Bed) -> None:
    """Let positions of one layer begin anew after 1,024 tokens, where it has a cache."""
    attention = bed.module("model.layers.2.self_attn")
    rope = attention.rope
    attention.rope = lambda x, start: rope(x, start % 1024)


MUTANTS = (
    of_relations("relations_rows_mixed", _after(_with_the_mean_of_rows), OUTPUT, "breaks 'alone'"),
    of_relations("relations_noise_drawn", _after(_with_noise), OUTPUT, "it draws random numbers"),
    of_relations("relations_scale_of_all_rows", _after(_with_one_scale), OUTPUT, "breaks 'alone'"),
    of_relations("relations_other_tile", _after(_otherwise_at_whole_tiles), OUTPUT, "breaks "),
    of_relations("relations_residual_dropped_in_decoding", _without_residual,
                 r"model\.layers\.2:output", "breaks 'decoded'"),
    of_relations("relations_residual_dropped_in_decoding_of_a_cache_mode", _without_residual,
                 r"model\.layers\.2:output", "breaks 'decoded'", "kv-int8"),
    of_relations("relations_newest_key_unseen_in_decoding", _newest_key_unseen,
                 r"model\.layers\.0\.self_attn\.o_proj:input", "behind a prefill of 1"),
    of_relations("relations_positions_wrap_in_decoding", _positions_wrap,
                 r"model\.layers\.2\.self_attn\.o_proj:input", "behind a prefill of 1023"),
)  # fmt: skip
