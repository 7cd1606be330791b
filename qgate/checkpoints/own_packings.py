"""Decode weights in a layout of one's own: codes that are packed, beside scales and zero points."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.grids import FP4_UNIT, QuantizedWeight, as_rows, decode_e8m0, fp4_values
from qgate.checkpoints.tiles import Tile, counts
from qgate.checkpoints.weight_parts import MisfitError, Parts

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class CodeLayout:
    """Rules by which the codes and scales of a weight are stored.

    format        of one code
    group         rows and columns that share a scale (None: all); None where the scales tell
    packing       "low first" or "high first": several codes in a word; "none": one each
    order         the place in a word of each code, instead of `packing`
    packed_along  the axis of the weight that has several codes in a word
    interleaved   neighbors share a word; else the codes of a word lie a share of the axis apart
    transposed    codes are stored as inputs x outputs
    code_offset   is subtracted from codes: 8 for offset binary of 4 bits
    zero_point_offset   is added to zero points
    """

    format: str
    bits: int
    group: tuple[int | None, int | None] | None = None
    packing: str = "none"
    order: tuple[int, ...] = ()
    packed_along: str = "inputs"
    zero_points_packed_along: str = "none"
    code_offset: int = 0
    zero_point_offset: int = 0
    interleaved: bool = True
    transposed: bool = False
    scales_transposed: bool = False
    scales_divide: bool = False
    whole_scale_divides: bool = False

    @property
    def is_packed(self) -> bool:
        return bool(self.order) or self.packing != "none"

    def is_turned(self, role: str) -> bool:
        """Return True for a tensor that is stored as inputs x outputs."""
        return self.transposed if role == "codes" else self.scales_transposed

    def rows_of(self, shape: tuple[int, ...]) -> int:
        """Return the rows of a weight that can be decoded some rows at a time; else 0."""
        if len(shape) != 2 or (self.is_packed and self.packed_along == "outputs"):
            return 0
        return shape[1] if self.transposed else shape[0]

    def positions(self, word_bits: int) -> tuple[int, ...]:
        """Return the place in a word of each code."""
        if self.order:
            return self.order
        places = tuple(range(word_bits // self.bits))
        return places if self.packing == "low first" else places[::-1]


def decode_own(layout: CodeLayout, parts: Parts) -> QuantizedWeight:
    """Decode the tensors of a weight, or some rows of them."""
    codes = _in_rows(parts["codes"], turned=layout.transposed)
    if layout.is_packed:
        codes = _unpacked(codes, layout, layout.packed_along)
    elements = _elements(codes, layout)
    rows, columns = elements.shape
    stored = _in_rows(parts["scales"], turned=layout.scales_transposed)
    scales, tile = _in_tiles("scales", _scale_values(stored), layout, parts, (rows, columns))
    if layout.scales_divide:
        scales = 1 / scales
    whole = parts.get("whole_scale")
    if whole is not None:
        factor = whole.float().reshape(-1)[0]
        scales = scales / factor if layout.whole_scale_divides else scales * factor
    has_codes = stored.dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
    stored = stored.view(torch.uint8) if stored.dtype == torch.float8_e8m0fnu else stored
    return QuantizedWeight(
        layout.format,
        elements,
        scales,
        tile,
        _zero_points(layout, parts, scales, (rows, columns)),
        scale_codes=stored.reshape(scales.shape) if has_codes else None,
        unit=FP4_UNIT if layout.format == "fp4_e2m1" else 1.0,
    )


def _in_rows(x: Tensor, *, turned: bool) -> Tensor:
    """View a tensor as rows; of several stacked matrices, one below the other."""
    return as_rows(x.transpose(-1, -2).contiguous() if turned and x.dim() > 1 else x)


def _unpacked(words: Tensor, layout: CodeLayout, along: str) -> Tensor:
    """Return the codes of words along the inputs or the outputs of a weight."""
    if words.is_floating_point():
        raise MisfitError(f"its codes are {words.dtype}, and no words that hold codes")
    words = words.T if along == "outputs" else words
    positions = layout.positions(8 * words.dtype.itemsize)
    mask = (1 << layout.bits) - 1
    codes = [(words >> layout.bits * place & mask).to(torch.uint8) for place in positions]
    axis = 2 if layout.interleaved else 1
    unpacked = torch.stack(codes, axis).reshape(len(words), -1)
    return unpacked.T.contiguous() if along == "outputs" else unpacked


def _elements(codes: Tensor, layout: CodeLayout) -> Tensor:
    """Return what codes stand for: integers, or values of a small float."""
    if layout.format in FP8:
        if codes.dtype not in (FP8[layout.format], torch.uint8, torch.int8):
            raise MisfitError(f"its codes are {codes.dtype}, and {layout.format} is declared")
        return codes.view(FP8[layout.format])
    if codes.is_floating_point():
        raise MisfitError(f"its codes are {codes.dtype}, and {layout.format} is declared")
    if layout.format == "fp4_e2m1":
        return fp4_values(codes.to(torch.uint8))
    is_signed = layout.format.startswith("int")
    half = 1 << (layout.bits - 1)
    numbers = codes.to(torch.int16)
    if layout.code_offset:
        numbers = numbers - layout.code_offset
    elif is_signed and (layout.is_packed or codes.dtype == torch.uint8):
        numbers = (numbers ^ half) - half
    low, high = (-half, half - 1) if is_signed else (0, 2 * half - 1)
    if numbers.numel() and not low <= int(numbers.min()) <= int(numbers.max()) <= high:
        least, most = int(numbers.min()), int(numbers.max())
        raise MisfitError(
            f"its codes are {least} to {most}, and {layout.format} has {low} to {high}: correct "
            "packing, code_offset or format in the layout"
        )
    return numbers.to(torch.int8 if is_signed else torch.uint8)


def _scale_values(stored: Tensor) -> Tensor:
    """Return scales as numbers; bytes are exponents of two."""
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return decode_e8m0(stored.view(torch.uint8))
    return stored.float()


def _in_tiles(
    role: str, values: Tensor, layout: CodeLayout, parts: Parts, shape: tuple[int, int]
) -> tuple[Tensor, Tile]:
    """Return numbers of tiles as rows of tiles, and the tile."""
    rows, columns = shape
    if layout.group is None:
        return parts.fit_tile(role, values, shape)
    tile = layout.group[0] or parts.rows or rows, layout.group[1] or columns
    needed = counts(parts.rows or rows, columns, tile)
    whole = tuple(parts.shapes.get(role, values.shape))
    if math.prod(whole) != math.prod(needed):
        raise MisfitError(
            f"its {role} have shape {whole}, and groups of {tile[0]} x {tile[1]} in a weight of "
            f"{parts.rows or rows} x {columns} are {needed[0]} x {needed[1]}"
        )
    return values.reshape(-1, needed[1]), tile


def _zero_points(
    layout: CodeLayout, parts: Parts, scales: Tensor, shape: tuple[int, int]
) -> Tensor | None:
    """Return zero points in units of codes; numbers that are added to values are some, too."""
    added = parts.get("offsets")
    if added is not None:
        values = _in_rows(added.float(), turned=layout.scales_transposed)
        return -_in_tiles("offsets", values, layout, parts, shape)[0] / scales
    zeros = parts.get("zero_points")
    if zeros is None:
        return None
    zeros = _in_rows(zeros, turned=layout.scales_transposed)
    if layout.zero_points_packed_along != "none":
        zeros = _unpacked(zeros, layout, layout.zero_points_packed_along)
        values = zeros.float() + layout.zero_point_offset
        return values.reshape(scales.shape)
    values = zeros.float() + layout.zero_point_offset
    return _in_tiles("zero_points", values, layout, parts, shape)[0]
