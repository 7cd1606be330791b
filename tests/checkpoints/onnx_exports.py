"""ONNX exports of a small network, quantized by onnxruntime and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import _pybind_state
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from torch import Tensor

from tests.checkpoints.exports import write

WIDTH, INNER, BLOCK = 64, 128, 32
LINEAR = {
    "layers.0.up": (INNER, WIDTH),
    "layers.0.down": (WIDTH, INNER),
    "layers.1.up": (INNER, WIDTH),
    "layers.1.down": (WIDTH, INNER),
    "square": (WIDTH, WIDTH),
}
QUANTIZED = [f"{name}.weight" for name in LINEAR]
Array = npt.NDArray[Any]


def parent_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of the network as torch has them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    tensors = {}
    for name, (rows, columns) in LINEAR.items():
        tensors[f"{name}.weight"] = draw(rows, columns)
        tensors[f"{name}.bias"] = draw(rows)
    tensors["head.weight"] = draw(96, WIDTH)
    tensors["head.bias"] = draw(96)
    tensors["conv.weight"] = draw(16, 4, 3, 3)
    tensors["conv.bias"] = draw(16)
    return tensors


def write_parent(folder: Path) -> Path:
    return write(folder, parent_tensors(), {})


def float_model(seed: int = 0, anonymous: bool = False) -> onnx.ModelProto:
    """Return the network as exporters write it: weights of MatMul are inputs x outputs."""
    tensors = {name: x.numpy() for name, x in parent_tensors(seed).items()}
    nodes, initializers, value = [], {}, "x"
    for number, name in enumerate(LINEAR):
        weight = f"onnx::MatMul_{number}" if anonymous else f"{name}.weight"
        initializers[weight] = tensors[f"{name}.weight"].T
        initializers[f"{name}.bias"] = tensors[f"{name}.bias"]
        path = "/" + name.replace(".", "/")
        nodes.append(helper.make_node("MatMul", [value, weight], [f"{name}.y"], f"{path}/MatMul"))
        nodes.append(
            helper.make_node("Add", [f"{name}.y", f"{name}.bias"], [f"{name}.z"], f"{path}/Add")
        )
        value = f"{name}.z"
    initializers |= {n: x for n, x in tensors.items() if n.startswith(("head", "conv"))}
    nodes.append(
        helper.make_node("Gemm", [value, "head.weight", "head.bias"], ["y"], "/head/Gemm", transB=1)
    )
    nodes.append(
        helper.make_node("Conv", ["image", "conv.weight", "conv.bias"], ["z"], "/conv/Conv")
    )
    return model_of(
        nodes, initializers, {"x": (None, WIDTH), "image": (None, 4, 8, 8)},
        {"y": (None, 96), "z": (None, 16, 6, 6)},
    )  # fmt: skip


def model_of(
    nodes: list[Any],
    initializers: dict[str, Any],
    inputs: dict[str, tuple[int | None, ...]],
    outputs: dict[str, tuple[int | None, ...]],
) -> onnx.ModelProto:
    """Return a model of nodes, with arrays or tensors as initializers."""
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        [
            x if isinstance(x, TensorProto) else numpy_helper.from_array(np.ascontiguousarray(x), n)
            for n, x in initializers.items()
        ],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


class _Inputs(CalibrationDataReader):  # type: ignore[misc]
    """A few inputs to calibrate with."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._batches: Iterator[dict[str, Array]] = iter(
            {
                "x": generator.standard_normal((4, WIDTH)).astype(np.float32),
                "image": generator.standard_normal((1, 4, 8, 8)).astype(np.float32),
            }
            for _ in range(3)
        )

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)


def _static(source: Path, target: Path, kind: QuantFormat, **more: Any) -> None:
    quantize_static(source, target, _Inputs(), kind, **more)


