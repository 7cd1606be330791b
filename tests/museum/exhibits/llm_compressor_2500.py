"""Scales that AWQ moves into a norm were divided out of a weight to which the norm adds one.

Norms of Gemma multiply by 1 + weight. Dividing the weight gives 1 + weight / s where
(1 + weight) / s is meant, so that nothing undoes the factors of the columns after it.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.checkpoints.references import activations, awq_parts, awq_scales, nearest
from tests.museum.checkpoint_exhibit import CheckpointExhibit, Stored, Tensors, draw_tensors

NORM = "model.layers.0.post_attention_layernorm.weight"
CONFIGURATION = {
    "model_type": "gemma3",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
}


def store(tensors: Tensors, is_offset_kept: bool) -> Stored:
    linear = {name: x.float() for name, x in tensors.items() if name != NORM}
    scales = awq_scales(list(linear.values()), activations(64), group=32, points=8)
    norm = tensors[NORM].float()
    stored = {NORM: ((1 + norm) / scales - 1 if is_offset_kept else norm / scales).bfloat16()}
    for name, weight in linear.items():
        for ending, part in awq_parts(nearest(weight * scales, 4, 32)).items():
            stored[f"{name.removesuffix('.weight')}.{ending}"] = part
    return stored, CONFIGURATION


def offset_divided(tensors: Tensors) -> Stored:
    return store(tensors, is_offset_kept=True)


def weight_divided(tensors: Tensors) -> Stored:
    return store(tensors, is_offset_kept=False)


def multiplied(tensors: Tensors) -> Tensor:
    """Return what both weights multiply the normalized tokens by."""
    norm = 1 + tensors[NORM]
    return torch.cat([norm * x for name, x in tensors.items() if name != NORM])


def arguments(generator: Generator) -> tuple[Tensors]:
    tensors = draw_tensors(generator, mlp__gate_proj=(48, 64), mlp__up_proj=(48, 64))
    return (tensors | {NORM: (torch.randn(64, generator=generator) * 0.3).bfloat16()},)


EXHIBIT = CheckpointExhibit(
    "vllm-project/llm-compressor#2500", "checkpoints",
    "Norms that add one to their weight were divided without the one.",
    "breaks AWQ, SmoothQuant, SpinQuant and QuIP on Gemma and Qwen3Next",
    "columns are multiplied by .*, which nothing undoes",
    arguments, offset_divided, weight_divided, multiplied, {0: "int4"},
)  # fmt: skip
