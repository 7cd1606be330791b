"""A router that was to stay in 16 bits was left out of the exported list of such modules.

The module is of no kind that the scheme quantizes, so its entry was removed with those that match
nothing. The file holds it in 16 bits, and its configuration says that it is quantized.
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

ROUTER = "model.layers.0.mlp.gate"


def store(tensors: Tensors, ignore: list[str]) -> Stored:
    for name in [name for name in tensors if name != f"{ROUTER}.weight"]:
        store_int8(tensors, name)
    return tensors, int8_recipe(ignore)


def declared(tensors: Tensors) -> Stored:
    return store(tensors, [ROUTER])


def left_out(tensors: Tensors) -> Stored:
    return store(tensors, [])


def arguments(generator: Generator) -> tuple[Tensors]:
    shapes = {f"mlp__experts__{number}__up_proj": (32, 64) for number in range(4)}
    return (draw_tensors(generator, mlp__gate=(4, 64), **shapes),)


EXHIBIT = CheckpointExhibit(
    "intel/auto-round#1660", "checkpoints",
    "A router in 16 bits was missing from the exported list of unquantized modules.",
    "loaders miss the 16-bit override",
    "mlp.gate.weight: it is not quantized, and the recipe declares int8 per row",
    arguments, declared, left_out, joined, {0: "int8"},
)  # fmt: skip
