"""Tensors of an ONNX model: their types, where their bytes are, and how these become values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.grids import FP4_UNIT, decode_e8m0, from_bytes, from_nibbles

Span = tuple[str, int, int]
"""A file, and the first byte and the end of a tensor in it."""


@dataclass(frozen=True)
class OnnxType:
    """A type of elements.

    stored   its dtype in the words of safetensors
    element  the element format that it is, if weights are quantized to it
    """

    name: str
    stored: str
    bits: int
    dtype: torch.dtype
    element: str = ""

    @property
    def is_float(self) -> bool:
        """Return True for a type of weights in high precision."""
        return self.stored in ("F16", "BF16", "F32", "F64")

    @property
    def middle(self) -> int:
        """Return the code that stands for zero in unsigned integers with symmetric values."""
        return 1 << (self.bits - 1) if self.element.startswith("uint") else 0


TYPES = {
    1: OnnxType("FLOAT", "F32", 32, torch.float32),
    2: OnnxType("UINT8", "U8", 8, torch.uint8, "uint8"),
    3: OnnxType("INT8", "I8", 8, torch.int8, "int8"),
    4: OnnxType("UINT16", "U16", 16, torch.uint16, "uint16"),
    5: OnnxType("INT16", "I16", 16, torch.int16, "int16"),
    6: OnnxType("INT32", "I32", 32, torch.int32, "int32"),
    7: OnnxType("INT64", "I64", 64, torch.int64),
    9: OnnxType("BOOL", "BOOL", 8, torch.bool),
    10: OnnxType("FLOAT16", "F16", 16, torch.float16),
    11: OnnxType("DOUBLE", "F64", 64, torch.float64),
    12: OnnxType("UINT32", "U32", 32, torch.uint32),
    13: OnnxType("UINT64", "U64", 64, torch.uint64),
    16: OnnxType("BFLOAT16", "BF16", 16, torch.bfloat16),
    17: OnnxType("FLOAT8E4M3FN", "F8_E4M3", 8, torch.float8_e4m3fn, "fp8_e4m3"),
    18: OnnxType("FLOAT8E4M3FNUZ", "F8_E4M3FNUZ", 8, torch.float8_e4m3fnuz, "fp8_e4m3fnuz"),
    19: OnnxType("FLOAT8E5M2", "F8_E5M2", 8, torch.float8_e5m2, "fp8_e5m2"),
    20: OnnxType("FLOAT8E5M2FNUZ", "F8_E5M2FNUZ", 8, torch.float8_e5m2fnuz, "fp8_e5m2fnuz"),
    21: OnnxType("UINT4", "U4", 4, torch.int8, "uint4"),
    22: OnnxType("INT4", "I4", 4, torch.int8, "int4"),
    23: OnnxType("FLOAT4E2M1", "F4_E2M1", 4, torch.int8, "fp4_e2m1"),
    24: OnnxType("FLOAT8E8M0", "F8_E8M0", 8, torch.uint8),
    25: OnnxType("UINT2", "U2", 2, torch.int8, "uint2"),
    26: OnnxType("INT2", "I2", 2, torch.int8, "int2"),
}
"""Types by their number in the format; texts and complex numbers are left out."""


@dataclass(frozen=True)
class OnnxTensor:
    """An initializer or constant: its bytes, or where these are."""

    name: str
    type: OnnxType
    shape: tuple[int, ...]
    source: bytes | Span

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Return the bytes that it takes by its type and shape."""
        return -(-self.count * self.type.bits // 8)

    @property
    def stored_size(self) -> int:
        """Return the bytes that there are."""
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source[2] - self.source[1]

    def span(self, read: Callable[[str, int, int], bytes], first: int, last: int) -> Tensor:
        """Read its values from one number to another; those of FLOAT4E2M1 are in units of 0.5.

        read   reads a range of a file
        """
        bits = self.type.bits
        start, stop = first * bits // 8, -(-last * bits // 8)
        if isinstance(self.source, bytes):
            data = self.source[start:stop]
        else:
            file, begin, _ = self.source
            data = read(file, begin + start, begin + stop) if stop > start else b""
        if len(data) != stop - start:
            raise ValueError(f"it has {len(data):,} of {stop - start:,} bytes")
        before = first - start * 8 // bits
        return _decoded(data, self.type, before + last - first)[before:]


def _decoded(data: bytes, kind: OnnxType, count: int) -> Tensor:
    """Return so many values in bytes of a type."""
    if not count:
        return torch.zeros(0, dtype=kind.dtype)
    if kind.bits >= 8:
        values = torch.frombuffer(bytearray(data), dtype=kind.dtype)
        return decode_e8m0(values) if kind.name == "FLOAT8E8M0" else values
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if kind.element == "fp4_e2m1":
        return from_nibbles(packed)[:count]
    codes = unpacked_codes(packed, kind.bits)[:count]
    if kind.element.startswith("uint"):
        return codes
    half = 1 << (kind.bits - 1)
    return (codes ^ half) - half


def unpacked_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes of bytes as `from_bytes` does, those of few bits as int8."""
    if bits == 8:
        return packed
    return from_bytes(packed.view(torch.uint8), bits).view(torch.int8)


def unit_of(kind: OnnxType) -> float:
    """Return the unit in which the values of a type are read."""
    return FP4_UNIT if kind.element == "fp4_e2m1" else 1.0
