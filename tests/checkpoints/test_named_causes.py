"""Scales and codes in other places are named with the row or column; scale formats by value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qgate
from qgate.checkpoints.comparison import compare
from qgate.checkpoints.record import CheckpointRecord
from qgate.errors import QgateError
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.faults import UP
from tests.shares import share

Tensors = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALES, PACKED, CODES = "weight_scale", "weight_packed", "weight"


def _before(x: Tensor) -> Tensor:
    return x.roll(1, 0)


def _after_in_rows(x: Tensor) -> Tensor:
    return x.roll(-1, 1)


def _swap_rows(x: Tensor) -> Tensor:
    x[[5, 9]] = x[[9, 5]].clone()
    return x


def _swap_columns(x: Tensor) -> Tensor:
    x[:, [2, 7]] = x[:, [7, 2]].clone()
    return x


def _garbage(*index: int | slice) -> Change:
    def change(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        part = x[index]
        x[index] = torch.randint(-100, 100, part.shape, generator=generator).to(x.dtype)
        return x

    return change


def _move_some(x: Tensor) -> Tensor:
    x[32:64] = _before(x[32:64]).clone()
    return x


def _one_zero_point(x: Tensor) -> Tensor:
    x[3] += 1  # the lowest of eight rows in a word
    return x


@dataclass(frozen=True)
class MovedFault:
    scheme: str
    changes: dict[str, Change]
    words: str


MOVED = {
    "scales of INT4 moved by a row": MovedFault("w4a16", {SCALES: _before}, "every scale belongs to the row before it"),
    "scales of tiles moved by a row": MovedFault("fp8-block", {SCALES: _before}, "every scale belongs to the row before it"),
    "scales of NVFP4 moved in rows": MovedFault("nvfp4", {SCALES: _after_in_rows}, "every scale belongs to the group after it in the same row"),
    "scales moved, zero points not": MovedFault("w4a16-zero-points", {SCALES: _before}, "the row before it, zero points do not"),
    "some scales moved": MovedFault("int8", {SCALES: _move_some}, "most row 38, .*: its own scales stand at row 39"),
    "some scales of groups moved": MovedFault("w4a16-zero-points", {SCALES: _move_some}, "its own scale stands at row 59, columns 32 to 63"),
    "rows of codes swapped": MovedFault("w4a16", {PACKED: _swap_rows}, "2 rows of 128 .*: rows 5 and 9 are swapped"),
    "rows swapped with scales": MovedFault("nvfp4", {PACKED: _swap_rows, SCALES: _swap_rows}, "rows 5 and 9 are swapped"),
    "columns swapped": MovedFault("int8", {CODES: _swap_columns}, "2 columns of 64 .* columns 2 and 7 are swapped"),
    "columns of tiles swapped": MovedFault("fp8-block", {CODES: _swap_columns}, "columns 2 and 7 are swapped"),
    "a garbage row": MovedFault("int8", {CODES: _garbage(17)}, "1 row of 128 .* most row 17, .*: its codes are not those of this place"),
    "a garbage column": MovedFault("int8", {CODES: _garbage(slice(None), 5)}, "1 column of 64 .* most column 5, its codes are not those of this place"),
    "a zero point off by one": MovedFault("w4a16-zero-points", {"weight_zero_point": _one_zero_point}, "^row 24, columns 0 to 31: the zero point is 1 too high"),
}  # fmt: skip


def _changed(
    folders: Path, scheme: str, changes: dict[str, Change], folder: Path
) -> CheckpointRecord:
    tensors = load_file(folders / scheme / "model.safetensors")
    for ending, change in changes.items():
        x = tensors[f"{UP}.{ending}"]
        stored = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        tensors[f"{UP}.{ending}"] = change(stored.clone()).view(x.dtype)
    configuration = json.loads((folders / scheme / "config.json").read_text())
    return compare(str(write(folder / "child", tensors, configuration)), str(folders / "parent"))


@share(4)
@pytest.mark.parametrize("name", MOVED)
def test_what_moved_is_named(name: str, folders: Path, tmp_path: Path) -> None:

    fault = MOVED[name]
    (finding,) = _changed(folders, fault.scheme, fault.changes, tmp_path).findings
    assert finding.subject == f"{UP}.weight"
    assert re.search(fault.words, finding.cause), finding.cause


def _fp4(tiles: Tensor, scales: Tensor) -> Tensor:
    """Return the nearest codes of tiles."""
    ratios = tiles / scales[..., None]
    return (ratios.abs()[..., None] - LEVELS).abs().argmin(-1) + 8 * (ratios < 0)


def _pairs(codes: Tensor, rows: int) -> Tensor:
    codes = codes.reshape(rows, -1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def four_over_six(w: Tensor, whole: float) -> Tensors:
    """Quantize each block with its largest value at 6 and at 4, and take the better one."""
    tiles = w.float().reshape(len(w), -1, 16)
    tried = []
    for largest in (6, 4):
        scales = (tiles.abs().amax(2) / largest / whole).to(torch.float8_e4m3fn).float()
        codes = _fp4(tiles, scales * whole)
        values = LEVELS[codes % 8] * torch.where(codes > 7, -1, 1) * (scales * whole)[..., None]
        tried.append(((values - tiles).square().sum(2), scales, codes))
    is_four = tried[1][0] < tried[0][0]
    scales = torch.where(is_four, tried[1][1], tried[0][1]).to(torch.float8_e4m3fn)
    codes = torch.where(is_four[..., None], tried[1][2], tried[0][2])
    return {PACKED: _pairs(codes, len(w)), SCALES: scales}


def test_four_over_six_is_recognized_by_its_codes(folders: Path, tmp_path: Path) -> None:
    tensors = load_file(folders / "nvfp4" / "model.safetensors")
    configuration = json.loads((folders / "nvfp4" / "config.json").read_text())
    for name, weight in parent_tensors().items():
        if "_proj" in name:
            module = name.removesuffix(".weight")
            whole = 1 / float(tensors[f"{module}.weight_global_scale"])
            parts = four_over_six(weight, whole)
            tensors |= {f"{module}.{ending}": x for ending, x in parts.items()}
    child = str(write(tmp_path / "child", tensors, configuration))
    record = compare(child, str(folders / "parent"))
    assert record.findings == []
    quantized = [weight for weight in record.weights if weight.figures]
    assert {w.method for w in quantized} == {"as 4over6 chooses the largest element of a block"}
    assert all(w.figures and -2 < (w.figures.over_ideal_db or 0) < 0 for w in quantized)
    methods = {w.method for w in compare(child).weights if w.figures}
    assert methods == {"as 4over6 chooses the largest element of a block"}
    usual = compare(str(folders / "nvfp4"), str(folders / "parent")).weights
    assert {weight.method for weight in usual} == {""}
    other = write(tmp_path / "other", parent_tensors(7), {})
    with pytest.raises(QgateError, match="is not the parent"):
        compare(child, str(other))


def test_scales_in_e8m0_are_told_from_e4m3(folders: Path, tmp_path: Path) -> None:
    w = parent_tensors()[f"{UP}.weight"]
    tiles = w.float().reshape(len(w), -1, 16)
    powers = torch.exp2((tiles.abs().amax(2) / 6).log2().ceil())
    codes = _pairs(_fp4(tiles, powers), len(w))
    scales = (powers.log2() + 127).to(torch.uint8)
    changes: dict[str, Change] = {PACKED: lambda _: codes, SCALES: lambda _: scales}
    (finding,) = _changed(folders, "nvfp4", changes, tmp_path).findings
    assert finding.cause.startswith("scales are codes of E8M0, and are read as E4M3")


def test_scales_in_e4m3_are_told_from_e8m0(folders: Path, tmp_path: Path) -> None:
    w = parent_tensors()[f"{UP}.weight"]
    tiles = w.float().reshape(len(w), -1, 32)
    whole = float(tiles.abs().amax()) / 6 / 448
    scales = (tiles.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    codes = _pairs(_fp4(tiles, scales.float() * whole), len(w))
    changes: dict[str, Change] = {
        PACKED: lambda _: codes,
        SCALES: lambda _: scales.view(torch.uint8),
    }
    (finding,) = _changed(folders, "mxfp4", changes, tmp_path).findings
    assert finding.cause.startswith("scales are codes of E4M3, and are read as E8M0")


@pytest.mark.parametrize("is_right", [True, False])
def test_scales_that_are_declared_as_powers_of_two_are(
    is_right: bool, parent: str, tmp_path: Path
) -> None:
    tensors: Tensors = {}
    for name, x in parent_tensors().items():
        if "_proj" not in name:
            tensors[name] = x
            continue
        tiles = x.float().reshape(x.shape[0] // 32, 32, -1, 32)
        scales = tiles.abs().amax((1, 3)) / 448
        scales = torch.exp2(scales.log2().ceil()) if is_right or name != f"{UP}.weight" else scales
        codes = (tiles / scales[:, None, :, None]).reshape(x.shape)
        tensors[name] = codes.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    declared = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
                "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    child = write(tmp_path / "child", tensors, {"quantization_config": declared})
    causes = {f.subject: f.cause for f in compare(str(child), parent).findings}
    if is_right:
        assert causes == {}
    else:
        (subject,) = causes
        assert subject == f"{UP}.weight_scale_inv"
        assert causes[subject].startswith("8 of 8 scales are no powers of two, and config.json")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nvfp4_ue5m3", "^scales are codes of UE5M3, and are read as E4M3: "),
        ("if4", r"^the sign bit of scales chooses a grid \(if4\), and is read as a sign: "),
        ("mixfp4", r"^the sign bit of scales chooses a grid \(mixfp4\), and is read as a sign: "),
        ("nvfp4_4over6", ""),
    ],
)
def test_scales_in_another_format_are_named(
    name: str, words: str, folders: Path, tmp_path: Path
) -> None:
    tensors = load_file(folders / "nvfp4" / "model.safetensors")
    encoded = qgate.encode(parent_tensors()[f"{UP}.weight"].float(), name)
    assert encoded.scales is not None
    assert encoded.tensor_scale is not None
    tensors[f"{UP}.{PACKED}"] = _pairs(encoded.codes, len(encoded.codes))
    tensors[f"{UP}.{SCALES}"] = encoded.scales.view(torch.float8_e4m3fn)
    tensors[f"{UP}.weight_global_scale"] = (1 / encoded.tensor_scale).reshape(1)
    configuration = json.loads((folders / "nvfp4" / "config.json").read_text())
    record = compare(
        str(write(tmp_path / "child", tensors, configuration)), str(folders / "parent")
    )
    causes = [finding.cause for finding in record.findings if finding.subject == f"{UP}.weight"]
    assert len(causes) == bool(words), causes
    assert all(re.search(words, cause) for cause in causes), causes
