"""Ranks of a tensor-parallel layer quantized their shards with scales of their own.

Weights that are quantized at loading have one scale per tensor, from its largest magnitude. Each rank
saw its own shard only, so the same checkpoint was served with other codes than on one GPU. The
right way takes the largest magnitude of all ranks.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

FP8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")
RANKS = 2


def packed(shard: Tensor, amax: Tensor) -> Tensor:
    scale = amax / 448
    return (shard / scale).to(torch.float8_e4m3fn).float() * scale


def row_parallel(x: Tensor, shards: list[Tensor]) -> Tensor:
    """Add up what each rank makes of its share of the inputs."""
    return sum(linear(*shard_pair) for shard_pair in zip(x.chunk(RANKS, 1), shards, strict=True))  # type: ignore[return-value]


def shared_magnitude(x: Tensor, w: Tensor) -> Tensor:
    shards = w.chunk(RANKS, 1)
    amax = torch.stack([shard.abs().max() for shard in shards]).max()
    return row_parallel(x, [packed(shard, amax) for shard in shards])


def own_magnitudes(x: Tensor, w: Tensor) -> Tensor:
    return row_parallel(x, [packed(shard, shard.abs().max()) for shard in w.chunk(RANKS, 1)])


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 64, generator=generator), torch.randn(32, 64, generator=generator) / 8


EXHIBIT = Exhibit(
    "vllm-project/vllm#49764",
    "scales",
    "Each rank quantized its shard with its own scale instead of one for all ranks.",
    "other codes than without shards, from the same checkpoint",
    "argument 1 is quantized in 2 parts of axis -1, each with a scale of its own",
    arguments, shared_magnitude, own_magnitudes, linear, {1: FP8},
    options={"relations": []}, terms=64,
)  # fmt: skip