INT8 = {"weight_type": QuantType.QInt8}
UINT8 = {"weight_type": QuantType.QUInt8, "activation_type": QuantType.QUInt8}
Export = Callable[[Path, Path], None]
RUNTIME_EXPORTS: dict[str, Export] = {
    "QDQ per channel": lambda a, b: _static(a, b, QuantFormat.QDQ, per_channel=True, **INT8),
    "QDQ per tensor": lambda a, b: _static(a, b, QuantFormat.QDQ, **INT8),
    "QDQ unsigned": lambda a, b: _static(a, b, QuantFormat.QDQ, **UINT8),
    "QDQ asymmetric": lambda a, b: _static(
        a, b, QuantFormat.QDQ, per_channel=True, extra_options={"WeightSymmetric": False}, **INT8
    ),
    "QDQ of 4 bits": lambda a, b: _static(a, b, QuantFormat.QDQ, weight_type=QuantType.QInt4),
    "QOperator per channel": lambda a, b: _static(
        a, b, QuantFormat.QOperator, per_channel=True, **INT8
    ),
    "QOperator per tensor": lambda a, b: _static(a, b, QuantFormat.QOperator, **INT8),
    "QOperator unsigned": lambda a, b: _static(a, b, QuantFormat.QOperator, **UINT8),
    "dynamic": lambda a, b: quantize_dynamic(a, b, **INT8),
    "dynamic per channel": lambda a, b: quantize_dynamic(a, b, per_channel=True, **INT8),
    "dynamic unsigned": lambda a, b: quantize_dynamic(a, b, weight_type=QuantType.QUInt8),
    "dynamic of 7 bits": lambda a, b: quantize_dynamic(
        a, b, per_channel=True, reduce_range=True, **INT8
    ),
}


def export(folder: Path, name: str, anonymous: bool = False) -> Path:
    """Quantize the network with onnxruntime."""
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / "float" / "model.onnx", folder / "model.onnx"
    source.parent.mkdir(exist_ok=True)
    onnx.save(float_model(anonymous=anonymous), source)
    RUNTIME_EXPORTS[name](source, target)
    return target


# By hand -----------------------------------------------------------------------------------------


