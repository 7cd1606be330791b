"""FP8 tiles: read as they are declared, and found out where nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.record import CheckpointRecord
from tests.checkpoints.exports import write

UP = "model.layers.0.mlp.up_proj.weight"
SHAPES = (
    (64, 128), (128, 64), (100, 300), (128, 896), (896, 128), (192, 300), (300, 192), (448, 960),
    (960, 960), (960, 448),
)  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def block_recipe(structure: object) -> dict[str, Any]:
    weights = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block",
        "block_structure": structure,
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def in_tiles(weight: Tensor, tile: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """Quantize tile after tile; those at the ends are smaller."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    height, width = tile
    scales = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            window = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = weight[window].abs().max() / 448
            values[window] = (weight[window] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def compared(
    folder: Path, weight: Tensor, child: dict[str, Tensor], recipe: dict[str, Any] | None
) -> CheckpointRecord:
    write(folder / "parent", {UP: weight.bfloat16()}, {})
    settings = {} if recipe is None else {"quantization_config": recipe}
    write(folder / "child", {f"{UP}{ending}": x for ending, x in child.items()}, settings)
    return compare(str(folder / "child"), str(folder / "parent"))


def drawn(shape: tuple[int, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Tiles of other rows and columns have other scales.
    sizes = torch.exp(0.02 * torch.arange(shape[0]))[:, None] % 3 + 1
    weight = torch.randn(shape, generator=generator) * sizes * 0.02
    return weight.bfloat16().float()


@pytest.mark.parametrize(
    ("shape", "recipe"),
    [
        *((shape, FP8) for shape in SHAPES),
        *((shape, None) for shape in SHAPES[::2]),
        *((shape, block_recipe("128x128")) for shape in SHAPES[1::3]),
    ],
)
def test_right_tiles_are_as_declared(
    shape: tuple[int, int], recipe: dict[str, Any] | None, tmp_path: Path
) -> None:
    weight = drawn(shape)
    values, scales = in_tiles(weight)
    ending = "_scale_inv" if recipe is FP8 else "_scale"
    record = compared(tmp_path, weight, {"": values, ending: scales}, recipe)
    assert record.findings == []
    (judged,) = record.weights
    assert judged.figures is not None
    assert judged.figures.over_ideal_db == 0
    small = shape[0] <= 128 and shape[1] <= 128
    expected = "per tensor" if recipe is None and small else "in tiles of 128 x 128"
    assert judged.format == f"fp8_e4m3 {expected}"


@pytest.mark.parametrize("tile", [(96, 160), (120, 120), (64, 64), (32, 128), (320, 320)], ids=str)
def test_tiles_that_nothing_declares_are_those_of_least_error(
    tile: tuple[int, int], tmp_path: Path
) -> None:
    weight = drawn((960, 960))
    values, scales = in_tiles(weight, tile)
    record = compared(tmp_path, weight, {"": values, "_scale": scales}, None)
    assert record.findings == []
    (judged,) = record.weights
    assert judged.format == f"fp8_e4m3 in tiles of {tile[0]} x {tile[1]}"
    assert judged.figures is not None
    assert judged.figures.over_ideal_db == 0


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        ((64, 64), "its 5 x 3 scales do not fit tiles of 128 x 128 as the recipe declares: "
         "a weight of 300 x 192 has 3 x 2 of them"),
        ((300, 192), "it is fp8_e4m3 per tensor, and the recipe declares fp8_e4m3 in tiles of"),
        ((1, 192), "it is fp8_e4m3 per row, and the recipe declares fp8_e4m3 in tiles of"),
    ],
)  # fmt: skip
def test_scales_of_other_tiles_than_declared_are_one_finding(
    tile: tuple[int, int], words: str, tmp_path: Path
) -> None:
    weight = drawn((300, 192))
    values, scales = in_tiles(weight, tile)
    record = compared(tmp_path, weight, {"": values, "_scale_inv": scales}, FP8)
    (finding,) = record.findings
    assert words in finding.cause


def test_transposed_scales_are_named(tmp_path: Path) -> None:
    weight = drawn((300, 192))
    values, scales = in_tiles(weight)
    record = compared(tmp_path, weight, {"": values, "_scale_inv": scales.T.contiguous()}, FP8)
    (finding,) = record.findings
    assert "do not fit tiles of 128 x 128 as the recipe declares, and are transposed" in (
        finding.cause
    )


def test_scales_of_other_tiles_that_happen_to_fit_are_found(tmp_path: Path) -> None:
    weight = drawn((960, 960))
    values, scales = in_tiles(weight, (120, 120))
    (finding,) = compared(tmp_path, weight, {"": values, "_scale_inv": scales}, FP8).findings
    assert finding.over_ideal_db is not None
    assert finding.over_ideal_db > 3


def test_stacked_matrices_that_are_no_whole_tiles_are_refused(tmp_path: Path) -> None:
    weight = drawn((384, 128))
    values, scales = in_tiles(weight, (128, 128))
    child = {"": values.reshape(2, 192, 128), "_scale_inv": scales.reshape(3, 1)}
    record = compared(tmp_path, weight.reshape(2, 192, 128), child, FP8)
    assert "matrices of 192 x 128 that are stacked" in record.findings[0].cause
