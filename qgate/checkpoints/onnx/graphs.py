"""The graph of an ONNX model: nodes by what they take and make, and where weights flow."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from qgate.checkpoints.onnx.tensors import OnnxTensor

FARTHEST = 8
"""Nodes to follow from a weight to what computes with it."""
PASSING = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Gather")
"""Nodes that hand on the values of their first input."""
ANONYMOUS = re.compile(r"onnx::\w+_\d+|_?val_\d+|\d+")
"""Names that exporters make up where a constant was folded."""
SUFFIXES = re.compile(r"(_DQ)?_(quantized|q|Q\d+(G\d+)?|weight_Q\d+)$|_(zero_point|scales?)$")

_SCALES = {
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7),
    "QLinearConv": (1, 2, 4, 5, 6, 7),
    "QGemm": (1, 2, 4, 5, 7, 8),
    "QLinearAdd": (1, 2, 4, 5, 6, 7),
    "QLinearMul": (1, 2, 4, 5, 6, 7),
}
"""Inputs of nodes that are scales or zero points."""


@dataclass(frozen=True)
class OnnxNode:
    """A node with its whole-number attributes."""

    operator: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, tuple[int, ...]]

    def input(self, number: int) -> str:
        """Return the name of an input, empty where it is left out."""
        return self.inputs[number] if number < len(self.inputs) else ""

    def number(self, attribute: str, default: int = 0) -> int:
        return (self.attributes.get(attribute) or (default,))[0]

    def scales(self) -> list[str]:
        """List its inputs that are scales or zero points of values."""
        numbers = _SCALES.get(self.operator, ())
        return [self.input(number) for number in numbers if self.input(number)]


@dataclass
class OnnxGraph:
    """Nodes in order and tensors by name, those of subgraphs among them."""

    nodes: list[OnnxNode] = field(default_factory=list)
    tensors: dict[str, OnnxTensor] = field(default_factory=dict)
    makers: dict[str, OnnxNode] = field(default_factory=dict)
    users: dict[str, list[tuple[OnnxNode, int]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, node: OnnxNode) -> None:
        self.nodes.append(node)
        for number, name in enumerate(node.inputs):
            self.users[name].append((node, number))
        for name in node.outputs:
            self.makers[name] = node

    def used_by(self, name: str) -> list[tuple[OnnxNode, int]]:
        """List the nodes that take a value, and as which input."""
        return self.users.get(name, [])

    def next_node(self, name: str, *operators: str) -> tuple[OnnxNode | None, int]:
        """Return the first node of some kinds that takes a value, and as which input it does."""
        uses = self.used_by(name)
        node, number = next(((n, i) for n, i in uses if n.operator in operators), (None, 0))
        return (node, number) if node is not None and node.outputs else (None, 0)

    def constant(self, name: str) -> OnnxTensor | None:
        """Return the tensor that a value is, through nodes that hand it on."""
        for _ in range(FARTHEST):
            if name in self.tensors:
                return self.tensors[name]
            maker = self.makers.get(name)
            if maker is None or maker.operator not in PASSING or maker.operator == "Gather":
                return None
            name = maker.input(0)
        return None

    def is_turned(self, name: str) -> bool:
        """Return True for a weight that is stored as inputs x outputs."""
        use = self._use(name)
        return use is not None and use[1]

    def module_of(self, name: str) -> str:
        """Return the module that a weight is in by the bias or the node that uses it, or ""."""
        use = self._use(name)
        if use is None:
            return ""
        node = use[0]
        return self._module_of_bias(node) or _module_of_node(node.name)

    def _use(self, name: str) -> tuple[OnnxNode, bool] | None:
        """Follow a weight to the node that computes with it, and tell whether it is turned."""
        turned = False
        for _ in range(FARTHEST):
            step = next(
                (
                    (node, number)
                    for node, number in self.used_by(name)
                    if node.operator in PASSING or _is_product(node, number)
                ),
                None,
            )
            if step is None:
                return None
            node, number = step
            if _is_product(node, number):
                return node, turned != _takes_columns(node)
            if node.operator == "Transpose":
                turned = not turned
            if node.operator == "Gather" or not node.outputs:
                return node, False
            name = node.outputs[0]
        return None

    def _module_of_bias(self, node: OnnxNode) -> str:
        names = list(node.inputs[2:])
        output = node.outputs[0] if node.outputs else ""
        for _ in range(FARTHEST):
            step, _ = self.next_node(output, "Add", "Cast", "Mul")
            if step is None:
                break
            if step.operator == "Add":
                names += step.inputs
                break
            output = step.outputs[0]
        for name in names:
            bias = logical_name(name)
            if bias.endswith(".bias"):
                return bias.removesuffix(".bias")
        return ""


_PRODUCTS = {
    "MatMul": (1, "", True),
    "Gemm": (1, "transB", True),
    "FusedMatMul": (1, "transB", True),
    "QGemm": (3, "transB", True),
    "QLinearMatMul": (3, "", True),
    "MatMulInteger": (1, "", True),
    "DynamicQuantizeMatMul": (1, "", True),
    "MatMulIntegerToFloat": (1, "", True),
    "MatMulNBits": (1, "", False),
    "Conv": (1, "", False),
    "QLinearConv": (3, "", False),
    "ConvInteger": (1, "", False),
}
"""Which input of a node is its weight, what turns it, and whether it is inputs x outputs."""


def _is_product(node: OnnxNode, number: int) -> bool:
    return node.operator in _PRODUCTS and _PRODUCTS[node.operator][0] == number


def _takes_columns(node: OnnxNode) -> bool:
    _, attribute, takes_columns = _PRODUCTS[node.operator]
    return takes_columns and not (attribute and node.number(attribute))


def _module_of_node(name: str) -> str:
    """Return the module in a name such as `/layers.0/query/MatMul`, as torch's exporter writes."""
    parts = name.split("/")
    if len(parts) < 3 or parts[0]:
        return ""
    return ".".join(parts[1:-1])


def logical_name(name: str) -> str:
    """Return the name of a weight without what quantizers append."""
    return SUFFIXES.sub("", name) or name


def is_anonymous(name: str) -> bool:
    """Return True for a name that an exporter made up."""
    return ANONYMOUS.fullmatch(name) is not None
