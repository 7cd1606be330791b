"""Children that were quantized and stored as floats again are held to the ideal of their recipe."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.checkpoints.comparison import CheckpointPair, compare, open_pair
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.own_exports import affine, symmetric
from tests.shares import share

UP = "model.layers.1.mlp.up_proj.weight"


def _symmetric(group: int | None, high: int) -> Callable[[Tensor], Tensor]:
    def values(w: Tensor) -> Tensor:
        codes, scales = symmetric(w, group or w.shape[1], high)
        return codes * scales.repeat_interleave(group or w.shape[1], 1)

    return values


def _affine(w: Tensor) -> Tensor:
    codes, scales, zeros = affine(w, 32)
    return (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)


def _fp8(w: Tensor) -> Tensor:
    scale = w.float().abs().amax(1, keepdim=True) / 448
    return (w.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _int8_tensor(w: Tensor) -> Tensor:
    scale = w.float().abs().amax() / 127
    return (w.float() / scale).round() * scale


def _nvfp4(w: Tensor) -> Tensor:
    whole = w.float().abs().amax() / (6 * 448)
    tiles = w.float().reshape(len(w), -1, 16)
    scales = (tiles.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    levels = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ratios = tiles / scales[..., None]
    nearest = levels[(ratios[..., None] - levels).abs().argmin(-1)]
    return (nearest * scales[..., None]).reshape(w.shape)


RIGHT: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "int4 per 32": ("{format: int4, block: 32}", _symmetric(32, 7)),
    "uint4 per 32 with zero points": ("{format: uint4, block: 32}", _affine),
    "int8 per row": ("{format: int8, granularity: channel}", _symmetric(None, 127)),
    "int8 per tensor": ("int8", _int8_tensor),
    "fp8_e4m3 per row": ("{format: fp8_e4m3, granularity: channel}", _fp8),
    "fp4_e2m1 per 16": ("nvfp4", _nvfp4),
}


def _pair(
    folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, plant: Any = None
) -> tuple[str, str]:
    form, quantize = RIGHT[name]
    tensors = {
        key: quantize(x).to(dtype) if "_proj" in key else x for key, x in parent_tensors().items()
    }
    if plant is not None:
        tensors[UP] = plant(tensors[UP].clone())
    recipe = folder / "R.yaml"
    recipe.write_text(f"targets:\n  Linear: {form}\nignore: [lm_head]\n", encoding="utf-8")
    return str(write(folder / "child", tensors, {})), str(recipe)


@share(4)
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_right_values_are_as_declared(
    name: str, dtype: torch.dtype, parent: str, tmp_path: Path
) -> None:
    record = compare(
        *_pair(tmp_path, name, dtype)[:1], parent, recipe_file=str(tmp_path / "R.yaml")
    )
    assert record.findings == []
    weights = [w for w in record.weights if w.packing == "dequantized values"]
    assert [w.format for w in weights] == [name] * 14
    assert all(w.figures and abs(w.figures.over_ideal_db or 0) < 1 for w in weights)


def _double_a_row(x: Tensor) -> Tensor:
    x[41] *= 2
    return x


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda _: parent_tensors()[UP], "lie on no grid, first that of row 0 from column 0 on"),
        (lambda x: x * 2, "all scales are 2 times too high"),
        (lambda x: x.roll(1, 0), "rows stand in another order"),
        (lambda x: _symmetric(32, 1)(parent_tensors()[UP]).to(x.dtype), "1[0-9] of 16 codes never occur"),
        (_double_a_row, "1 row of 128 .* most row 41"),
    ],
)  # fmt: skip
def test_a_fault_of_values_is_named(
    plant: Callable[[Tensor], Tensor], words: str, parent: str, tmp_path: Path
) -> None:
    child, recipe = _pair(tmp_path, "int4 per 32", plant=plant)
    findings = compare(child, parent, recipe_file=recipe).findings
    assert [finding.subject for finding in findings] == [UP]

    assert re.search(words, findings[0].cause), findings


def test_the_parent_itself_is_not_quantized(parent: str, tmp_path: Path) -> None:
    _, recipe = _pair(tmp_path, "int4 per 32")
    causes = {f.cause for f in compare(parent, parent, recipe_file=recipe).findings}
    assert causes == {"it is not quantized, and the recipe declares int4 per 32"}


def test_another_process_reads_the_same_values(parent: str, tmp_path: Path) -> None:
    child, recipe = _pair(tmp_path, "int4 per 32")
    pair = open_pair(child, parent, recipe)
    copied: CheckpointPair = pickle.loads(pickle.dumps(pair))
    weight = next(weight for weight in copied.weights if weight.packing)
    assert copied.judge(weight) == pair.judge(weight)
