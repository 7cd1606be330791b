"""Every rank of a tensor-parallel layer loaded the first rank's shard of a fused weight.

Two of four loaders asked for their rank, two took it from arguments that nobody passes, and fell
back to 0. Shapes are right on every rank, so both halves of the outputs are the first half.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

INT4 = qgate.Quantizer("int4", granularity="block", block=32)
RANKS = 2


def shard(w: Tensor, **options: int) -> Tensor:
    """Return the rows of one rank, of the first one if none is named."""
    rows = len(w) // RANKS
    first = options.get("tp_rank", 0) * rows
    return INT4(w[first : first + rows])


def gathered(x: Tensor, shards: list[Tensor]) -> Tensor:
    """Gather the outputs of all ranks."""
    return torch.cat([linear(x, w) for w in shards], -1)


def own_shards(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, [shard(w, tp_rank=rank) for rank in range(RANKS)])


def first_shards(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, [shard(w) for _ in range(RANKS)])


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 64, generator=generator), torch.randn(48, 64, generator=generator) / 8


EXHIBIT = Exhibit(
    "vllm-project/vllm-gguf-plugin#103",
    "checkpoints",
    "Every rank of a tensor-parallel layer loaded the shard of the first.",
    "silent numerical corruption with more than one rank; shapes are right",
    "columns 24 to 47 of 48 .*hold what columns 0 to 23 of 48 should",
    arguments, own_shards, first_shards, linear, {1: INT4},
    options={"relations": []}, terms=64,
)  # fmt: skip
