"""A matrix product that was to be the same in every batch took float32 numbers as TF32.

Triton's `tl.dot` rounds to TF32 unless told otherwise, torch does not. The angles of RoPE are such a
product, and TF32 has no odd positions above 2,048.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit


def phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions[:, None] @ frequencies[None, :]


def tf32(x: Tensor) -> Tensor:
    """Round to 10 bits after the first."""
    bits = x.contiguous().view(torch.int32)
    return (bits + 0x1000 & ~0x1FFF).view(torch.float32)


def ieee(positions: Tensor, frequencies: Tensor) -> Tensor:
    return phases(positions, frequencies)


def by_default(positions: Tensor, frequencies: Tensor) -> Tensor:
    return phases(tf32(positions), tf32(frequencies))


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    positions = torch.randint(0, 8192, (48,), generator=generator).float()
    return positions, 500_000.0 ** -(torch.arange(64) / 64)


EXHIBIT = Exhibit(
    "thinking-machines-lab/batch_invariant_ops#23",
    "accumulation",
    "A float32 product was computed in TF32.",
    "4,096 of 8,192 positions wrong, from position 2,049 on",
    "each of arguments 0, 1 is rounded to tf32",
    arguments, ieee, by_default, phases, options={"relations": ["one"]}, terms=1,
)  # fmt: skip
