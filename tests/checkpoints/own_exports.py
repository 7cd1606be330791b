"""Exports in layouts of one's own, packed by loops over codes, and the files that describe them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.checkpoints.exports import parent_tensors, write

Tensors = dict[str, Tensor]
AWQ_LIKE = (0, 4, 1, 5, 2, 6, 3, 7)


def packed(codes: Tensor, positions: tuple[int, ...], word: Any, axis: int, apart: bool) -> Tensor:
    """Pack codes of 4 bits, one by one: neighbors in a word, or codes a share of the axis apart."""
    rows = np.moveaxis(codes.numpy().astype(np.int64) & 15, axis, 1)
    count = len(positions)
    length = rows.shape[1] // count
    words = np.zeros((len(rows), length), np.uint64)
    for column in range(rows.shape[1]):
        at, number = (column % length, column // length) if apart else divmod(column, count)
        words[:, at] |= rows[:, column].astype(np.uint64) << np.uint64(4 * positions[number])
    unsigned = words.astype(np.dtype(word).str.replace("i", "u"))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(unsigned.view(word), 1, axis)))


def affine(w: Tensor, group: int, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned codes, scales and zero points of groups of columns."""
    tiles = w.float().reshape(len(w), -1, group)
    low, high = tiles.amin(2).clamp(max=0), tiles.amax(2).clamp(min=0)
    scales = (high - low) / (2**bits - 1)
    zeros = (-low / scales).round()
    codes = (tiles / scales[..., None]).round() + zeros[..., None]
    return codes.clamp(0, 2**bits - 1).reshape(w.shape).to(torch.uint8), scales, zeros


def symmetric(w: Tensor, group: int, high: int = 7) -> tuple[Tensor, Tensor]:
    tiles = w.float().reshape(len(w), -1, group)
    scales = tiles.abs().amax(2) / high
    codes = (tiles / scales[..., None]).round().reshape(w.shape)
    return codes.to(torch.int8), scales


@dataclass(frozen=True)
class OwnExport:
    """A layout: the tensors that it makes of a weight, and its entry in a file."""

    tensors: Callable[[Tensor], Tensors]
    entry: str


def _unpacked(w: Tensor) -> Tensors:
    codes, scales, zeros = affine(w, 32)
    return {"W_q": codes, "W_scale": scales.half(), "W_zero": zeros.half()}


def _bytes(w: Tensor) -> Tensors:
    codes, scales = symmetric(w, 16)
    stored = packed(codes + 8, (1, 0), np.uint8, 1, apart=False)
    return {"codes": stored, "inverse": 1 / scales}


def _turned(w: Tensor) -> Tensors:
    codes, scales, zeros = affine(w, 32)
    return {
        "q": packed(codes.T, tuple(range(8)), np.int32, 0, apart=False),
        "s": scales.T,
        "z": packed((zeros - 1).to(torch.int64).T, tuple(range(8)), np.int32, 1, apart=False),
    }


def _ordered(w: Tensor) -> Tensors:
    codes, scales, zeros = affine(w, 64)
    return {
        "q": packed(codes.T, AWQ_LIKE, np.int32, 1, apart=False),
        "s": scales.T,
        "m": (-zeros * scales).T,
    }


def _halves(w: Tensor) -> Tensors:
    codes, scales = symmetric(w, 32)
    return {"q": packed(codes, (0, 1), np.uint8, 1, apart=True), "s": scales.reshape(-1, 1)}


def _fp8_tiles(w: Tensor) -> Tensors:
    rows, columns = w.shape
    tiles = w.float().reshape(rows // 32, 32, columns // 32, 32)
    powers = torch.exp2((tiles.abs().amax((1, 3)) / 448).log2().ceil())
    codes = (tiles / powers[:, None, :, None]).reshape(w.shape).to(torch.float8_e4m3fn)
    exponents = (powers.log2() + 127).to(torch.uint8)
    return {"q": codes.view(torch.uint8), "e": exponents, "note": torch.ones(3)}


def _fp4_whole(w: Tensor) -> Tensors:
    whole = float(w.float().abs().amax()) / (6 * 448)
    tiles = w.float().reshape(len(w), -1, 16)
    scales = (tiles.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    ratios = (tiles / (scales.float() * whole)[..., None]).reshape(w.shape)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (ratios.abs()[..., None] - levels).abs().argmin(2).to(torch.uint8)
    codes += 8 * (ratios < 0).to(torch.uint8)
    return {"q": packed(codes, (0, 1), np.uint8, 1, apart=False), "s": scales,
            "g": torch.tensor([1 / whole])}  # fmt: skip


OWN = {
    "unpacked with zero points": OwnExport(_unpacked, """
codes = "*.W_q"
scales = "*.W_scale"
zero_points = "*.W_zero"
format = "uint4"
group = 32
"""),
    "bytes, the high nibble first, inverse scales": OwnExport(_bytes, """
codes = "*.codes"
scales = "*.inverse"
format = "int4"
packing = "high first"
code_offset = 8
scales_divide = true
group = 16
"""),
    "words along the inputs, transposed": OwnExport(_turned, """
codes = "*.q"
scales = "*.s"
zero_points = "*.z"
format = "uint4"
packing = "low first"
transposed = true
zero_points_packed_along = "outputs"
zero_point_offset = 1
group = 32
"""),
    "words along the outputs in an order, minima": OwnExport(_ordered, """
codes = "*.q"
scales = "*.s"
offsets = "*.m"
format = "uint4"
order = [0, 4, 1, 5, 2, 6, 3, 7]
packed_along = "outputs"
transposed = true
group = 64
"""),
    "halves of a row in a byte": OwnExport(_halves, """
codes = "*.q"
scales = "*.s"
format = "int4"
packing = "low first"
interleaved = false
group = 32
"""),
    "FP8 bytes in tiles with exponents": OwnExport(_fp8_tiles, """
codes = "*.q"
scales = "*.e"
unused = ["*.note"]
format = "fp8_e4m3"
group = [32, 32]
"""),
    "FP4 with a scale of the whole": OwnExport(_fp4_whole, """
codes = "*.q"
scales = "*.s"
whole_scale = "*.g"
whole_scale_divides = true
format = "fp4_e2m1"
packing = "low first"
"""),
}  # fmt: skip


def export(folder: Path, name: str) -> tuple[Path, Path]:
    """Write an export and the file of its layout."""
    tensors: Tensors = {}
    for key, weight in parent_tensors().items():
        if "_proj" not in key:
            tensors[key] = weight
            continue
        module = key.removesuffix(".weight")
        tensors |= {f"{module}.{ending}": x for ending, x in OWN[name].tensors(weight).items()}
    config = {"quantization_config": {"quant_method": "ours"}}
    return write(folder / "child", tensors, config), layout_file(folder, OWN[name].entry)


def layout_file(folder: Path, entry: str) -> Path:
    path = folder / "layout.toml"
    path.write_text(f"[[weights]]{entry}", encoding="utf-8")
    return path
