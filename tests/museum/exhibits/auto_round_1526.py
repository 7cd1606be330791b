"""Layers that predict further tokens were missing from a quantized checkpoint.

The model's class has no modules for them, so loading leaves their tensors out, and saving cannot
write them: the quantized output lacks what the original checkpoint has.
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


def copied(tensors: Tensors) -> Stored:
    for name in [name for name in tensors if "mtp" not in name]:
        store_int8(tensors, name)
    return tensors, int8_recipe(["re:.*mtp.*"] if any("mtp" in name for name in tensors) else [])


def of_modules_alone(tensors: Tensors) -> Stored:
    return copied({name: x for name, x in tensors.items() if "mtp" not in name})


def arguments(generator: Generator) -> tuple[Tensors]:
    shapes = {"mlp__up_proj": (64, 32), "mlp__gate_proj": (64, 32), "mtp__fc": (32, 32)}
    return (draw_tensors(generator, **shapes),)


EXHIBIT = CheckpointExhibit(
    "intel/auto-round#1526", "checkpoints",
    "Tensors without a module in the model's class were silently left out of the export.",
    "multi-token prediction layers missing from the quantized output",
    "mtp.fc.weight: it is in the parent alone",
    arguments, copied, of_modules_alone, joined, {0: "int8"},
)  # fmt: skip
