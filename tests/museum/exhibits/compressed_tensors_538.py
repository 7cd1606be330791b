"""MXFP4 scales were stored with a bias of 125, where every reader takes 127.

The compressor subtracted the exponent of FP4's largest number from the scale that codes were made
with, so that each stored byte was too small by two. Readers of the format's standard encoding get
scales, and thereby weights, that are four times too small.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum import fp4
from tests.museum.exhibit import Exhibit


def pack(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    """Return the codes, and the scales as exponents of two."""
    assert encoded.scales is not None
    return encoded.codes, encoded.scales.int() - 127


def served(x: Tensor, codes: Tensor, stored: Tensor) -> Tensor:
    """Multiply as kernels do that read E8M0 with its bias of 127."""
    scales = torch.exp2(stored.float() - 127).repeat_interleave(32, 1)
    return linear(x, fp4.decode(codes) * scales)


def bias_of_127(x: Tensor, codes: Tensor, exponents: Tensor) -> Tensor:
    return served(x, codes, (exponents + 127).to(torch.uint8))


def bias_of_125(x: Tensor, codes: Tensor, exponents: Tensor) -> Tensor:
    return served(x, codes, (exponents + 127 - 2).to(torch.uint8))


def arguments(generator: Generator) -> tuple[Tensor, qgate.Encoded]:
    w = torch.randn(24, 128, generator=generator) / 11
    return torch.randn(16, 128, generator=generator), qgate.encode(w, "mxfp4")


EXHIBIT = Exhibit(
    "vllm-project/compressed-tensors#538",
    "checkpoints",
    "MXFP4 scales were stored with a bias of 125 and read with 127.",
    "a workaround in the serving engine; old checkpoints had to be made again",
    "4 times too low|0.25 times the expected one: a scale off by a power of two",
    arguments, bias_of_127, bias_of_125, linear,
    options={"pack": {1: pack}, "relations": ["one"]}, terms=128,
)  # fmt: skip
