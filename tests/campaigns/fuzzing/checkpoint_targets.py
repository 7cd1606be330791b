"""Checkpoints as targets: the shards, the configuration, and every packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.campaigns.fuzzing.target import Target

ROWS, COLUMNS = 16, 32


def _read(folder: Path) -> None:
    from qgate.checkpoints.comparison import compare
    from qgate.checkpoints.texts import result_lines

    list(result_lines(compare(str(folder))))


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


def _state(scale: Tensor) -> dict[str, Tensor]:
    codes = torch.arange(ROWS * COLUMNS).remainder(200).sub(100).to(torch.int8).reshape(ROWS, -1)
    return {"up.weight": codes, "up.weight_scale": scale, "norm.weight": torch.ones(8)}


def _arrays(folder: Path) -> None:
    state = _state(torch.full((ROWS, 1), 0.01))
    np.savez_compressed(folder / "model.npz", **{name: x.numpy() for name, x in state.items()})


def _shards(folder: Path) -> None:
    state = _state(torch.full((ROWS, 1), 0.01))
    for number, name in enumerate(state, 1):
        torch.save(
            {"model": {name: state[name]}}, folder / f"pytorch_model-{number:05}-of-00003.bin"
        )


def _torch(folder: Path) -> None:
    torch.save({"state_dict": _state(torch.rand(ROWS, 1).half()), "step": 3}, folder / "model.pt")


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
    "qgate.checkpoints.stored:read",
    "qgate.storage.safetensors_heads:read_head",
)
TARGETS = (
    Target("checkpoint of integers", _integers, _read, READERS),
    Target("checkpoint of GPTQ", _words, _read, READERS),
    Target("checkpoint of NVFP4", _blocks, _read, READERS),
    Target(
        "checkpoint .onnx", _onnx, _read, ("qgate.checkpoints.onnx_models:read_graph",), share=30
    ),
    Target(
        "checkpoint .onnx, external",
        _external,
        _read,
        ("qgate.checkpoints.onnx_files:_read",),
        share=20,
    ),
    Target(
        "checkpoint .npz",
        _arrays,
        _read,
        (
            "qgate.checkpoints.array_files:_entries",
            "qgate.checkpoints.array_files:_read",
            "qgate.storage.folders:open_whole",
        ),
    ),
    Target("checkpoint .pt", _torch, _read, ("qgate.checkpoints.torch_files:_tensors",)),
    Target("checkpoint .bin, sharded", _shards, _read, ("qgate.archives:load_torch",)),
)
