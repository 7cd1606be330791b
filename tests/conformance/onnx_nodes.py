"""The node cases of ONNX with low-bit tensors, and each of them computed by qgate's formats.

A format that qgate does not offer, or a node that no format can express, is refused with a reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

import qgate
from qgate.formats.options import Options
from tests.conformance.reading import Array, decode

TypeName = str

FORMATS: dict[TypeName, str] = {
    "FLOAT8E4M3FN": "fp8_e4m3",
    "FLOAT8E5M2": "fp8_e5m2",
    "FLOAT8E4M3FNUZ": "fp8_e4m3fnuz",
    "FLOAT8E5M2FNUZ": "fp8_e5m2fnuz",
    "FLOAT6E3M2": "fp6_e3m2",
    "FLOAT6E2M3": "fp6_e2m3",
    "FLOAT4E2M1": "fp4_e2m1",
    "INT4": "int4",
    "UINT4": "uint4",
    "INT2": "int2",
    "UINT2": "uint2",
    "FLOAT8E8M0": "mxint8",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT16": "int16",
    "UINT16": "uint16",
}
"""The qgate format of each type, by the name that it has or would have.

FLOAT8E8M0 is no format but the scale of one; that of mxint8 is the shared exponent itself, because
the largest element is below 2.
"""
EIGHT_AND_MORE = ("INT8", "UINT8", "INT16", "UINT16")
LOW_BIT = set(FORMATS) - set(EIGHT_AND_MORE)
"""The types that ONNX has only for quantized tensors."""
QUANTIZING = {
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear",
    "ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul",
}  # fmt: skip


class Refusal(Exception):
    """A case that qgate's formats do not compute, with the reason."""


@dataclass(frozen=True)
class Typed:
    """A tensor of a case with the name of its ONNX type."""

    type: TypeName
    data: Array

    @property
    def format(self) -> str:
        """The name of its format in qgate."""
        name = FORMATS[self.type]
        if name not in qgate.formats.names():
            raise Refusal(f"{self.type}: qgate has no such format")
        return name

    @property
    def numbers(self) -> Array:
        """The numbers as float64."""
        return self.data.astype(np.float64)

    @property
    def tensor(self) -> Tensor:
        """A tensor of a type that torch has, too."""
        return torch.from_numpy(np.array(self.data))

    @property
    def codes(self) -> Tensor:
        """The codes as qgate stores them."""
        if "INT" in self.type:
            return torch.from_numpy(self.data.astype(np.uint8 if self.is_unsigned else np.int8))
        return torch.from_numpy(self.data.view(np.uint8).copy())

    @property
    def is_unsigned(self) -> bool:
        return self.type.startswith("UINT")

    @property
    def full_range(self) -> Options:
        """The option with which integers of this type use their lowest code."""
        return {"narrow": False} if self.type.startswith("INT") else {}


@dataclass(frozen=True)
class NodeCase:
    name: str
    op: str
    attributes: dict[str, Any]
    inputs: tuple[Typed, ...]
    outputs: tuple[Typed, ...]

    @property
    def has_low_bit_type(self) -> bool:
        return any(tensor.type in LOW_BIT for tensor in (*self.inputs, *self.outputs))


@cache
def collect() -> tuple[int, tuple[NodeCase, ...]]:
    """Return the number of ONNX's node cases, and those that quantize or have a low-bit type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    return len(cases), tuple(_read(case) for case in cases if _quantizes(case))


def _quantizes(case: Any) -> bool:
    graph = case.model.graph
    types = {_type_name(value) for value in (*graph.input, *graph.output)}
    return bool(types & LOW_BIT) or _operator(case) in QUANTIZING


def _operator(case: Any) -> str:
    """Return the operator of a case, also of one that writes it out as a graph of others."""
    if case.name.startswith("test_dynamicquantizelinear"):
        return "DynamicQuantizeLinear"
    nodes = case.model.graph.node
    return str(nodes[0].op_type) if len(nodes) == 1 else ""


def _type_name(value: Any) -> TypeName:
    return str(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type))


def _read(case: Any) -> NodeCase:
    graph = case.model.graph
    (inputs, outputs), *more = case.data_sets
    assert not more, f"{case.name} has several sets of data; run all of them."
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in graph.node[0].attribute}
    return NodeCase(
        case.name,
        _operator(case),
        attributes,
        tuple(map(_typed, graph.input, inputs)),
        tuple(map(_typed, graph.output, outputs)),
    )


def _typed(value: Any, data: Any) -> Typed:
    if isinstance(data, onnx.TensorProto):
        data = numpy_helper.to_array(data)
    return Typed(_type_name(value), np.asarray(data))


# ---------------------------------------------------------------- computed by qgate


def run(case: NodeCase) -> list[Array]:
    """Return the outputs that qgate's formats compute, as float64, or raise a `Refusal`."""
    return [np.asarray(output.double().numpy()) for output in RUNNERS[case.op](case)]


