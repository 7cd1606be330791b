"""Checkpoints of the small llama, quantized and flattened by torchao."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchao.quantization as quantization
from safetensors.torch import save_file
from torch import Tensor, nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization.granularity import PerGroup
from transformers import TorchAoConfig

from tests.checkpoints.exports import parent_tensors


def _by_config(config: Any) -> Callable[[Tensor], Any]:
    def quantize(weight: Tensor) -> Any:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        quantization.quantize_(linear, config)
        return linear.weight.data

    return quantize


def _mx(dtype: torch.dtype, swizzled: bool) -> Callable[[Tensor], Any]:
    return lambda weight: MXTensor.to_mx(weight, dtype, 32, is_swizzled_scales=swizzled)


def _nvfp4(weight: Tensor) -> Any:
    scale = per_tensor_amax_to_scale(weight.abs().amax())
    return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale)


GROUPED = {"granularity": PerGroup(32)}
CONFIGS: dict[str, Any] = {
    "int8": quantization.Int8WeightOnlyConfig(),
    "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig(),
    "int4": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, **GROUPED),
    "int2": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int2, **GROUPED),
    "int4-asymmetric": quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, mapping_type=quantization.MappingType.ASYMMETRIC, **GROUPED
    ),
    "int8-dynamic-int4": quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
    "fp8": quantization.Float8WeightOnlyConfig(),
    "nvfp4": NVFP4WeightOnlyConfig(),
}  # fmt: skip
_MX_CONFIG = MXDynamicActivationMXWeightConfig
SCHEMES: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    **{name: (_by_config(config), config) for name, config in CONFIGS.items()},
    "nvfp4-rows": (_nvfp4, CONFIGS["nvfp4"]),
    "mxfp8": (_mx(torch.float8_e4m3fn, False), _MX_CONFIG()),
    "mxfp8-swizzled": (_mx(torch.float8_e4m3fn, True), _MX_CONFIG()),
    "mxfp4": (_mx(torch.float4_e2m1fn_x2, False), _MX_CONFIG(
        activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2)),
    "mxfp4-swizzled": (_mx(torch.float4_e2m1fn_x2, True), _MX_CONFIG(
        activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2)),
}  # fmt: skip


def flattened(scheme: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata as torchao stores them; the last layer stays as it is."""
    quantize = SCHEMES[scheme][0]
    state = {
        name: quantize(x) if "_proj" in name else x for name, x in parent_tensors().items()
    }  # fmt: skip
    tensors, metadata = flatten_tensor_state_dict(state)
    return dict(tensors), dict(metadata)


def configuration(scheme: str) -> dict[str, Any]:
    config: dict[str, Any] = TorchAoConfig(SCHEMES[scheme][1]).to_dict()
    return {"quantization_config": config}


def write(
    folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str], settings: dict[str, Any]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: x.contiguous() for name, x in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def export(folder: Path, scheme: str) -> Path:
    return write(folder, *flattened(scheme), configuration(scheme))
