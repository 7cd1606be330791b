"""Faults of ONNX exporters, planted into right exports: what was changed, and words of the finding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tests.checkpoints.faults import ExportFault
from tests.checkpoints.onnx_exports import Array

UP = "layers.1.up"
SQUARE = "square"


def _tensor(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def _node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if name in node.input)


def _change(name: str, change: Callable[[Array], Array]) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        tensor = _tensor(model, name)
        before = numpy_helper.to_array(tensor)
        after = np.ascontiguousarray(change(before.copy()).astype(before.dtype))
        tensor.CopyFrom(numpy_helper.from_array(after, name))

    return plant


def _change_bytes(name: str, change: Callable[[Array], Array]) -> Callable[[onnx.ModelProto], None]:
    """Change the bytes of a tensor as they are stored."""

    def plant(model: onnx.ModelProto) -> None:
        tensor = _tensor(model, name)
        tensor.raw_data = change(np.frombuffer(tensor.raw_data, np.uint8)).tobytes()

    return plant


def _swap_nibbles(x: Array) -> Array:
    return x >> 4 | x << 4


def _first_to(value: float) -> Callable[[Array], Array]:
    def change(x: Array) -> Array:
        x.reshape(-1)[:3] = value
        return x

    return change


def _axis(name: str, axis: int) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        next(a for a in _node(model, name).attribute if a.name == "axis").i = axis

    return plant


def _retype(name: str, kind: int) -> Callable[[onnx.ModelProto], None]:
    return lambda model: setattr(_tensor(model, name), "data_type", kind)


def _drop_input(name: str, place: int) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        del _node(model, name).input[place:]

    return plant


def _swap(names: tuple[str, str], *others: tuple[str, str]) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        for first, second in (names, *others):
            one, other = _tensor(model, first), _tensor(model, second)
            one.raw_data, other.raw_data = other.raw_data, one.raw_data

    return plant


def _copy(*pairs: tuple[str, str]) -> Callable[[onnx.ModelProto], None]:
    """Write tensors of one layer over those of another."""

    def plant(model: onnx.ModelProto) -> None:
        for source, target in pairs:
            _tensor(model, target).raw_data = _tensor(model, source).raw_data

    return plant


def _roll_blocks(x: Array) -> Array:
    return np.roll(x.reshape(128, 2, -1), 1, 1).reshape(x.shape)


INT8, BITS, BLOCKS = "int8 per output", "4 bits", "int4 in blocks of inputs"
CODES, SCALE = f"{UP}.weight_quantized", f"{UP}.weight_scale"
FAULTS = (
    ExportFault("scales on the wrong axis", INT8, f"{SQUARE}.weight", "scales stand along the wrong axis",
                _axis(f"{SQUARE}.weight_quantized", 0)),
    ExportFault("scales on an axis of another length", INT8, f"{UP}.weight",
                "128 scales stand on axis 0, which has 64", _axis(CODES, 0)),
    ExportFault("scales of blocks transposed", BLOCKS, f"{SQUARE}.weight", "scales stand in the order of columns",
                _change(f"{SQUARE}.weight_scale", lambda x: x.T.reshape(x.shape))),
    ExportFault("scales of the other shape", BLOCKS, f"{UP}.weight", r"scales of shape \(128, 2\) do not fit blocks of 32",
                _change(f"{UP}.weight_scale", lambda x: x.T)),
    ExportFault("zero points left out", "dynamic unsigned", f"{UP}.weight", "zero points are missing",
                _drop_input(CODES, 3)),
    ExportFault("zero points of zero", "QDQ unsigned", f"{UP}.weight", "zero points are missing",
                _change(f"{UP}.weight_zero_point", np.zeros_like)),
    ExportFault("zero points off by one", "4 bits with zero points", f"{UP}.weight", "zero points are 1 too high",
                _change(f"{UP}.weight_zero_points", lambda x: x + 0x11)),
    ExportFault("zero points wrong", "QDQ unsigned", f"{UP}.weight", "zero points are wrong",
                _change(f"{UP}.weight_zero_point", lambda x: x - 40)),
    ExportFault("zero points left out of 4 bits", "4 bits with zero points", f"{UP}.weight", "zero points are ",
                _drop_input(f"{UP}.weight_Q4", 3)),
    ExportFault("int8 read as uint8", INT8, f"{UP}.weight", "codes are read as unsigned and are not",
                _retype(CODES, TensorProto.UINT8)),
    ExportFault("uint8 read as int8", INT8, f"{UP}.weight", "codes are read as signed and are not",
                _change_bytes(CODES, lambda x: x ^ 0x80)),
    ExportFault("never written", BITS, f"{UP}.weight", "all values are zero",
                _change(f"{UP}.weight_Q4", lambda x: np.full_like(x, 0x88))),
    ExportFault("never written, with scales", INT8, f"{UP}.weight", "all values are zero",
                _change(CODES, np.zeros_like)),
    ExportFault("nibbles swapped", BITS, f"{UP}.weight", r"neighboring codes are swapped \(the order of nibbles\)",
                _change(f"{UP}.weight_Q4", _swap_nibbles)),
    ExportFault("nibbles of DequantizeLinear swapped", BLOCKS, f"{UP}.weight", "neighboring codes are swapped",
                _change_bytes(CODES, _swap_nibbles)),
    ExportFault("NaN scales", INT8, f"{UP}.weight", "3 of 128 scales are NaN or infinite", _change(SCALE, _first_to(np.nan))),
    ExportFault("infinite scales", BITS, f"{UP}.weight", "3 of 256 scales are NaN or infinite",
                _change(f"{UP}.weight_scales", _first_to(np.inf))),
    ExportFault("scales of zero", INT8, f"{UP}.weight", "3 of 128 scales are zero", _change(SCALE, _first_to(0))),
    ExportFault("negative scales", INT8, f"{UP}.weight", "128 of 128 scales are negative", _change(SCALE, np.negative)),
    ExportFault("scales doubled", BITS, f"{UP}.weight", "all scales are 2 times too high",
                _change(f"{UP}.weight_scales", lambda x: x * 2)),
    ExportFault("scales doubled in a chain", "cast and multiplied", UP, "all scales are 2 times too high",
                _change(f"{UP}_scale", lambda x: x * 2)),
    ExportFault("scales inverted", INT8, f"{UP}.weight", "scales are stored inverted", _change(SCALE, lambda x: 1 / x)),
    ExportFault("blocks in another order", BITS, f"{UP}.weight", "scales of neighboring groups are swapped",
                _change(f"{UP}.weight_scales", lambda x: x.reshape(-1, 2)[:, ::-1].reshape(-1))),
    ExportFault("codes of blocks in another order", BITS, f"{UP}.weight",
                "codes of each half of the columns are in the other half",
                _change(f"{UP}.weight_Q4", _roll_blocks)),
    ExportFault("layers swapped", INT8, f"{UP}.weight", r"it was made from layers\.[01]\.up\.weight, not from",
                _swap(("layers.0.up.weight_quantized", CODES), ("layers.0.up.weight_scale", SCALE))),
    ExportFault("a layer written twice", INT8, f"{UP}.weight", r"it was made from layers\.0\.up\.weight, not from",
                _copy(("layers.0.up.weight_quantized", CODES), ("layers.0.up.weight_scale", SCALE))),
    ExportFault("a layer without a name written twice", "cast and multiplied", f"{UP}.weight",
                r"it is in the parent alone; layers\.[01]\.up and layers\.[01]\.up were made from layers\.0\.up",
                _copy(("layers.0.up_q", f"{UP}_q"), ("layers.0.up_scale", f"{UP}_scale"))),
    ExportFault("not transposed", INT8, f"{SQUARE}.weight", r"its rows and columns are exchanged",
                _change(f"{SQUARE}.weight_quantized", lambda x: x.T)),
    ExportFault("bias doubled", "QOperator per channel", "head.bias", "codes are not the nearest|all scales are",
                _change("head.bias_quantized", lambda x: x * 2)),
    ExportFault("bias changed", INT8, f"{UP}.bias", "it is not quantized and not the parent's", _change(f"{UP}.bias", lambda x: x * 1.1)),
)  # fmt: skip
