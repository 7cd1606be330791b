"""ONNX models with one of their fields replaced: shapes, types, places of data, nodes."""

from __future__ import annotations

from typing import Any

import onnx

from tests.campaigns.fuzzing.mutation import ODD_TEXTS, Choices

NUMBERS = (0, -1, 1, 2, 3, 255, 2**31 - 1, 2**40, 2**62, -(2**63))
LOCATIONS = ("../outside/secret", "/etc/passwd", "..", ".", "", "a/../../outside/secret", "model.onnx",
             "model.onnx.data", "file:///etc/passwd", "a\\..\\b", "x" * 5000, "a\nb", "~root", "data\0x")  # fmt: skip
OPERATORS = ("DequantizeLinear", "QLinearMatMul", "QLinearConv", "QGemm", "MatMulInteger", "MatMulNBits", "Cast",
             "Gather", "GatherBlockQuantized", "QLinearAdd", "Transpose", "Identity", "Constant", "If", "\x1b[31m")  # fmt: skip


def mutated_model(data: bytes, choices: Choices) -> bytes:
    """Return a model with something of it replaced, that its protobuf library still writes."""
    model = onnx.ModelProto.FromString(data)
    kind = choices.below(12)
    tensor = choices.of(model.graph.initializer)
    node = choices.of(model.graph.node)
    if kind == 0:
        tensor.dims[:] = [choices.of(NUMBERS) for _ in range(choices.below(5))]
    elif kind == 1:
        tensor.data_type = choices.below(32)
    elif kind == 2:
        _point(tensor, choices)
    elif kind == 3:
        tensor.ClearField("raw_data")
        tensor.dims[:] = [choices.of(NUMBERS)]
    elif kind == 4:
        tensor.ClearField("raw_data")
        tensor.int32_data[:] = [choices.of((0, -1, 7, 2**31 - 1))] * (1 + choices.below(600))
    elif kind == 5:
        tensor.name = choices.of((*ODD_TEXTS[:10], *(t.name for t in model.graph.initializer)))
    elif kind == 6 and node.attribute:
        attribute = choices.of(node.attribute)
        attribute.i = choices.of(NUMBERS)
    elif kind == 7:
        node.op_type = choices.of(OPERATORS)
    elif kind == 8 and node.input:
        names = [n for other in model.graph.node for n in (*other.input, *other.output)]
        node.input[choices.below(len(node.input))] = choices.of(names)
    elif kind == 9 and node.output:
        node.output[0] = choices.of([n for other in model.graph.node for n in other.input])
    elif kind == 10:
        _nest(model, 1 + choices.below(40))
    else:
        other = choices.of(model.graph.initializer)
        tensor.raw_data, other.raw_data = other.raw_data, tensor.raw_data
    return bytes(model.SerializeToString())


def _point(tensor: Any, choices: Choices) -> None:
    """Let a tensor be in another file, or somewhere else in its own."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entries = {entry.key: entry.value for entry in tensor.external_data}
    entries["location"] = entries.get("location", "model.onnx")
    key = choices.of(("location", "location", "offset", "length"))
    entries[key] = (
        choices.of(LOCATIONS) if key == "location" else str(choices.of((*NUMBERS, 10**40, "x")))
    )
    del tensor.external_data[:]
    for name, value in entries.items():
        tensor.external_data.append(onnx.StringStringEntryProto(key=name, value=value))


def _nest(model: Any, depth: int) -> None:
    """Put the graph into nodes of graphs."""
    for _ in range(depth):
        inner = onnx.GraphProto()
        inner.CopyFrom(model.graph)
        if inner.ByteSize() > 100_000:
            return
        attribute = onnx.helper.make_attribute("body", inner)
        node = onnx.helper.make_node("Loop", [], ["z"])
        node.attribute.append(attribute)
        model.graph.CopyFrom(onnx.helper.make_graph([node], "g", [], []))
