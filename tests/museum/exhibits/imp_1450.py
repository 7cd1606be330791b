"""A converter from FP8 copied a weight that it would not quantize, and dropped its scales.

It paired each E4M3 weight with its scales before it asked whether the weight is to be quantized.
The draft head is not: its codes went into the file, its scales did not. The right way widens it.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.checkpoint_exhibit import (
    CheckpointExhibit,
    Stored,
    Tensors,
    draw_tensors,
    int8_recipe,
    joined,
    store_int8,
)

HEAD = "model.layers.0.mtp.fc"


def in_tiles(w: Tensor) -> Tensor:
    return w.float().reshape(len(w) // 32, 32, -1, 32)


def as_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    scales = in_tiles(w).abs().amax((1, 3), keepdim=True) / 448
    return (in_tiles(w) / scales).to(torch.float8_e4m3fn), scales


def widened(tensors: Tensors) -> Stored:
    for name in [name for name in tensors if HEAD not in name]:
        store_int8(tensors, name)
    return tensors, int8_recipe([HEAD])


def without_scales(tensors: Tensors) -> Stored:
    weight = tensors[f"{HEAD}.weight"]
    return widened({**tensors, f"{HEAD}.weight": as_fp8(weight)[0].reshape(weight.shape)})


def arguments(generator: Generator) -> tuple[Tensors]:
    tensors = draw_tensors(
        generator, mlp__up_proj=(64, 64), mlp__gate_proj=(64, 64), mtp__fc=(64, 64)
    )
    codes, scales = as_fp8(tensors[f"{HEAD}.weight"])
    source = (codes.float() * scales).reshape(64, 64).bfloat16()
    return ({**tensors, f"{HEAD}.weight": source},)


EXHIBIT = CheckpointExhibit(
    "kekzl/imp#1450", "checkpoints",
    "An FP8 weight that should have stayed as it is was copied without its scales.",
    "455 MiB of raw E4M3 codes in the file, and no message",
    "mtp.fc.weight: its weight_scale is missing",
    arguments, widened, without_scales, joined, {0: "int8"},
)  # fmt: skip
