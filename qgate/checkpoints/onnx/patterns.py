"""Quantized weights in the graph of an ONNX model: which tensors are codes, scales, zero points.

Each pattern yields a weight where a node, or a chain of nodes, makes values from stored codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from qgate.checkpoints.onnx.graphs import OnnxGraph, OnnxNode
from qgate.checkpoints.onnx.tensors import OnnxTensor


@dataclass(frozen=True)
class StoredCodes:
    """Codes of a weight with what dequantizes them.

    output  the value that has the dequantized weight, or the codes where a node takes them
    axis    of the codes as stored; scales of one number have none
    block   elements of the axis that share a scale; 0 for all
    scales  names of tensors whose product is the scale; none where no packing is known
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


Stored = StoredCodes | StoredBits


def find_codes(graph: OnnxGraph) -> Iterator[Stored]:
    """Yield the quantized weights of a graph, each once."""
    names: set[str] = set()
    for node in graph.nodes:
        pattern = _PATTERNS.get(node.operator)
        for stored in pattern(graph, node) if pattern else ():
            codes = stored.codes
            if codes.name not in names and codes.type.element and codes.count > 1:
                names.add(codes.name)
                yield stored
    for tensor in graph.tensors.values():
        used = graph.used_by(tensor.name)
        if tensor.name not in names and used and _may_be_weight(tensor):
            operator = used[0][0].operator
            if operator not in _DATA:
                yield StoredCodes(f"ONNX {operator}", tensor, (), tensor.name)


LEAST = 256
"""Elements of a weight where nothing but its type says that it is one."""
_DATA = ("Gather", "GatherND", "Where", "Slice", "Concat", "Reshape", "Expand", "Cast", "Equal",
         "QuantizeLinear", "DequantizeLinear")  # fmt: skip
"""Nodes whose integers are indices or masks, and not a weight."""


def _may_be_weight(tensor: OnnxTensor) -> bool:
    element = tensor.type.element
    return bool(element) and element != "int32" and len(tensor.shape) > 1 and tensor.count >= LEAST


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
    if codes is None or not _may_be_weight(codes):
        return
    packing, zero, output = "ONNX Cast and Mul", "", node.outputs[0]
    for _ in range(4):
        step, number = graph.next_node(output, "Sub", "Mul", "Cast")
        if step is None:
            return
        operand = step.input(1 - number)
        output = step.outputs[0]
        if step.operator == "Sub":
            if number:
                return
            zero = operand
        elif step.operator == "Mul" and graph.constant(operand) is not None:
            yield StoredCodes(packing, codes, (operand,), output, zero, None)
            return


def _quantized_operator(
    graph: OnnxGraph,
    node: OnnxNode,
    inputs: tuple[int, int, int],
    axis: int,
    bias: tuple[int, ...] = (),
) -> Iterator[Stored]:
    """Nodes that take codes, scales and zero points as these inputs.

    bias   its input, and that of the scale of the first operand
    """
    weight, scale, zero_point = (node.input(number) for number in inputs)
    codes = graph.constant(weight)
    packing = f"ONNX {node.operator}"
    if codes is not None:
        along = 0 if node.number("transB") else axis
        yield StoredCodes(packing, codes, (scale,), "", zero_point, along)
    sums = graph.constant(node.input(bias[0])) if bias else None
    if sums is not None:
        yield StoredCodes(packing, sums, (node.input(bias[1]), scale), "", "", 0)


def _operands(graph: OnnxGraph, node: OnnxNode) -> Iterator[Stored]:
    """Sums and products of two quantized values, of which one may be a bias."""
    for number in (0, 3):
        codes = graph.constant(node.input(number))
        if codes is not None:
            scale, zero = node.input(number + 1), node.input(number + 2)
            yield StoredCodes(f"ONNX {node.operator}", codes, (scale,), "", zero)


def _integer_product(graph: OnnxGraph, node: OnnxNode, axis: int) -> Iterator[Stored]:
    """Products of integers, whose scale is in a Mul that follows."""
    codes = graph.constant(node.input(1))
    if codes is None or not node.outputs:
        return
    scale = _following_scale(graph, node.outputs[0])
    scales, zero = ((scale,), node.input(3)) if scale else ((), "")
    yield StoredCodes(f"ONNX {node.operator}", codes, scales, "", zero, axis)


def _following_scale(graph: OnnxGraph, output: str) -> str:
    """Find the constant of the Mul after a product of integers, or of the Mul of both scales."""
    for _ in range(4):
        step, number = graph.next_node(output, "Cast", "Mul", "Add")
        if step is None:
            return ""
        if step.operator == "Mul":
            name = step.input(1 - number)
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
    "QLinearMatMul": partial(_quantized_operator, inputs=(3, 4, 5), axis=-1),
    "QLinearConv": partial(_quantized_operator, inputs=(3, 4, 5), axis=0, bias=(8, 1)),
    "QGemm": partial(_quantized_operator, inputs=(3, 4, 5), axis=-1, bias=(6, 1)),
    "QLinearAdd": _operands,
    "QLinearMul": _operands,
    "DynamicQuantizeMatMul": partial(_quantized_operator, inputs=(1, 2, 3), axis=-1),
    "MatMulIntegerToFloat": partial(_quantized_operator, inputs=(1, 3, 5), axis=-1),
    "MatMulInteger": partial(_integer_product, axis=-1),
    "ConvInteger": partial(_integer_product, axis=0),
    "MatMulNBits": _bits,
    "GatherBlockQuantized": _gathered_blocks,
}
