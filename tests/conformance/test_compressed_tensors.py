"""Weights that compressed-tensors packed are decoded to the values that it reads itself."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import qgate
from qgate.formats.options import Options
from tests.conformance import packed
from tests.conformance.packed import FULL_RANGE, Packed
from tests.conformance.reading import fields, nibbles

PER_CHANNEL: Options = {"granularity": "channel", "axis": 0}
PER_TENSOR: Options = {"granularity": "tensor"}


@dataclass(frozen=True)
class Scheme:
    """A scheme of compressed-tensors, and the format and options that are the same in qgate.

    `encode_options` make the scales of a block format; `own_scales` says that those of an element
    format are qgate's own, amax / max.
    """

    label: str
    compressor: str
    arguments: dict[str, Any]
    format: str
    options: Options = field(default_factory=Options)
    encode_options: Options = field(default_factory=Options)
    own_scales: bool = False


def groups_of(size: int) -> Options:
    return {"granularity": "block", "block": size}


def integer(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **more}


def floating(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


def microscaling(bits: int) -> dict[str, Any]:
    return floating(bits, "group", group_size=32, scale_dtype=torch.uint8)


ASYMMETRIC = {"symmetric": False}
INT8_CHANNEL = integer(8, "channel")
SCHEMES = (
    Scheme("int8 tensor", "int-quantized", integer(8, "tensor"), "int8", PER_TENSOR | FULL_RANGE),
    Scheme("int8 channel", "int-quantized", INT8_CHANNEL, "int8", PER_CHANNEL | FULL_RANGE),
    Scheme("int8 channel, packed", "pack-quantized", INT8_CHANNEL, "int8", PER_CHANNEL | FULL_RANGE),
    Scheme(
        "int8 groups of 128", "pack-quantized", integer(8, "group", group_size=128), "int8",
        groups_of(128) | FULL_RANGE,
    ),
    Scheme("int4 channel", "pack-quantized", integer(4, "channel"), "int4", PER_CHANNEL | FULL_RANGE),
    Scheme(
        "int4 groups of 32", "pack-quantized", integer(4, "group", group_size=32), "int4",
        groups_of(32) | FULL_RANGE,
    ),
    Scheme("int2 channel", "pack-quantized", integer(2, "channel"), "int2", PER_CHANNEL | FULL_RANGE),
    Scheme("int8 channel, asymmetric", "int-quantized", INT8_CHANNEL | ASYMMETRIC, "int8", PER_CHANNEL | FULL_RANGE),
    Scheme(
        "int4 channel, asymmetric", "pack-quantized", integer(4, "channel") | ASYMMETRIC, "int4",
        PER_CHANNEL | FULL_RANGE,
    ),
    Scheme(
        "int4 groups of 32, asymmetric", "pack-quantized",
        integer(4, "group", group_size=32) | ASYMMETRIC, "int4", groups_of(32) | FULL_RANGE,
    ),
    Scheme("fp8 tensor", "float-quantized", floating(8, "tensor"), "fp8_e4m3", PER_TENSOR, own_scales=True),
    Scheme("fp8 channel", "float-quantized", floating(8, "channel"), "fp8_e4m3", PER_CHANNEL, own_scales=True),
    Scheme(
        "fp8 groups of 64", "float-quantized", floating(8, "group", group_size=64), "fp8_e4m3",
        groups_of(64), own_scales=True,
    ),
    Scheme(
        "fp8 tiles of 16x128", "float-quantized", floating(8, "block", block_structure=[16, 128]),
        "fp8_e4m3", {"granularity": "block", "block": (16, 128)}, own_scales=True,
    ),
    Scheme("mxfp4", "mxfp4-pack-quantized", microscaling(4), "mxfp4_e2m1", encode_options={"scale_rule": "even"}),
    Scheme("mxfp6", "mxfp6-pack-quantized", microscaling(6), "mxfp6_e2m3", encode_options={"scale_rule": "even"}),
    Scheme("mxfp8", "mxfp8-quantized", microscaling(8), "mxfp8_e4m3", encode_options={"scale_rule": "rceil"}),
    Scheme(
        "nvfp4", "nvfp4-pack-quantized",
        floating(4, "tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn), "nvfp4",
    ),
)  # fmt: skip
REFUSED = {
    "integers of 1, 3, 5, 6 or 7 bits": ("pack-quantized",),
    "not quantized": ("dense",),
}
"""What a compressor stores and no format of qgate expresses, by reason."""
CHECKED = {
    "int8": 10,
    "int4": 8,
    "int2": 2,
    "fp8_e4m3": 8,
    "mxfp4_e2m1": 2,
    "mxfp6_e2m3": 2,
    "mxfp8_e4m3": 2,
    "nvfp4": 2,
}
"""The schemes of each format, encoded and decoded."""

by_label = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)


def library(module: str = "compressors") -> Any:
    """Import compressed-tensors, which takes seconds, only where a test runs."""
    return importlib.import_module(f"compressed_tensors.{module}")


def compress(scheme: Scheme) -> tuple[dict[str, Tensor], Tensor]:
    """Return what the library stores of the weight, and the weight that it reads from that."""
    quantization, w = library("quantization"), packed.weight()
    utils = library("quantization.utils")
    arguments = quantization.QuantizationArgs(**scheme.arguments)
    state: dict[str, Tensor] = {"weight": w}
    if arguments.strategy == "tensor_group":
        state["weight_global_scale"] = utils.generate_gparam(*w.aminmax())
    if arguments.strategy == "tensor":
        ends = w.aminmax()
    elif arguments.strategy == "channel":
        ends = w.aminmax(dim=1, keepdim=True)
    elif arguments.strategy == "block":
        rows, columns = arguments.block_structure
        ends = w.unfold(0, rows, rows).unfold(1, columns, columns).flatten(-2).aminmax(dim=-1)
    else:
        ends = w.unflatten(1, (-1, arguments.group_size)).aminmax(dim=-1)
    state["weight_scale"], state["weight_zero_point"] = utils.calculate_qparams(
        *ends, arguments, global_scale=state.get("weight_global_scale")
    )
    whole = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = library().BaseCompressor.get_value_from_registry(scheme.compressor)
    stored = compressor.compress(state, whole)
    return stored, compressor.decompress(stored, whole)["weight"]


def read(scheme: Scheme) -> Packed:
    """Read the stored bytes without the library's help."""
    stored, values = compress(scheme)
    scales, bits = stored["weight_scale"], scheme.arguments["num_bits"]
    if scheme.options.get("granularity") in ("tensor", "channel"):
        scales = scales.reshape(-1 if "axis" in scheme.options else ())
    codes = stored.get("weight_packed")
    if codes is None:
        codes = stored["weight"]
        codes = codes if codes.dtype == torch.int8 else codes.view(torch.uint8)
    elif scheme.arguments["type"] == "int":
        codes = (fields(codes, bits) - 2 ** (bits - 1)).to(torch.int8)
    else:
        codes = nibbles(codes) if bits == 4 else fields(codes, bits).to(torch.uint8)
    zero_points = stored.get("weight_zero_point")
    if zero_points is not None:
        if "weight_packed" in stored:  # along the first axis
            rows = fields(zero_points.T.contiguous(), bits) - 2 ** (bits - 1)
            zero_points = rows.T.to(torch.int8)
        zero_points = zero_points.reshape(scales.shape)
    global_scale = stored.get("weight_global_scale")
    return Packed(
        scheme.format,
        codes,
        scales if scales.dtype == torch.float32 else scales.view(torch.uint8),
        values,
        scheme.options,
        scheme.encode_options,
        None if global_scale is None else 1 / global_scale.reshape(()),
        zero_points,
    )


@by_label
def test_decoded(scheme: Scheme) -> None:
    packed.check_decoded(read(scheme))


@by_label
def test_encoded(scheme: Scheme) -> None:
    result = read(scheme)
    packed.check_encoded(result)
    if scheme.own_scales:
        packed.assert_own_scales(result)


def test_mxfp8_scales_differ_from_rceil_at_the_largest_value() -> None:
    x = torch.tensor([447.99997, 448.0, 448.00003])
    theirs = library("quantization.utils").generate_mx_scales(x, num_bits=8)
    ours = qgate.encode(x[:, None], "mxfp8_e4m3", block=1, scale_rule="rceil").scales
    assert ours is not None
    assert theirs.tolist() == [127, 128, 128]
    assert ours.flatten().tolist() == [127, 127, 128]


def test_every_compressor_is_used_or_refused() -> None:
    used = {scheme.compressor for scheme in SCHEMES}
    refused = {name for names in REFUSED.values() for name in names}
    # int-quantized and float-quantized are other names of naive-quantized.
    registered = {*library().BaseCompressor.registered_names()} - {"naive-quantized"}
    assert registered == used | refused
    assert Counter({name: n // 2 for name, n in CHECKED.items()}) == Counter(
        s.format for s in SCHEMES
    )
