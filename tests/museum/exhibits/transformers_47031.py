"""Fused weights of experts were taken for transposed ones, or not, by their shapes alone.

A checkpoint may hold (experts, inputs, outputs) or (experts, outputs, inputs). Where both lengths
are equal the shapes say nothing, and the older order was loaded as the newer one: every expert was
transposed, with finite outputs. The reporter knows no public checkpoint of equal lengths yet.
"""

from __future__ import annotations

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

EXPERTS = "model.layers.0.mlp.experts.down_proj.weight"


def transposed_always(tensors: Tensors) -> Stored:
    """Convert (experts, inputs, outputs), as the older layout is stored."""
    return convert(tensors, must_transpose=True)


def transposed_by_shape(tensors: Tensors) -> Stored:
    inputs, outputs = tensors[EXPERTS].shape[1:]
    return convert(tensors, must_transpose=inputs != outputs)


def convert(tensors: Tensors, must_transpose: bool) -> Stored:
    older = tensors[EXPERTS].transpose(1, 2)
    tensors[EXPERTS] = (older.transpose(1, 2) if must_transpose else older).contiguous()
    for name in list(tensors):
        store_int8(tensors, name)
    return tensors, int8_recipe([])


def arguments(generator: Generator) -> tuple[Tensors]:
    shapes = {"mlp__experts__down_proj": (4, 48, 48), "self_attn__q_proj": (48, 48)}
    return (draw_tensors(generator, **shapes),)


EXHIBIT = CheckpointExhibit(
    "huggingface/transformers#47031", "checkpoints",
    "Square expert weights were loaded transposed; their shapes cannot show it.",
    "no warning, finite outputs, garbage model",
    "experts.down_proj.weight: every square part is transposed",
    arguments, transposed_always, transposed_by_shape, joined, {0: "int8"},
)  # fmt: skip
