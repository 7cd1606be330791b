"""Casts of exporters that are wrong in one thing: a checkpoint names them as check_kernel does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints.cast_causes import describe_cast
from qgate.checkpoints.comparison import compare
from qgate.checkpoints.grids import QuantizedWeight
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.faults import UP
from tests.shares import share

PARENT = torch.randn(40, 96, generator=torch.Generator().manual_seed(8)) * torch.linspace(
    0.02, 0.3, 40
).reshape(-1, 1)
Amounts = Callable[[Tensor], Tensor]
"""The number of each group that its scale is made from, of groups as rows."""


def largest(groups: Tensor) -> Tensor:
    return groups.abs().amax(-1)


def stored(
    amounts: Amounts = largest,
    element: str = "int8",
    group: int = 96,
    change: Callable[[Tensor], Tensor] = torch.round,
    decoded: Amounts | None = None,
    dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Quantize the parent; `decoded` makes the amounts of other scales than those of the codes."""
    most = {"int8": 127.0, "int8 of both ends": 127.5, "int4": 7.0, "fp8_e4m3": 448.0}[element]
    groups = PARENT.reshape(len(PARENT), -1, group)
    scales = (amounts(groups) / most).to(dtype).float()
    ratios = groups / scales[..., None]
    if element == "fp8_e4m3":
        codes = ratios.clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        codes = change(ratios).clamp(-most // 1, most // 1).to(torch.int8)
    stored_scales = scales if decoded is None else decoded(groups) / most
    name = element.partition(" ")[0]
    return QuantizedWeight(name, codes.reshape(PARENT.shape), stored_scales, (1, group))


def mx(change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
    """Quantize to MXFP8 with exponents that are changed."""
    blocks = PARENT.reshape(len(PARENT), -1, 32)
    exponents = change(blocks.abs().amax(-1).log2().floor() - 8)
    codes = (blocks / exponents.exp2()[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored_exponents = (exponents + 127).to(torch.uint8)
    return QuantizedWeight(
        "fp8_e4m3", codes.reshape(PARENT.shape), exponents.exp2(), (1, 32),
        scale_codes=stored_exponents,
    )  # fmt: skip


def second(groups: Tensor) -> Tensor:
    return groups.abs().topk(2, -1).values[..., 1]


def of_row_before(groups: Tensor) -> Tensor:
    return largest(groups).roll(1, 0)


def of_each_second_group(groups: Tensor) -> Tensor:
    amounts = largest(groups)
    return amounts[:, torch.arange(amounts.shape[1]) // 2 * 2]


SECOND = "made from the second largest magnitude, not from the largest magnitude"
WRONG: dict[str, tuple[QuantizedWeight, str]] = {
    "second largest": (stored(second), f"it has scales {SECOND}"),
    "second largest of both ends": (stored(second, "int8 of both ends"), f"it has scales {SECOND}"),
    "second largest of fp8": (stored(second, "fp8_e4m3"), f"it has scales {SECOND}"),
    "second largest of groups": (stored(second, "int4", 32), f"it has scales {SECOND}"),
    "scales in bfloat16": (stored(second, "int4", 32, dtype=torch.bfloat16), f"it has scales {SECOND}"),
    "row before": (stored(of_row_before), "it is quantized with the scale of the previous group"),
    "each second group": (
        stored(largest, "int4", 32, decoded=of_each_second_group),
        "it is decoded with the scale of the first of each 2 groups of a row",
    ),
    "sign of the last of eight": (
        stored(change=lambda r: torch.where(torch.arange(96) % 8 == 7, r.round().abs(), r.round())),
        "it has lost the sign of the last of each 8 codes",
    ),
    "small codes": (
        stored(change=lambda r: r.round() * (r.round().abs() > 2)), "it has codes up to 2 flushed to zero",
    ),
    "exponents of the row before": (
        mx(lambda e: e.roll(1, 0)), "it is quantized with the scale of the previous row",
    ),
    "exponents no smaller than -4": (
        mx(lambda e: e.clamp_min(-4)), "it has scales no smaller than 2^-4",
    ),
}  # fmt: skip
RIGHT = {
    "int8": stored(),
    "int8 of both ends": stored(element="int8 of both ends"),
    "int4 in groups": stored(element="int4", group=32),
    "int4 with scales in bfloat16": stored(element="int4", group=32, dtype=torch.bfloat16),
    "fp8": stored(element="fp8_e4m3"),
    "mx": mx(lambda e: e),
}


@share(4)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cast_is_named(name: str) -> None:
    weight, words = WRONG[name]
    assert describe_cast(weight, PARENT) == words


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_cast_and_other_values_have_no_name(name: str) -> None:
    assert describe_cast(RIGHT[name], PARENT) == ""
    assert describe_cast(RIGHT[name], PARENT.roll(1, 1)) == ""


def test_a_wrong_weight_of_a_checkpoint_is_named(
    folders: Path, parent: str, tmp_path: Path
) -> None:
    tensors = load_file(folders / "fp8" / "model.safetensors")
    configuration = json.loads((folders / "fp8" / "config.json").read_text())
    w = parent_tensors()[f"{UP}.weight"].float()
    scales = w.abs().topk(2, -1).values[:, 1:] / 448
    tensors[f"{UP}.weight"] = (w / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors[f"{UP}.weight_scale"] = scales.to(tensors[f"{UP}.weight_scale"].dtype)
    (finding,) = compare(str(write(tmp_path / "child", tensors, configuration)), parent).findings
    assert finding.subject == f"{UP}.weight"
    assert finding.cause.startswith(f"it has scales {SECOND}: "), finding.cause


@share(5)
@pytest.mark.parametrize("scheme", ["int8", "w4a16", "w8a16", "fp8", "mxfp4"])
def test_right_exports_have_no_wrong_cast(scheme: str, folders: Path, parent: str) -> None:
    assert compare(str(folders / scheme), parent).findings == []
