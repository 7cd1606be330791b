"""A checkpoint's list of unquantized modules left out experts that it holds in 16 bits.

The layers that predict several tokens are in BF16. The list has their attention and their shared
expert, and not the experts. The engine so made quantized ones, and loading failed; the fix puts them on
the list. Here an expert has one matrix, and other weights are in eight bits.
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

EXPERTS = "mtp.layers.0.mlp.experts"
SHARED = "mtp.layers.0.mlp.shared_expert.down_proj"


def store(tensors: Tensors, ignore: list[str]) -> Stored:
    for name in [name for name in tensors if not name.startswith("mtp.")]:
        store_int8(tensors, name)
    return tensors, int8_recipe(ignore)


def declared(tensors: Tensors) -> Stored:
    return store(tensors, [SHARED, *(f"{EXPERTS}.{number}.down_proj" for number in range(4))])


def left_out(tensors: Tensors) -> Stored:
    return store(tensors, [SHARED])


def arguments(generator: Generator) -> tuple[Tensors]:
    shapes = {f"mlp__experts__{number}__down_proj": (32, 64) for number in range(4)}
    shapes["mlp__shared_expert__down_proj"] = (32, 64)
    quantized, predicting = (draw_tensors(generator, **shapes) for _ in range(2))
    renamed = {name.replace("model.", "mtp."): x for name, x in predicting.items()}
    return (quantized | renamed,)


EXHIBIT = CheckpointExhibit(
    "vllm-project/vllm#41994", "checkpoints",
    "Experts in 16 bits were missing from a checkpoint's list of unquantized modules.",
    "KeyError 'layers.0.mlp.experts.w2_weight': the engine does not start",
    "mtp.layers.0.mlp.experts.0.down_proj.weight: it is not quantized, and the recipe declares int8",
    arguments, declared, left_out, joined, {0: "int8"},
)  # fmt: skip
