"""Checkpoints as targets: the shards, the configuration, and every packing."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import torch
from safetensors.torch import save_file
from torch import Tensor

from qgate.storage.described_classes import DescribedTensor
from tests.campaigns.fuzzing.target import Target
from tests.checkpoints.shipped_exports import child_shipment, parent_shipment

ROWS, COLUMNS = 16, 32


def _read(folder: Path) -> None:
    from qgate.checkpoints.comparison import compare
    from qgate.checkpoints.texts import result_lines

    list(result_lines(compare(str(folder))))


def _shipped(folder: Path) -> None:
    parent_shipment().write(folder / "parent")
    child_shipment().write(folder / "child")


def _read_beside_parent(folder: Path) -> None:
    from qgate.checkpoints.comparison import compare
    from qgate.checkpoints.texts import result_lines

    list(result_lines(compare(str(folder / "child"), str(folder / "parent"))))


def _write(folder: Path, parts: dict[str, Tensor], recipe: dict[str, Any]) -> None:
    tensors = {f"layers.0.up.{ending}": part for ending, part in parts.items()}
    save_file(tensors | {"norm.weight": torch.ones(8)}, folder / "model.safetensors")
    configuration = {"quantization_config": recipe}
    (folder / "config.json").write_text(json.dumps(configuration), encoding="utf-8")


def _integers(folder: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    parts = {
        "weight": torch.arange(ROWS * COLUMNS)
        .remainder(200)
        .sub(100)
        .to(torch.int8)
        .reshape(ROWS, -1),
        "weight_scale": torch.full((ROWS, 1), 0.01),
    }
    recipe = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:lm.*"]}
    _write(folder, parts, recipe)


def _words(folder: Path) -> None:
    parts = {
        "qweight": torch.randint(-(2**31), 2**31, (COLUMNS // 8, ROWS), dtype=torch.int32),
        "qzeros": torch.randint(-(2**31), 2**31, (2, ROWS // 8), dtype=torch.int32),
        "scales": torch.rand(2, ROWS).half(),
        "g_idx": torch.arange(COLUMNS, dtype=torch.int32) // 16,
    }
    _write(folder, parts, {"quant_method": "gptq", "bits": 4, "group_size": 16})


def _blocks(folder: Path) -> None:
    parts = {
        "weight": torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8),
        "weight_scale": torch.rand(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01),
    }
    _write(folder, parts, {"quant_method": "modelopt", "quant_algo": "NVFP4"})


RECIPE = """targets:
  Linear: {format: int4, block: 128, zero_points: true}
  re:.*experts.*: nvfp4
  model.layers.*.down_proj: {format: fp8_e4m3, block: [128, 128]}
ignore: [lm_head, 're:.*visual.*']
"""


def _read_recipe(folder: Path) -> None:
    from qgate.checkpoints.recipe_files import read_recipe_file

    recipe = read_recipe_file(str(folder / "recipe.yaml"))
    recipe.format_of("model.layers.0.mlp.down_proj")
    recipe.idle_patterns(["lm_head", "model.layers.0.mlp.up_proj"])


def _gguf(folder: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_file_type(15)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    numbers = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    kinds = ("Q4_0", "Q5_1", "Q8_0", "TQ1_0", "MXFP4", "BF16")
    for number, name in enumerate(kinds):
        kind = gguf.GGMLQuantizationType[name]
        data = gguf.quantize(numbers, kind)
        writer.add_tensor(f"blk.0.{number}.weight", data, raw_dtype=kind)
    for number, name in enumerate(("Q4_K", "Q6_K", "IQ2_XS", "IQ4_XS", "IQ1_M")):
        kind = gguf.GGMLQuantizationType[name]
        size = gguf.GGML_QUANT_SIZES[kind][1]
        data = np.random.default_rng(number).integers(0, 128, (4, size), np.uint8)
        writer.add_tensor(f"blk.1.{number}.weight", data, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "config.json").write_text("{}")


def _nested(folder: Path) -> None:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(
        torch.randn(ROWS, COLUMNS), compress_statistics=True, quant_type="nf4"
    )
    parts = {f"weight.{ending}": x for ending, x in state.as_dict(packed=True).items()}
    recipe = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    _write(folder, {"weight": codes, **parts}, recipe)


def _subclasses(folder: Path) -> None:
    scales = {"block_size": [1, 16], "target_dtype": {"_type": "torch.dtype", "_data": "int4"}}
    swizzled = {"block_size": 16, "is_swizzled_scales": True}
    metadata = {
        "tensor_names": json.dumps(["a.weight", "b.weight"]),
        "a.weight": json.dumps(
            {
                "_type": "IntxUnpackedToInt8Tensor",
                "_data": scales,
                "_tensor_data_names": ["qdata", "scale", "zero_point"],
            }
        ),
        "b.weight": json.dumps(
            {"_type": "NVFP4Tensor", "_data": swizzled, "_tensor_data_names": ["qdata", "scale"]}
        ),
    }
    tensors = {
        "a._weight_qdata": torch.randint(-8, 8, (ROWS, COLUMNS), dtype=torch.int8),
        "a._weight_scale": torch.rand(ROWS, 2).bfloat16(),
        "a._weight_zero_point": torch.ones(ROWS, 2, dtype=torch.int8),
        "b._weight_qdata": torch.randint(0, 256, (ROWS, 16), dtype=torch.uint8),
        "b._weight_scale": torch.rand(32, 16).to(torch.float8_e4m3fn),
    }
    save_file(tensors, folder / "model.safetensors", metadata)
    config = {"_type": "IntxWeightOnlyConfig", "_data": {"granularity": {"_type": "PerRow"}}}
    settings = {"quant_method": "torchao", "quant_type": {"default": config}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


def _saved(folder: Path) -> None:
    """Write a weight of torchao's as torch.save does, without the library."""
    described = type("Int8Tensor", (DescribedTensor,), {"__module__": "torchao"})
    weight = torch.Tensor._make_wrapper_subclass(described, (ROWS, COLUMNS))
    vars(weight).update(
        qdata=torch.ones(ROWS, COLUMNS, dtype=torch.int8),
        scale=torch.rand(ROWS, 1),
        block_size=[1, COLUMNS],
    )
    module = types.ModuleType(described.__module__)
    module.Int8Tensor = described
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        torch.save({"up.weight": weight, "norm.weight": torch.ones(8)}, folder / "model.pt")


