"""Decode quantized weights of ONNX models: codes, scales and zero points become one form."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.onnx.patterns import Stored, StoredBits, StoredCodes
from qgate.checkpoints.onnx.tensors import unit_of, unpacked_codes
from qgate.errors import QgateError


def decode_stored(
    stored: Stored,
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    shape: tuple[int, ...],
    turned: bool,
) -> QuantizedWeight:
    """Decode the codes of a weight, or of some rows, with their scales and zero points.

    shape    of all scales of the weight
    turned   the codes are inputs x outputs, and are returned as outputs x inputs
    """
    if scale is None:
        raise QgateError(
            f"it is stored as {stored.codes.type.name}, and no scale of it is known: "
            f"{stored.packing.removeprefix('ONNX ')} cannot be read"
        )
    if isinstance(stored, StoredBits):
        return _decode_bits(stored, codes, scale.float(), zero)
    kind = stored.codes.type
    elements = codes.transpose(-1, -2) if turned and codes.dim() > 1 else codes
    scales = _shaped(stored, scale.float(), codes, turned)
    zeros = None if zero is None else _shaped(stored, zero.float(), codes, turned)
    _, columns, tile, (_, across) = grid_of(stored, stored.codes.shape, shape, turned)
    # A view would keep the columns that were read while others are.
    elements = elements.reshape(-1, columns).contiguous()
    tiles = -(-len(elements) // max(1, tile[0])), across

    def placed(x: Tensor) -> Tensor:
        if x.numel() == 1:
            return x.reshape(1, 1).expand(tiles)
        x = x.reshape(-1)
        return x.repeat(math.prod(tiles) // x.numel()).reshape(tiles)

    return QuantizedWeight(
        kind.element,
        elements,
        placed(scales).contiguous(),
        tile,
        None if zeros is None else placed(zeros).contiguous(),
        unit=unit_of(kind),
    )


Grid = tuple[int, int, tuple[int, int], tuple[int, int]]


def grid_of(
    stored: StoredCodes, shape: tuple[int, ...], scale: tuple[int, ...], turned: bool
) -> Grid:
    """Return rows, columns, the tile, and the number of tiles of a weight as it is returned."""
    axis = _axis(stored, shape, scale)
    last = len(shape) - 1
    if turned and last > 0:
        swapped = {last: last - 1, last - 1: last}
        axis = None if axis is None else swapped.get(axis, axis)
        shape = (*shape[:-2], shape[-1], shape[-2])
    if axis is None:
        rows, columns = math.prod(shape[:1]), math.prod(shape[1:])
        return rows, columns, (rows, columns), (1, 1)
    if stored.block:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        if axis == last:
            return rows, columns, (1, stored.block), (rows, -(-columns // stored.block))
        if axis == last - 1 and (last == 1 or shape[axis] % stored.block == 0):
            tiles = -(-rows // stored.block)
            return rows, columns, (stored.block, 1), (tiles, columns)
        raise ValueError(f"blocks of axis {axis} of {len(shape)}")
    if axis == last and last > 0:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return rows, columns, (rows, 1), (1, columns)
    rows, columns = math.prod(shape[: axis + 1]), math.prod(shape[axis + 1 :])
    return rows, columns, (1, columns), (rows, 1)


def _axis(stored: StoredCodes, shape: tuple[int, ...], scale: tuple[int, ...]) -> int | None:
    """Return the axis along which scales differ; a prefix of axes is one axis, its last."""
    count = math.prod(scale)
    if stored.block:
        axis = _inside(stored.axis, shape)
        blocks = -(-shape[axis] // stored.block)
        expected = (*shape[:axis], blocks, *shape[axis + 1 :])
        if tuple(scale) != expected:
            raise QgateError(
                f"scales of shape {tuple(scale)} do not fit blocks of {stored.block} along axis "
                f"{axis} of {shape}, which need {expected}"
            )
        return axis
    if count == 1:
        return None
    if stored.axis is None:
        return _broadcast_axis(shape, scale)
    axis = _inside(stored.axis, shape)
    if shape[axis] != count:
        raise QgateError(
            f"{count:,} scales stand on axis {axis}, which has {shape[axis]:,} of shape {shape}"
        )
    return axis


def _inside(axis: int | None, shape: tuple[int, ...]) -> int:
    axis = 0 if axis is None else axis
    if not -len(shape) <= axis < len(shape):
        raise QgateError(f"its axis is {axis}, and its shape {shape}")
    return axis % len(shape)


def _broadcast_axis(shape: tuple[int, ...], scale: tuple[int, ...]) -> int:
    aligned = (1,) * (len(shape) - len(scale)) + tuple(scale)
    axes = [axis for axis, length in enumerate(aligned) if length != 1]
    fits = len(aligned) == len(shape) and all(aligned[axis] == shape[axis] for axis in axes)
    if not fits or (len(axes) > 1 and axes != list(range(len(axes)))):
        raise QgateError(f"scales of shape {tuple(scale)} do not fit a weight of {shape}")
    return axes[-1]


def _shaped(stored: StoredCodes, x: Tensor, codes: Tensor, turned: bool) -> Tensor:
    """Return scales or zero points in the order of the weight as it is returned."""
    blocked = bool(stored.block) and x.dim() == codes.dim() > 1
    return x.transpose(-1, -2) if blocked and turned else x


def _decode_bits(
    stored: StoredBits, codes: Tensor, scales: Tensor, zero: Tensor | None
) -> QuantizedWeight:
    bits, block, rows, columns = stored.bits, stored.block, stored.rows, stored.columns
    count = stored.codes.count
    if bits not in (2, 4, 8) or block < 1 or rows < 1 or columns < 1:
        raise ValueError(f"bits {bits}, block_size {block}, {rows} x {columns}")
    blocks = -(-columns // block)
    if count * 8 // bits not in (rows * blocks * block, rows * columns):
        raise ValueError(f"{count:,} bytes of {rows} x {columns}")
    rows = codes.numel() * rows // count
    unpacked = unpacked_codes(codes.view(torch.uint8).reshape(rows, -1), bits)
    elements = unpacked[:, :columns]
    scales = scales.reshape(rows, blocks)
    if zero is None:
        zeros = None
    elif zero.dtype.is_floating_point:
        zeros = zero.float().reshape(rows, blocks)
    else:
        packed = zero.reshape(rows, -1)
        unpacked_zeros = unpacked_codes(packed.view(torch.uint8), bits)
        zeros = unpacked_zeros.float()[:, :blocks]
    return QuantizedWeight(
        f"uint{bits}", elements, scales, (1, min(block, columns)), zeros, signed_scales=True
    )


@dataclass(frozen=True)
class Form:
    """The facts about a weight that all its codes and zero points tell.

    is_centered  all zero points stand for the middle of the codes, so that none are needed
    is_narrow    7 of 8 bits are used
    """

    is_centered: bool
    is_narrow: bool


def canonical(weight: QuantizedWeight, form: Form) -> QuantizedWeight:
    """Return symmetric integers as signed ones without zero points, unsigned ones with theirs.

    A scale of zero for a tile whose codes all stand for zero is no fault. Integers of 8 bits of
    which 7 are used, as `reduce_range` of onnxruntime makes them, are those of 7 bits.
    """
    element, elements, zeros = weight.element, weight.elements, weight.zero_points
    if form.is_centered:
        zeros = None
        if element.startswith("uint"):
            bits = int(element[4:])
            middle = 1 << (bits - 1)
            shifted = (elements.view(torch.uint8) ^ middle) if bits == 8 else elements - middle
            element, elements = element[1:], shifted.view(torch.int8)
    elif element.startswith("uint") and zeros is None:
        zeros = torch.zeros_like(weight.scales)
    if form.is_narrow:
        element = element.replace("8", "7")
    weight = replace(weight, element=element, elements=elements, zero_points=zeros)
    if bool((weight.scales == 0).any()):
        tiles = weight.in_tiles(weight.float_elements())
        centered = tiles if zeros is None else tiles - zeros[:, None, :, None]
        idle = (weight.scales == 0) & (centered == 0).all(3).all(1)
        weight = replace(weight, scales=torch.where(idle, 1.0, weight.scales))
    return weight
