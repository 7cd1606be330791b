"""Weights of HQQ: codes in a matrix of groups, whose packed parts lie a share of its rows apart.

A word of k codes holds those of rows i, i + n/k, i + 2n/k, … of that matrix, the first in its
highest bits; 3-bit codes are ten in a word of 32 bits. A value is (code - zero) x scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.tensor_types import DTYPES
from qgate.checkpoints.weight_parts import Packing, Parts
from qgate.errors import QgateError

WORDS = {torch.uint8: 8, torch.int32: 32}
_ANY = tuple(DTYPES)
_FLOATS = ("F32", "BF16", "F16")
OPTIONAL = (
    "nbits", "group_size", "axis", "packing", "view_as_float", "unpack_view_dtype", "channel_wise",
    "optimize", "round_zero", "compute_dtype", "offload_meta", "stores_quant_config", "quant_scale",
    "quant_zero", "max_v", "min_v",
)  # fmt: skip


def decode_hqq(parts: Parts) -> QuantizedWeight:
    """Decode a weight from its tensors; groups of columns alone, which HQQ calls axis 1."""
    scale, words = parts["scale"].float(), parts["W_q"]
    sides = [int(side) for side in parts["shape"].reshape(-1).tolist()]
    rows, columns = math.prod(sides[:-1]), sides[-1]
    axis = parts.get("axis")
    if (axis is not None and int(axis) == 0) or (scale.dim() == 2 and 1 == len(scale) < rows):
        raise QgateError(
            "its groups are columns of HQQ's axis 0, which are not read: quantize with axis=1"
        )
    bits = _bits(parts)
    codes = _codes(words, bits)
    groups = scale.numel()
    group = rows * columns // max(1, groups)
    count = rows * columns // max(1, words.shape[-1])
    if words.dim() != 2 or groups * group != rows * columns or columns % max(1, group):
        raise QgateError(f"its {groups:,} scales fit no groups of a weight of {rows} x {columns}")
    if not count <= len(codes) < count + 32 // bits or count * words.shape[1] != rows * columns:
        raise QgateError(
            f"its W_q has {codes.numel():,} codes of {bits} bits, and its shape {rows * columns:,}"
        )
    return QuantizedWeight(
        f"uint{bits}",
        codes[:count].reshape(rows, columns),
        scale.reshape(rows, -1),
        (1, group),
        parts["zero"].float().reshape(rows, -1),
    )


def _bits(parts: Parts) -> int:
    stated = parts.get("nbits")
    bits = parts.bits or 4 if stated is None else int(stated)
    if bits not in (1, 2, 3, 4, 8):
        raise QgateError(f"its nbits is {bits}; 1, 2, 3, 4 and 8 are read")
    return bits


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words, the first part of the rows in the highest bits."""
    count = WORDS[words.dtype] // bits
    mask = (1 << bits) - 1
    shifts = (bits * number for number in reversed(range(count)))
    return torch.cat([(words >> shift & mask).to(torch.uint8) for shift in shifts])


HQQ = Packing(
    "HQQ",
    decode_hqq,
    {
        "W_q": ("U8", "I32"),
        "scale": _FLOATS,
        "zero": _FLOATS,
        "shape": ("I64", "I32"),
        **dict.fromkeys(OPTIONAL, _ANY),
    },
    optional=OPTIONAL,
)
