"""The two halves of a fused NVFP4 weight were calibrated apart, with global scales of their own.

Engines fuse gate and up into one matrix with one global scale: loading took the larger divisor for
both, and scaled the other half down. Right exporters observe the halves together.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.checkpoint_exhibit import CheckpointExhibit, Stored, Tensors, draw_tensors, joined
from tests.museum.fp4 import to_codes

DECLARED = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
}  # fmt: skip
SETTINGS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": DECLARED}},
    "ignore": [],
}


def store(tensors: Tensors, divisors: dict[str, Tensor]) -> Stored:
    stored = {}
    for name, weight in tensors.items():
        groups = weight.float().reshape(len(weight), -1, 16)
        scales = (groups.abs().amax(2) / 6 * divisors[name]).to(torch.float8_e4m3fn)
        codes = to_codes((groups * divisors[name] / scales.float()[..., None]).flatten(1))
        stored[f"{name}_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
        stored[f"{name}_scale"] = scales
        stored[f"{name}_global_scale"] = divisors[name].reshape(1).clone()
    return stored, {"quantization_config": SETTINGS}


def together(tensors: Tensors) -> Stored:
    largest = max(float(x.abs().max()) for x in tensors.values())
    return store(tensors, dict.fromkeys(tensors, torch.tensor(448 * 6 / largest)))


def apart(tensors: Tensors) -> Stored:
    return store(tensors, {name: 448 * 6 / x.float().abs().max() for name, x in tensors.items()})


def arguments(generator: Generator) -> tuple[Tensors]:
    tensors = draw_tensors(generator, mlp__gate_proj=(48, 64), mlp__up_proj=(48, 64))
    return ({name: x * (2 if "up" in name else 1) for name, x in tensors.items()},)


EXHIBIT = CheckpointExhibit(
    "vllm-project/vllm#47515", "checkpoints",
    "The halves of a fused weight had global scales of their own.",
    "33 of 36 layers of a checkpoint, up to 2.14 times apart",
    "engines fuse gate_proj and up_proj, whose scales of the whole tensor differ",
    arguments, together, apart, joined, {0: "nvfp4"},
)  # fmt: skip