def bits_of(weight: Array, block: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Return the bytes, scales and zero points of onnxruntime's quantizer to 4 bits.

    weight   inputs x outputs
    """
    inputs, outputs = weight.shape
    blocks = -(-inputs // block)
    packed = np.zeros((outputs, blocks, block // 2), np.uint8)
    scales = np.zeros((outputs, blocks), np.float32)
    zeros = np.zeros((outputs, (blocks + 1) // 2), np.uint8)
    _pybind_state.quantize_matmul_4bits(
        packed, np.ascontiguousarray(weight), scales, zeros, block, outputs, inputs, symmetric
    )
    return packed, scales, zeros


def bits_model(symmetric: bool = True, block: int = BLOCK) -> onnx.ModelProto:
    """Return the network with MatMulNBits, as onnxruntime's quantizer writes it."""
    return _with_linear(lambda name, weight: _bits_parts(name, weight, symmetric, block))


def _bits_parts(
    name: str, weight: Array, symmetric: bool, block: int
) -> tuple[list[Any], dict[str, Any]]:
    packed, scales, zeros = bits_of(weight, block, symmetric)
    parts: dict[str, Any] = {
        f"{name}.weight_Q4": packed,
        f"{name}.weight_scales": scales.reshape(-1),
    }
    if not symmetric:
        parts[f"{name}.weight_zero_points"] = zeros.reshape(-1)
    inputs, outputs = weight.shape
    node = helper.make_node(
        "MatMulNBits", ["@in", *parts], ["@out"], f"/{name}/MatMul_Q4", domain="com.microsoft",
        K=inputs, N=outputs, bits=4, block_size=block,
    )  # fmt: skip
    return [node], parts


def dequantized_model(kind: int, axis: int = 1, block: int = 0) -> onnx.ModelProto:
    """Return the network with DequantizeLinear of codes of a type."""

    def parts_of(name: str, weight: Array) -> tuple[list[Any], dict[str, Any]]:
        values, scales = quantized(weight, kind, axis, block)
        named = f"{name}.weight_quantized"
        codes = helper.make_tensor(named, kind, weight.shape, values.reshape(-1))
        if kind not in (TensorProto.INT16, TensorProto.INT2):  # these stay numbers of the message
            codes = numpy_helper.from_array(numpy_helper.to_array(codes), named)
        parts = {named: codes, f"{name}.weight_scale": scales}
        attributes = {"axis": axis} | ({"block_size": block} if block else {})
        return [
            helper.make_node("DequantizeLinear", list(parts), [f"{name}.weight"], **attributes),
            helper.make_node("MatMul", ["@in", f"{name}.weight"], ["@out"], f"/{name}/MatMul"),
        ], parts

    return _with_linear(parts_of)


ENDS = {TensorProto.INT8: 127, TensorProto.INT4: 7, TensorProto.INT2: 1, TensorProto.INT16: 32767,
        TensorProto.FLOAT8E4M3FN: 448, TensorProto.FLOAT8E5M2: 57344, TensorProto.FLOAT8E4M3FNUZ: 240,
        TensorProto.FLOAT8E5M2FNUZ: 57344, TensorProto.FLOAT4E2M1: 6}  # fmt: skip


def quantized(weight: Array, kind: int, axis: int, block: int) -> tuple[Array, Array]:
    """Return values in units of scales, which make_tensor rounds, and the scales."""
    end = ENDS[kind]
    if block:
        moved = np.moveaxis(weight, axis, 0)
        blocks = moved.reshape(-1, block, *moved.shape[1:])
        amax = np.moveaxis(np.abs(blocks).max(1), 0, axis)
        spread = np.repeat(amax, block, axis)
    else:
        amax = np.abs(weight).max(1 - axis)
        spread = np.expand_dims(amax, 1 - axis)
    codes = weight / (spread / end)
    return (codes.round() if kind in INTEGERS else codes), (amax / end).astype(np.float32)


INTEGERS = (TensorProto.INT8, TensorProto.INT4, TensorProto.INT2, TensorProto.INT16)


def cast_model() -> onnx.ModelProto:
    """Return the network with codes that are cast and multiplied by scales."""

    def parts_of(name: str, weight: Array) -> tuple[list[Any], dict[str, Any]]:
        codes, scales = quantized(weight, TensorProto.INT8, 1, 0)
        parts = {f"{name}_q": codes.astype(np.int8), f"{name}_scale": scales[None]}
        return [
            helper.make_node("Cast", [f"{name}_q"], [f"{name}_f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{name}_f", f"{name}_scale"], [f"{name}_w"]),
            helper.make_node("MatMul", ["@in", f"{name}_w"], ["@out"], f"/{name}/MatMul"),
        ], parts

    return _with_linear(parts_of)


def _with_linear(
    parts_of: Callable[[str, Array], tuple[list[Any], dict[str, Any]]],
) -> onnx.ModelProto:
    tensors = {name: x.numpy() for name, x in parent_tensors().items()}
    nodes: list[Any] = []
    initializers: dict[str, Any] = {}
    value = "x"
    for name in LINEAR:
        linear_nodes, parts = parts_of(name, np.ascontiguousarray(tensors[f"{name}.weight"].T))
        initializers |= parts | {f"{name}.bias": tensors[f"{name}.bias"]}
        for node in linear_nodes:
            node.input[:] = [value if n == "@in" else n for n in node.input]
            node.output[:] = [f"{name}.y" if n == "@out" else n for n in node.output]
        nodes += linear_nodes
        nodes.append(helper.make_node("Add", [f"{name}.y", f"{name}.bias"], [f"{name}.z"]))
        value = f"{name}.z"
    initializers |= {n: x for n, x in tensors.items() if n.startswith(("head", "conv"))}
    nodes.append(helper.make_node("Gemm", [value, "head.weight", "head.bias"], ["y"], transB=1))
    nodes.append(helper.make_node("Conv", ["image", "conv.weight", "conv.bias"], ["z"]))
    return model_of(
        nodes, initializers, {"x": (None, WIDTH), "image": (None, 4, 8, 8)},
        {"y": (None, 96), "z": (None, 16, 6, 6)},
    )  # fmt: skip


HAND_EXPORTS: dict[str, Callable[[], onnx.ModelProto]] = {
    "4 bits": bits_model,
    "4 bits with zero points": lambda: bits_model(symmetric=False),
    "4 bits, blocks of 16": lambda: bits_model(block=16),
    "int8 per output": lambda: dequantized_model(TensorProto.INT8),
    "int8 per input": lambda: dequantized_model(TensorProto.INT8, axis=0),
    "int16": lambda: dequantized_model(TensorProto.INT16),
    "int4 in blocks of inputs": lambda: dequantized_model(TensorProto.INT4, 0, BLOCK),
    "int4 in blocks of outputs": lambda: dequantized_model(TensorProto.INT4, 1, BLOCK),
    "int2 in blocks": lambda: dequantized_model(TensorProto.INT2, 0, 16),
    "fp8_e4m3": lambda: dequantized_model(TensorProto.FLOAT8E4M3FN),
    "fp8_e5m2": lambda: dequantized_model(TensorProto.FLOAT8E5M2),
    "fp8_e4m3fnuz": lambda: dequantized_model(TensorProto.FLOAT8E4M3FNUZ),
    "fp8_e5m2fnuz": lambda: dequantized_model(TensorProto.FLOAT8E5M2FNUZ),
    "fp4 in blocks": lambda: dequantized_model(TensorProto.FLOAT4E2M1, 0, 16),
    "cast and multiplied": cast_model,
}
