"""Checkpoints as targets: the shards, the configuration, and every packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


READERS = (
    "qgate.checkpoints.opening:_configuration",
    "qgate.checkpoints.stored:read",
    "qgate.storage.safetensors_heads:read_head",
)
TARGETS = (
    Target("checkpoint of integers", _integers, _read, READERS),
    Target("checkpoint of GPTQ", _words, _read, READERS),
    Target("checkpoint of NVFP4", _blocks, _read, READERS),
    Target("recipe of a checkpoint", lambda f: (f / "recipe.yaml").write_text(RECIPE), _read_recipe,
           ("qgate.storage.documents:read_document",)),
)  # fmt: skip
