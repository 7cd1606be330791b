"""GPTQ with columns ordered by their activations was exported without the group of each column.

A group holds columns that were quantized one after the other, anywhere in the matrix. Without
`g_idx` a reader takes neighboring columns for a group, and decodes with the scales of others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator

from tests.checkpoints.references import IntegerWeight, activations, gptq, gptq_parts
from tests.museum.checkpoint_exhibit import CheckpointExhibit, Stored, Tensors, draw_tensors, joined

GROUP = 32
SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}


def quantized(tensors: Tensors) -> dict[str, IntegerWeight]:
    return {
        name: gptq(x.float(), activations(x.shape[1]), 4, GROUP, by_activation=True)
        for name, x in tensors.items()
    }


def store(weights: dict[str, IntegerWeight]) -> Stored:
    stored = {
        f"{name.removesuffix('.weight')}.{ending}": part
        for name, weight in weights.items()
        for ending, part in gptq_parts(weight).items()
    }
    return stored, {"quantization_config": SETTINGS}


def with_groups(tensors: Tensors) -> Stored:
    return store(quantized(tensors))


def without_groups(tensors: Tensors) -> Stored:
    return store({
        name: replace(weight, groups=torch.arange(len(weight.groups)) // GROUP)
        for name, weight in quantized(tensors).items()
    })  # fmt: skip


def arguments(generator: Generator) -> tuple[Tensors]:
    return (draw_tensors(generator, mlp__up_proj=(96, 128)),)


EXHIBIT = CheckpointExhibit(
    "intel/neural-compressor#1799", "checkpoints",
    "Columns were quantized in another order, and their groups were not exported.",
    "g_idx was not passed to the export of compressed models",
    r"columns belong to other groups than those whose scales they have \(g_idx\)",
    arguments, with_groups, without_groups, joined, {0: "int4"},
)  # fmt: skip
