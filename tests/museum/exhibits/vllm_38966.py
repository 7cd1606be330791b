"""Zero points of the second GPTQ format were read as those of the first, which are one less.

Both formats store unsigned codes and a zero point. The first stores it less one, and kernels add
one to it. Checkpoints of the second that do not say so get a zero point of 9 where 8 is right:
every weight is one step too small, which adds up over a row.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit


def checkpoint(encoded: qgate.Encoded) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned codes, their zero points, and scales, one for each group of 128."""
    assert encoded.scales is not None
    zeros = torch.full_like(encoded.scales, 8, dtype=torch.int32)
    return encoded.codes.int() + 8, zeros, encoded.scales


def kernel(x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor, is_first: bool) -> Tensor:
    """Multiply with weights of the first format, or of the second."""
    zeros = (zeros + is_first).repeat_interleave(128, 1)
    return linear(x, (codes - zeros) * scales.repeat_interleave(128, 1))


def format_of_the_zeros(x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    return kernel(x, codes, zeros, scales, is_first=bool((zeros == 7).all()))


def format_of_the_config(x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    return kernel(x, codes, zeros, scales, is_first=True)


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(24, 256, generator=generator) / 16
    encoded = qgate.encode(w, "int4", granularity="block", block=128)
    return torch.randn(16, 256, generator=generator), encoded


EXHIBIT = Exhibit(
    "vllm-project/vllm#38966",
    "checkpoints",
    "Zero points of one GPTQ format were read as those of another, which is off by one.",
    "every output token is 0; a model of 64 layers is garbage",
    "argument 1 has every code decoded 1 too low",
    arguments, format_of_the_zeros, format_of_the_config, linear,
    options={"pack": {1: checkpoint}, "relations": ["one"]}, terms=256,
)  # fmt: skip