def _state(scale: Tensor) -> dict[str, Tensor]:
    codes = torch.arange(ROWS * COLUMNS).remainder(200).sub(100).to(torch.int8).reshape(ROWS, -1)
    return {"up.weight": codes, "up.weight_scale": scale, "norm.weight": torch.ones(8)}


def _graph() -> onnx.ModelProto:
    """Return a graph with codes of three kinds: a chain, one node, and packed blocks."""
    random = np.random.default_rng(0)
    parts = {
        "up_q": random.integers(-99, 99, (ROWS, COLUMNS), np.int8),
        "up_s": random.random((1, COLUMNS), np.float32),
        "down.weight_quantized": random.integers(0, 255, (COLUMNS, ROWS), np.uint8),
        "down.weight_scale": random.random(ROWS, np.float32),
        "down.weight_zero_point": random.integers(0, 255, ROWS, np.uint8),
        "out.weight_Q4": random.integers(0, 255, (8, 1, 8), np.uint8),
        "out.weight_scales": random.random(8, np.float32),
        "norm.weight": np.ones(8, np.float32),
    }
    node = onnx.helper.make_node
    nodes = [
        node("Cast", ["up_q"], ["up_f"], to=1),
        node("Mul", ["up_f", "up_s"], ["up"]),
        node("MatMul", ["x", "up"], ["a"], "/up/MatMul"),
        node("DequantizeLinear", [f"down.weight{part}" for part in ("_quantized", "_scale", "_zero_point")],
             ["down"], axis=1),
        node("MatMul", ["a", "down"], ["b"]),
        node("MatMulNBits", ["b", "out.weight_Q4", "out.weight_scales"], ["c"], domain="com.microsoft",
             K=16, N=8, bits=4, block_size=16),
        node("Mul", ["c", "norm.weight"], ["y"]),
    ]  # fmt: skip
    tensors = [onnx.numpy_helper.from_array(x, name) for name, x in parts.items()]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [], tensors))


def _onnx(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(_graph().SerializeToString())


def _external(folder: Path) -> None:
    onnx.save(
        _graph(), folder / "model.onnx", save_as_external_data=True, location="model.onnx.data",
        size_threshold=16,
    )  # fmt: skip


READERS = (
    "qgate.checkpoints.opening:_configuration",
    "qgate.checkpoints.stored:read_span",
    "qgate.storage.safetensors_heads:read_head",
)
TARGETS = (
    Target("checkpoint of integers", _integers, _read, READERS),
    Target("checkpoint of GPTQ", _words, _read, READERS),
    Target("checkpoint of NVFP4", _blocks, _read, READERS),
    Target(
        "checkpoint of GGUF",
        _gguf,
        _read,
        (*READERS[:2], "qgate.checkpoints.gguf.files:extent"),
        share=40,
    ),
    Target(
        "checkpoint of bitsandbytes",
        _nested,
        _read,
        (*READERS, "qgate.checkpoints.bnb_weights:_state"),
    ),
    Target(
        "checkpoint of torchao",
        _subclasses,
        _read,
        (*READERS, "qgate.checkpoints.torchao_weights:torchao_entries"),
    ),
    Target(
        "checkpoint .pt",
        _saved,
        _read,
        ("qgate.storage.archives:load_torch",),
        share=30,
    ),
    Target(
        "files shipped with a checkpoint",
        _shipped,
        _read_beside_parent,
        tuple(f"qgate.checkpoints.shipped.files:{reader}" for reader in ("broken", "document")),
        files="child/*.json",
        share=20,
    ),
    Target(
        "recipe of a checkpoint",
        lambda f: (f / "recipe.yaml").write_text(RECIPE),
        _read_recipe,
        ("qgate.storage.documents:read_document",),
    ),
    Target(
        "checkpoint .onnx", _onnx, _read, ("qgate.checkpoints.onnx.models:read_graph",), share=30
    ),
    Target(
        "checkpoint .onnx, external",
        _external,
        _read,
        ("qgate.checkpoints.onnx.files:_bytes",),
        share=20,
    ),
)
