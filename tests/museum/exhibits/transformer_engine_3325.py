"""UE5M3 block scales travel as E4M3: a kernel that goes by the dtype reads them wrong.

torch has no dtype for them, so the tensor of scales is a `float8_e4m3fn` whose bytes are UE5M3, and
each kernel has to be told (`sf_fp8_dtype_override="e5m3"`). A kind of defect, not a report of one:
the pull request says how bytes and dtype part, and the faulty kernel here is one that was not told.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from qgate.formats import Encoded
from tests.museum.exhibit import Exhibit
from tests.museum.fp4 import decode


def pack(w: Encoded) -> tuple[Tensor, Tensor, Tensor]:
    assert w.scales is not None
    assert w.tensor_scale is not None
    return w.codes, w.scales.view(torch.float8_e4m3fn), w.tensor_scale


def from_ue5m3(scales: Tensor) -> Tensor:
    """Return the values of bytes: float16 has their exponents, but for the last one."""
    bits = scales.view(torch.uint8).int()
    halves = (bits << 7).to(torch.int16).view(torch.float16).float()
    return torch.where(bits >= 248, (8 + bits % 8) * 2.0**13, halves)


def product(x: Tensor, codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
    return linear(x, decode(codes) * scales.repeat_interleave(16, 1) * whole)


def told(x: Tensor, codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
    return product(x, codes, from_ue5m3(scales), whole)


def by_dtype(x: Tensor, codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
    return product(x, codes, scales.float(), whole)


def arguments(generator: Generator) -> tuple[Tensor, Encoded]:
    w = torch.randn(48, 128, generator=generator) / 8
    w *= 2.0 ** torch.randint(-8, 1, (48, 1), generator=generator)
    return torch.randn(32, 128, generator=generator), qgate.encode(w, "nvfp4_ue5m3")


EXHIBIT = Exhibit(
    "NVIDIA/TransformerEngine#3325", "scales",
    "UE5M3 block scales were held as E4M3 tensors: a reader that goes by the dtype is wrong.",
    "torch has no dtype for them, and each call names it",
    "argument 1 has block scales stored as UE5M3 and read as E4M3",
    arguments, told, by_dtype, linear,
    options={"pack": {1: pack}, "relations": []}, terms=128,
)  # fmt: skip
