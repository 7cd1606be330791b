"""A later upload of a model held MLP weights of nothing but zeros, in the quantized file as well.

The first release was intact. Several layers' matrices were entirely zero in the 16-bit file and in
what was made from it; loading works, and the model repeats tokens. The release is ternary; here
codes have eight bits.
"""

from __future__ import annotations

import torch
from torch import Generator

from tests.museum.checkpoint_exhibit import (
    CheckpointExhibit,
    Stored,
    Tensors,
    draw_tensors,
    int8_recipe,
    joined,
    store_int8,
)


def first_release(tensors: Tensors) -> Stored:
    for name in list(tensors):
        store_int8(tensors, name)
    return tensors, int8_recipe([])


def later_upload(tensors: Tensors) -> Stored:
    for name in tensors:
        if ".mlp." in name:
            tensors[name] = torch.zeros_like(tensors[name])
    return first_release(tensors)


def arguments(generator: Generator) -> tuple[Tensors]:
    shapes = {f"self_attn__{part}_proj": (32, 32) for part in "qkvo"}
    return (draw_tensors(generator, **shapes, mlp__up_proj=(64, 32), mlp__gate_proj=(64, 32)),)


EXHIBIT = CheckpointExhibit(
    "microsoft/BitNet#608", "checkpoints",
    "A later upload held MLP weights that were entirely zero.",
    "three released files hold them; the quantized one repeats garbage tokens",
    "_proj.weight: all values are zero",
    arguments, first_release, later_upload, joined, {0: "int8"},
)  # fmt: skip
