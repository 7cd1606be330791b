"""The rollout ran gate and up projections in BF16 that training ran in FP8.

Every layer excludes its router `mlp.gate` from quantization, dense models too, which have none. The
engine looks for those words anywhere in a name, and `mlp.gate_up_proj` holds them. It is one
finding of a later comment (2026-09-18), mended by #7918.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import linear

import qgate
from tests.museum.exhibit import Exhibit

LAYER, EXCLUDED = "mlp.gate_up_proj", "mlp.gate"


def served(x: Tensor, w: Tensor, *, is_excluded: bool) -> Tensor:
    if is_excluded:
        return linear(x.bfloat16().float(), w.bfloat16().float())
    return linear(qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8"))


def by_whole_names(x: Tensor, w: Tensor) -> Tensor:
    return served(x, w, is_excluded=LAYER == EXCLUDED)


def by_parts_of_names(x: Tensor, w: Tensor) -> Tensor:
    return served(x, w, is_excluded=EXCLUDED in LAYER)


def arguments(generator: Generator) -> tuple[Tensor, Tensor]:
    x, w = (torch.randn(n, 128, generator=generator) for n in (12, 48))
    return x, w / 11


EXHIBIT = Exhibit(
    "verl-project/verl#7519",
    "rollout",
    "A rollout left layers in BF16 because their names contain the name of a router.",
    "56 parameters were FP8 in training and BF16 in the rollout",
    "each of arguments 0, 1 is bf16, not mxfp8_e4m3",
    arguments, by_whole_names, by_parts_of_names, linear, {0: "mxfp8", 1: "mxfp8"},
    options={"relations": ["one"]}, terms=128,
)  # fmt: skip
