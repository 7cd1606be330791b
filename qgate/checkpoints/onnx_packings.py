"""Quantized weights that the graph of an ONNX model tells: their tensors, and how they decode.

Each pattern yields a weight where a node, or a chain of nodes, makes values from stored codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.onnx_graphs import OnnxGraph, OnnxNode
from qgate.checkpoints.onnx_tensors import OnnxTensor, unit_of, unpacked_codes
from qgate.errors import QgateError


@dataclass(frozen=True)
class StoredCodes:
    """Codes of a weight with what dequantizes them.

    output  the value that has the dequantized weight, or the codes where a node takes them
    axis    of the codes as stored; scales of one number have none
    block   elements of the axis that share a scale; 0 for all
    scales  names of tensors whose product is the scale
    """

    packing: str
    codes: OnnxTensor
    scales: tuple[str, ...]
    output: str
    zero_point: str = ""
    axis: int | None = None
    block: int = 0


@dataclass(frozen=True)
class StoredBits:
    """Codes packed into bytes along the inputs, block by block, as com.microsoft has them."""

    packing: str
    codes: OnnxTensor
    scales: tuple[str, ...]
    output: str
    zero_point: str
    bits: int
    block: int
    rows: int
    columns: int


@dataclass(frozen=True)
class UnreadCodes:
    """Codes that go into a node for which no packing is known."""

    packing: str
    codes: OnnxTensor
    output: str
    scales: tuple[str, ...] = ()
    zero_point: str = ""


Stored = StoredCodes | StoredBits | UnreadCodes


def find_codes(graph: OnnxGraph) -> Iterator[Stored]:
    """Yield the quantized weights of a graph, each once."""
    seen: set[str] = set()
    for node in graph.nodes:
        for stored in _PATTERNS.get(node.operator, _none)(graph, node):
            if stored.codes.name not in seen and stored.codes.type.element:
                seen.add(stored.codes.name)
                yield stored
    for tensor in graph.tensors.values():
        used = graph.used_by(tensor.name)
        if tensor.name not in seen and used and _may_be_weight(tensor):
            operator = used[0][0].operator
            if operator not in _DATA:
                yield UnreadCodes(f"ONNX {operator}", tensor, tensor.name)


_DATA = ("Gather", "GatherND", "Where", "Slice", "Concat", "Reshape", "Expand", "Cast", "Equal",
         "QuantizeLinear", "DequantizeLinear")  # fmt: skip
"""Nodes whose integers are indices or masks, and not a weight."""


def _may_be_weight(tensor: OnnxTensor) -> bool:
    element = tensor.type.element
    return bool(element) and element != "int32" and len(tensor.shape) > 1 and tensor.count >= 256


# Patterns ----------------------------------------------------------------------------------------


def _none(_graph: OnnxGraph, _node: OnnxNode) -> Iterator[Stored]:
    return iter(())


def _dequantize(graph: OnnxGraph, node: OnnxNode) -> Iterator[Stored]:
    """DequantizeLinear of an initializer, or of rows that a Gather takes from one."""
    name = node.input(0)
    maker = graph.makers.get(name)
    if maker is not None and maker.operator == "Gather":
        name = maker.input(0)
    codes = graph.constant(name)
    if codes is None or not node.outputs:
        return
    axis, block = node.number("axis", 1), node.number("block_size")
    yield StoredCodes(
        "ONNX DequantizeLinear", codes, (node.input(1),), node.outputs[0], node.input(2), axis,
        block,
    )  # fmt: skip


def _cast(graph: OnnxGraph, node: OnnxNode) -> Iterator[Stored]:
    """Cast of integers to floats, less a zero point, times scales."""
    codes = graph.tensors.get(node.input(0))
    if codes is None or not codes.type.element:
        return
    packing, zero, output = "ONNX Cast and Mul", "", node.outputs[0]
    for _ in range(4):
        used = graph.used_by(output)
        step, place = next(
            ((n, p) for n, p in used if n.operator in ("Sub", "Mul", "Cast")), (None, 0)
        )
        if step is None or not step.outputs:
            return
        other = step.input(1 - place)
        output = step.outputs[0]
        if step.operator == "Sub" and not place:
            zero = other
        elif step.operator == "Mul" and graph.constant(other) is not None:
            yield StoredCodes(packing, codes, (other,), output, zero, None)
            return


def _quantized_operator(
    weight: int, scale: int, zero_point: int, axis: int, bias: tuple[int, ...] = ()
) -> Callable[[OnnxGraph, OnnxNode], Iterator[Stored]]:
    """Return the pattern of a node that takes codes and scales as these inputs.

    bias   its input, and that of the scale of the first operand
    """

    def pattern(graph: OnnxGraph, node: OnnxNode) -> Iterator[Stored]:
        codes = graph.constant(node.input(weight))
        packing = f"ONNX {node.operator}"
        if codes is not None:
            yield StoredCodes(
                packing, codes, (node.input(scale),), "", node.input(zero_point),
                0 if node.number("transB") else axis,
            )  # fmt: skip
        if bias:
            sums = graph.constant(node.input(bias[0]))
            if sums is not None:
                scales = (node.input(bias[1]), node.input(scale))
                yield StoredCodes(packing, sums, scales, "", "", 0)

    return pattern


def _operands(graph: OnnxGraph, node: OnnxNode) -> Iterator[Stored]:
    """Sums and products of two quantized values, of which one may be a bias."""
    for place in (0, 3):
        codes = graph.constant(node.input(place))
        if codes is not None:
            zero = node.input(place + 2)
            yield StoredCodes(f"ONNX {node.operator}", codes, (node.input(place + 1),), "", zero)


def _integer_product(axis: int) -> Callable[[OnnxGraph, OnnxNode], Iterator[Stored]]:
    """Return the pattern of products of integers, whose scale is in a Mul that follows."""

    def pattern(graph: OnnxGraph, node: OnnxNode) -> Iterator[Stored]:
        codes = graph.constant(node.input(1))
        if codes is None or not node.outputs:
            return
        scale = _following_scale(graph, node.outputs[0])
        packing = f"ONNX {node.operator}"
        if scale:
            yield StoredCodes(packing, codes, (scale,), "", node.input(3), axis)
        else:
            yield UnreadCodes(packing, codes, "")

    return pattern


def _following_scale(graph: OnnxGraph, output: str) -> str:
    """Find the constant of the Mul after a product of integers, or of the Mul of both scales."""
    for _ in range(4):
        used = graph.used_by(output)
        step, place = next(
            ((n, p) for n, p in used if n.operator in ("Cast", "Mul", "Add")), (None, 0)
        )
        if step is None or not step.outputs:
            return ""
        if step.operator == "Mul":
            name = step.input(1 - place)
            maker = graph.makers.get(name)
            factors = maker.inputs if maker is not None and maker.operator == "Mul" else (name,)
            return next((n for n in factors if graph.constant(n) is not None), "")
        output = step.outputs[0]
    return ""


def _bits(graph: OnnxGraph, node: OnnxNode) -> Iterator[Stored]:
    codes = graph.constant(node.input(1))
    if codes is not None:
        yield StoredBits(
            "ONNX MatMulNBits", codes, (node.input(2),), "", node.input(3), node.number("bits", 4),
            node.number("block_size"), node.number("N"), node.number("K"),
        )  # fmt: skip


def _gathered_blocks(graph: OnnxGraph, node: OnnxNode) -> Iterator[Stored]:
    """GatherBlockQuantized: rows of codes in blocks, of 4 bit types or packed into bytes."""
    codes = graph.constant(node.input(0))
    if codes is None:
        return
    packing, scales, zero = "ONNX GatherBlockQuantized", (node.input(2),), node.input(3)
    bits, block = node.number("bits", 4), node.number("block_size", 128)
    if codes.type.bits == 8 and len(codes.shape) == 2:
        rows, width = codes.shape
        columns = width * 8 // bits if bits in (2, 4, 8) else 0
        yield StoredBits(packing, codes, scales, "", zero, bits, block, rows, columns)
    else:
        axis = node.number("quantize_axis", 1)
        yield StoredCodes(packing, codes, scales, "", zero, axis, block)


_PATTERNS: Mapping[str, Callable[[OnnxGraph, OnnxNode], Iterator[Stored]]] = {
    "DequantizeLinear": _dequantize,
    "Cast": _cast,
    "QLinearMatMul": _quantized_operator(3, 4, 5, -1),
    "QLinearConv": _quantized_operator(3, 4, 5, 0, (8, 1)),
    "QGemm": _quantized_operator(3, 4, 5, -1, (6, 1)),
    "QLinearAdd": _operands,
    "QLinearMul": _operands,
    "DynamicQuantizeMatMul": _quantized_operator(1, 2, 3, -1),
    "MatMulIntegerToFloat": _quantized_operator(1, 3, 5, -1),
    "MatMulInteger": _integer_product(-1),
    "ConvInteger": _integer_product(0),
    "MatMulNBits": _bits,
    "GatherBlockQuantized": _gathered_blocks,
}


# Decoding ----------------------------------------------------------------------------------------


def decode_stored(
    stored: Stored, codes: Tensor, scale: Tensor | None, zero: Tensor | None, turned: bool
) -> QuantizedWeight:
    """Decode the codes of a weight with its scales and zero points.

    turned   the codes are inputs x outputs, and are returned as outputs x inputs
    """
    if isinstance(stored, UnreadCodes) or scale is None:
        raise QgateError(
            f"it is stored as {stored.codes.type.name}, and no scale of it is known: "
            f"{stored.packing.removeprefix('ONNX ')} cannot be read"
        )
    if isinstance(stored, StoredBits):
        return _decode_bits(stored, codes, scale.float(), zero)
    grid = _grid(stored, tuple(codes.shape), tuple(scale.shape), turned)
    kind = stored.codes.type
    elements = codes.transpose(-1, -2) if turned and codes.dim() > 1 else codes
    scales = _shaped(stored, scale.float(), codes, turned)
    zeros = None if zero is None else _shaped(stored, zero.float(), codes, turned)
    rows, columns, tile, tiles = grid

    def placed(x: Tensor) -> Tensor:
        if x.numel() == 1:
            return x.reshape(1, 1).expand(tiles)
        x = x.reshape(-1)
        return x.repeat(math.prod(tiles) // x.numel()).reshape(tiles)

    return canonical(
        QuantizedWeight(
            kind.element,
            elements.reshape(rows, columns),
            placed(scales).contiguous(),
            tile,
            None if zeros is None else placed(zeros).contiguous(),
            unit=unit_of(kind),
        )
    )


Grid = tuple[int, int, tuple[int, int], tuple[int, int]]


def _grid(
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
        wanted = (*shape[:axis], blocks, *shape[axis + 1 :])
        if tuple(scale) != wanted:
            raise QgateError(
                f"scales of shape {tuple(scale)} do not fit blocks of {stored.block} along axis "
                f"{axis} of {shape}, which need {wanted}"
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
    if bits not in (2, 4, 8) or block < 1 or rows < 1 or columns < 1:
        raise ValueError(f"bits {bits}, block_size {block}, {rows} x {columns}")
    blocks = -(-columns // block)
    if codes.numel() * 8 // bits not in (rows * blocks * block, rows * columns):
        raise ValueError(f"{codes.numel():,} bytes of {rows} x {columns}")
    unpacked = unpacked_codes(codes.view(torch.uint8).reshape(rows, -1), bits)
    elements = unpacked[:, :columns]
    scales = scales.reshape(rows, blocks)
    if zero is None:
        zeros = torch.full_like(scales, float(1 << (bits - 1)))
    elif zero.dtype.is_floating_point:
        zeros = zero.float().reshape(rows, blocks)
    else:
        packed = zero.reshape(rows, -1)
        unpacked_zeros = unpacked_codes(packed.view(torch.uint8), bits)
        zeros = unpacked_zeros.float()[:, :blocks]
    return canonical(
        QuantizedWeight(
            f"uint{bits}", elements, scales, (1, min(block, columns)), zeros, signed_scales=True
        )
    )


def canonical(weight: QuantizedWeight) -> QuantizedWeight:
    """Return symmetric integers as signed ones without zero points, unsigned ones with theirs.

    A scale of zero for a tile whose codes all stand for zero is no fault. Integers of 8 bits of
    which 7 are used, as `reduce_range` of onnxruntime makes them, are those of 7 bits.
    """
    element, zeros = weight.element, weight.zero_points
    elements = weight.elements
    if element.startswith("uint"):
        bits = int(element[4:])
        middle = 1 << (bits - 1)
        if zeros is None:
            zeros = torch.zeros_like(weight.scales)
        elif bits <= 8 and bool((zeros == middle).all()):
            shifted = (elements.view(torch.uint8) ^ middle) if bits == 8 else elements - middle
            weight = replace(weight, element=element[1:], elements=shifted.view(torch.int8))
            zeros = None
    elif zeros is not None and not bool(zeros.any()):
        zeros = None
    element = weight.element
    if element in ("int8", "uint8") and weight.elements.numel():
        low, high = (int(end) for end in weight.elements.aminmax())
        if 0 < max(-low, high) <= (64 if element == "int8" else 127):
            element = element.replace("8", "7")
    weight = replace(weight, element=element, zero_points=zeros)
    if bool((weight.scales == 0).any()):
        tiles = weight.in_tiles(weight.float_elements())
        centered = tiles if zeros is None else tiles - zeros[:, None, :, None]
        idle = (weight.scales == 0) & (centered == 0).all(3).all(1)
        weight = replace(weight, scales=torch.where(idle, 1.0, weight.scales))
    return weight