def format_of(case: NodeCase) -> str:
    """Return the format that a computed case checks."""
    tensors = (*case.outputs, *case.inputs)
    types = [tensor.type for tensor in tensors if tensor.type in FORMATS]
    return FORMATS[next((name for name in types if name in LOW_BIT), types[0])]


def _cast(case: NodeCase) -> list[Tensor]:
    x, y = case.inputs[0], case.outputs[0]
    if x.type in LOW_BIT:
        dtype = {"FLOAT": torch.float32, "FLOAT16": torch.float16}.get(y.type, torch.float64)
        return [_read_scales(x, dtype) if _is_scale(x) else decode(x.codes, x.format, dtype=dtype)]
    if _is_scale(y):
        return [_round_to_scales(x.tensor, y.format, case.attributes["round_mode"])]
    if "INT" in y.type:
        return [qgate.quantize(x.tensor, y.format, scale=1.0, **y.full_range)]
    if "FLOAT8" in y.type:
        saturate = bool(case.attributes.get("saturate", 1))
        return [qgate.quantize(x.tensor, y.format, saturate=saturate)]
    return [qgate.quantize(x.tensor, y.format)]


def _is_scale(tensor: Typed) -> bool:
    return tensor.type == "FLOAT8E8M0"


def _round_to_scales(x: Tensor, fmt: str, round_mode: bytes) -> Tensor:
    """Round numbers to powers of two as the scales of blocks of one element."""
    rule = {b"up": "ceil", b"down": "floor"}.get(round_mode)
    if rule is None:
        raise Refusal(f"FLOAT8E8M0: no scale rule rounds {round_mode.decode()}")
    encoded = qgate.encode(x[..., None], fmt, block=1, scale_rule=rule)
    assert encoded.scales is not None
    return encoded.scales[..., 0].view(torch.float8_e8m0fnu).double()


def _read_scales(scales: Typed, dtype: torch.dtype) -> Tensor:
    """Read powers of two as the scales of blocks of one element, which is 1."""
    ones = torch.full((*scales.data.shape, 1), 64, dtype=torch.int8)
    return decode(ones, scales.format, scales.codes[..., None], block=1, dtype=dtype)[..., 0]


@dataclass(frozen=True)
class Scaling:
    """The scales and zero points of one tensor, and the options that say whose they are."""

    scales: Tensor
    zero_points: Tensor | None
    options: Options

    @classmethod
    def of(cls, case: NodeCase, scale: Typed, zero_point: Typed | None = None) -> Scaling:
        scales, axis = scale.tensor.float(), case.attributes.get("axis", 1)
        moves = zero_point is not None and bool(zero_point.codes.any())
        zero_points = zero_point.codes if zero_point is not None and moves else None
        if scales.numel() == 1:
            zero = None if zero_points is None else zero_points.reshape(())
            return cls(scales.reshape(()), zero, {"granularity": "tensor"})
        if scales.dim() == 1:
            return cls(scales, zero_points, {"granularity": "channel", "axis": axis})
        block = case.attributes["block_size"]
        return cls(scales, zero_points, {"granularity": "block", "axis": axis, "block": block})

    def encode(self, x: Tensor, y: Typed) -> Tensor:
        """Return the numbers that ONNX stores in y, which are without their scale."""
        options: Options = {**self.options, **y.full_range}
        if self.zero_points is not None:
            options["zero_point"] = self.zero_points
        return decode(qgate.encode(x, y.format, scale=self.scales, **options).codes, y.format)

    def decode(self, x: Typed, dtype: torch.dtype) -> Tensor:
        zero_points = self.zero_points
        return decode(
            x.codes, x.format, self.scales, zero_points=zero_points, dtype=dtype, **self.options
        )


def _quantize_linear(case: NodeCase) -> list[Tensor]:
    x, *scaling = case.inputs
    return [Scaling.of(case, *scaling).encode(x.tensor, case.outputs[0])]


def _dequantize_linear(case: NodeCase) -> list[Tensor]:
    x, *scaling = case.inputs
    return [Scaling.of(case, *scaling).decode(x, case.outputs[0].tensor.dtype)]


def _dynamic_quantize_linear(case: NodeCase) -> list[Tensor]:
    fmt = case.outputs[0].format
    encoded = qgate.encode(case.inputs[0].tensor, fmt, zero_point="minmax")
    assert encoded.scales is not None
    assert encoded.zero_points is not None
    return [decode(encoded.codes, fmt), encoded.scales, encoded.zero_points]


def _product(case: NodeCase) -> list[Tensor]:
    del case
    raise Refusal("a product of integers, no quantizer")


RUNNERS: dict[str, Callable[[NodeCase], list[Tensor]]] = {
    "Cast": _cast,
    "CastLike": _cast,
    "QuantizeLinear": _quantize_linear,
    "DequantizeLinear": _dequantize_linear,
    "DynamicQuantizeLinear": _dynamic_quantize_linear,
    "ConvInteger": _product,
    "MatMulInteger": _product,
    "QLinearConv": _product,
    "QLinearMatMul": _product,
}
