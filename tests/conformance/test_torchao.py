"""Tensors that torchao packs on a CPU are decoded to the values that it reads itself."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import qgate
from qgate.formats.options import Options
from tests.conformance import packed
from tests.conformance.packed import FULL_RANGE, Packed, weight
from tests.conformance.reading import nibbles
from tests.formats import oracles

WORKFLOWS = "quantization.quantize_.workflows"
PER_ROW: Options = {"granularity": "channel", "axis": 0}
PER_TENSOR: Options = {"granularity": "tensor"}
MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1")
FLOAT8 = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}
CHECKED = {
    "int8": 10,
    "int4": 6,
    "int2": 4,
    **dict.fromkeys(FLOAT8, 8),
    **dict.fromkeys(MX, 8),
    "nvfp4": 3,
}
"""The tensors of each format, encoded and decoded."""
REFUSED = {
    "integers of 1, 3, 5, 6 or 7 bits": ("IntxUnpackedToInt8Tensor",),
    "values from a code book": ("NF4Tensor",),
    "2:4 sparsity": (
        "Float8Sparse2x4_1DData1DMetadataTensor", "Float8Sparse2x4_2DData2DMetadataTensor",
        "Sparse2x4CUTLASSFloat8Tensor",
    ),
    "torchao packs it for accelerators only": (
        "Int4Tensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4TilePackedTo4dTensor",
        "IntxOpaqueTensor",
    ),
}  # fmt: skip
"""The tensors that are not compared, by reason."""


def torchao(module: str) -> Any:
    return importlib.import_module(f"torchao.{module}")


def int8_tensor(granularity: str, mapping: str = "SYMMETRIC") -> Packed:
    scale_granularity = getattr(torchao("quantization.granularity"), granularity)()
    mapping_type = torchao("quantization.quant_primitives").MappingType[mapping]
    tensor = torchao(WORKFLOWS).Int8Tensor.from_hp(
        weight(), scale_granularity, mapping_type=mapping_type
    )
    shape, options = ((-1,), PER_ROW) if granularity == "PerRow" else ((), PER_TENSOR)
    return Packed(
        "int8",
        tensor.qdata,
        tensor.scale.reshape(shape),
        tensor.dequantize(),
        options | FULL_RANGE,
        zero_points=tensor.zero_point.reshape(shape),
    )


def intx_tensor(bits: int, group: int, mapping: str = "SYMMETRIC") -> Packed:
    mapping_type = torchao("quantization.quant_primitives").MappingType[mapping]
    tensor = torchao(WORKFLOWS).IntxUnpackedToInt8Tensor.from_hp(
        weight(), (1, group), getattr(torch, f"int{bits}"), mapping_type=mapping_type
    )
    return Packed(
        f"int{bits}",
        tensor.qdata,
        tensor.scale,
        tensor.dequantize(),
        {"granularity": "block", "block": group, "narrow": False},
        zero_points=tensor.zero_point,
    )


def float8_tensor(fmt: str, granularity: str) -> Packed:
    scale_granularity = getattr(torchao("quantization.granularity"), granularity)()
    tensor = torchao(WORKFLOWS).Float8Tensor.from_hp(weight(), FLOAT8[fmt], scale_granularity)
    shape, options = ((-1,), PER_ROW) if granularity == "PerRow" else ((), PER_TENSOR)
    codes = tensor.qdata.view(torch.uint8)
    return Packed(fmt, codes, tensor.scale.reshape(shape), tensor.dequantize(), options)


def float8_tiles(fmt: str, rows: int, columns: int) -> Packed:
    per_block = torchao("quantization.granularity").PerBlock([rows, columns])
    tensor = torchao(WORKFLOWS).Float8Tensor.from_hp(weight(), FLOAT8[fmt], per_block)
    options: Options = {"granularity": "block", "block": (rows, columns)}
    codes = tensor.qdata.view(torch.uint8)
    return Packed(fmt, codes, tensor.scale, tensor.dequantize(), options)


def mx(fmt: str, rule: str) -> Packed:
    tensor = oracles.torchao_mx(weight(), qgate.formats.get(fmt).element.name, rule)
    assert tensor is not None
    codes = tensor.qdata.view(torch.uint8)
    codes = nibbles(codes) if fmt == "mxfp4_e2m1" else codes
    scales = tensor.scale.view(torch.uint8)
    return Packed(fmt, codes, scales, tensor.dequantize(), encode_options={"scale_rule": rule})


def nvfp4(with_tensor_scale: bool) -> Packed:
    module = torchao("prototype.mx_formats.nvfp4_tensor")
    w = weight()
    scale = module.per_tensor_amax_to_scale(w.abs().max()) if with_tensor_scale else None
    tensor = module.NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale)
    return Packed(
        "nvfp4",
        nibbles(tensor.qdata),
        tensor.scale.view(torch.uint8),
        tensor.dequantize(),
        tensor_scale=torch.tensor(1.0) if scale is None else scale,
    )


Packing = Callable[[], Packed]
ENCODED: dict[str, Packing] = {
    "int8 tensor": lambda: int8_tensor("PerTensor"),
    "int8 rows": lambda: int8_tensor("PerRow"),
    "int8 tensor, asymmetric": lambda: int8_tensor("PerTensor", "ASYMMETRIC"),
    "int8 rows, asymmetric": lambda: int8_tensor("PerRow", "ASYMMETRIC"),
    "int4 groups of 32, asymmetric": lambda: intx_tensor(4, 32, "ASYMMETRIC"),
    "int2 rows, asymmetric": lambda: intx_tensor(2, 256, "ASYMMETRIC"),
    "int8 groups of 64": lambda: intx_tensor(8, 64),
    "int4 groups of 32": lambda: intx_tensor(4, 32),
    "int2 groups of 32": lambda: intx_tensor(2, 32),
    "int4 rows": lambda: intx_tensor(4, 256),
    **{
        f"{fmt} {granularity}": lambda fmt=fmt, granularity=granularity: float8_tensor(
            fmt, granularity
        )
        for fmt in FLOAT8
        for granularity in ("PerTensor", "PerRow")
    },
    **{
        f"{fmt} tiles of {rows}x128": lambda fmt=fmt, rows=rows: float8_tiles(fmt, rows, 128)
        for fmt in FLOAT8
        for rows in (1, 16)
    },
    **{
        f"{fmt} {rule}": lambda fmt=fmt, rule=rule: mx(fmt, rule)
        for fmt in MX
        for rule in ("floor", "ceil", "even", "rceil")
    },
    "nvfp4": lambda: nvfp4(with_tensor_scale=True),
}
PACKINGS: dict[str, Packing] = {
    **ENCODED,
    # qgate always has a scale of the tensor, and decodes this with 1.
    "nvfp4 without a scale of the tensor": lambda: nvfp4(with_tensor_scale=False),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_decoded(packing: str) -> None:
    packed.check_decoded(PACKINGS[packing]())


@pytest.mark.parametrize("packing", ENCODED)
def test_encoded(packing: str) -> None:
    result = ENCODED[packing]()
    packed.check_encoded(result)
    if result.format in FLOAT8:
        packed.assert_own_scales(result)


def test_every_tensor_is_used_or_refused() -> None:
    names = {name for name in torchao(WORKFLOWS).__all__ if name.endswith("Tensor")}
    refused = {name for names in REFUSED.values() for name in names}
    assert names == refused | {"Int8Tensor", "Float8Tensor"}
    formats = [packing().format for packing in (*PACKINGS.values(), *ENCODED.values())]
    assert Counter(formats) == CHECKED
