"""Checkpoints of a small network, exported by the libraries themselves."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS, WIDTH, INNER, VOCABULARY = 2, 64, 128, 96
PROJECTIONS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}


def parent_tensors(
    seed: int = 0, shapes: Mapping[str, tuple[int, int]] = PROJECTIONS, width: int = WIDTH
) -> dict[str, Tensor]:
    """Return the tensors of a small llama, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).bfloat16()

    tensors = {"model.embed_tokens.weight": draw(VOCABULARY, width)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + draw(width)
    tensors["model.norm.weight"] = 1 + draw(width)
    tensors["lm_head.weight"] = draw(VOCABULARY, width)
    return tensors


def with_stored(stored: Callable[[Tensor], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the small llama with what is stored of each projection, by ending."""
    tensors: dict[str, Tensor] = {}
    for name, x in parent_tensors().items():
        if "_proj" not in name:
            tensors[name] = x
            continue
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{ending}": part for ending, part in stored(x).items()}
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], configuration: dict[str, Any]) -> Path:
    """Write a checkpoint as one file with its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Scheme:
    """A scheme of compressed-tensors: its compressor and the arguments of weights."""

    compressor: str
    arguments: dict[str, Any] = field(default_factory=dict)


def _scheme(compressor: str, kind: str, bits: int, strategy: str, **more: Any) -> Scheme:
    arguments = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, **more}
    return Scheme(compressor, arguments)


SCHEMES = {
    "int8": _scheme("int-quantized", "int", 8, "channel"),
    "int8-tensor": _scheme("int-quantized", "int", 8, "tensor"),
    "w4a16": _scheme("pack-quantized", "int", 4, "group", group_size=32),
    "w4a16-zero-points": _scheme(
        "pack-quantized", "int", 4, "group", group_size=32, symmetric=False
    ),
    "w8a16": _scheme("pack-quantized", "int", 8, "channel"),
    "fp8": _scheme("float-quantized", "float", 8, "channel"),
    "fp8-tensor": _scheme("float-quantized", "float", 8, "tensor"),
    "fp8-block": _scheme("float-quantized", "float", 8, "block", block_structure=[32, 32]),
    "mxfp4": _scheme("mxfp4-pack-quantized", "float", 4, "group", group_size=32, scale_dtype=torch.uint8),
    "nvfp4": _scheme(
        "nvfp4-pack-quantized", "float", 4, "tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    ),
}  # fmt: skip


def library(module: str) -> Any:
    """Import a part of compressed-tensors, which takes seconds."""
    return importlib.import_module(f"compressed_tensors.{module}")


def compress(
    scheme: Scheme, weight: Tensor, whole: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return what the library stores of a weight, and the values that it reads from that.

    whole   the scale of the whole tensor, where fused weights share one
    """
    quantization, utils = library("quantization"), library("quantization.utils")
    arguments = quantization.QuantizationArgs(**scheme.arguments)
    declared = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    w = weight.float()
    state: dict[str, Tensor] = {"weight": w}
    if arguments.strategy == "tensor_group":
        state["weight_global_scale"] = (
            utils.generate_gparam(*w.aminmax()) if whole is None else whole
        )
    low, high = _extremes(w, scheme.arguments)
    state["weight_scale"], zeros = utils.calculate_qparams(
        low, high, arguments, global_scale=state.get("weight_global_scale")
    )
    if not arguments.symmetric:
        state["weight_zero_point"] = zeros
    compressor = library("compressors").BaseCompressor.get_value_from_registry(scheme.compressor)
    stored = compressor.compress(dict(state), declared)
    stored = {name: x for name, x in stored.items() if x is not None}
    values = compressor.decompress(dict(stored), declared)["weight"]
    return stored, values.float()


def _extremes(w: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    strategy, rows = arguments["strategy"], len(w)
    if strategy == "tensor":
        blocks = w.reshape(1, -1)
    elif strategy == "channel":
        blocks = w[:, None]
    elif strategy == "block":
        height, width = arguments["block_structure"]
        blocks = w.reshape(rows // height, height, -1, width).transpose(1, 2).flatten(2)
    else:
        blocks = w.reshape(rows, -1, arguments["group_size"])
    return blocks.amin(-1), blocks.amax(-1)


def export(folder: Path, name: str, seed: int = 0) -> Path:
    """Export the network with one scheme of compressed-tensors; the last layer stays as it is."""
    scheme, tensors = SCHEMES[name], parent_tensors(seed)
    utils = (
        library("quantization.utils") if scheme.arguments["strategy"] == "tensor_group" else None
    )
    stored: dict[str, Tensor] = {}
    for key, x in tensors.items():
        module = key.removesuffix(".weight")
        if "_proj" not in key:
            stored[key] = x
            continue
        whole = None
        if utils is not None:
            fused = [tensors[other] for other in fused_with(key)]
            whole = utils.generate_gparam(*torch.cat(fused).float().aminmax())
        parts, _ = compress(scheme, x, whole)
        stored |= {f"{module}.{ending}": part for ending, part in parts.items()}
    return write(folder, stored, configuration(scheme))


def fused_with(key: str) -> list[str]:
    """Return the weights that engines fuse with a weight, itself among them."""
    for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for part in parts:
            if part in key:
                return [key.replace(part, other) for other in parts]
    return [key]


def configuration(scheme: Scheme) -> dict[str, Any]:
    arguments = {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
                 for k, v in scheme.arguments.items()}  # fmt: skip
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": scheme.compressor,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
            "ignore": ["lm_head"],
        }
    }
