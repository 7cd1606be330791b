"""Weights of HQQ: codes in a matrix of groups, whose packed parts lie a share of its rows apart.

A word of k codes holds those of rows i, i + n/k, i + 2n/k, … of that matrix, the first in its
highest bits; 3-bit codes are ten in a word of 32 bits. A value is (code - zero) x scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.tensor_types import DTYPES
from qgate.checkpoints.weight_parts import Packing, Parts
from qgate.errors import QgateError

WORDS = {torch.uint8: 8, torch.int32: 32}
BITS = (1, 2, 3, 4, 8)
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
    rows, columns = _sides(parts["shape"])
    if parts.rows:
        return _decode_span(parts, _bits(parts), columns)
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


def _decode_span(parts: Parts, bits: int, columns: int) -> QuantizedWeight:
    """Decode some rows, of which each group has the word that holds its codes."""
    words, scale = parts["W_q"], parts["scale"].float()
    group = words.shape[1]
    in_row = columns // group
    numbers = parts.start * in_row + torch.arange(len(words))
    last = WORDS[words.dtype] // bits - 1
    shifts = bits * (last - numbers // parts.shapes["W_q"][0])
    codes = words >> shifts.to(words.dtype)[:, None] & (1 << bits) - 1
    return QuantizedWeight(
        f"uint{bits}",
        codes.to(torch.uint8).reshape(-1, columns),
        scale.reshape(-1, in_row),
        (1, group),
        parts["zero"].float().reshape(-1, in_row),
    )


def count_rows(checkpoint: Checkpoint, parts: Mapping[str, StoredEntry]) -> int:
    """Count the rows of a weight; 0 for one that is decoded, or refused, as a whole."""
    words, groups = parts["W_q"], math.prod(parts["scale"].shape)
    facts = {name: checkpoint.read(parts[name].name) for name in ("shape", "axis", "nbits")
             if name in parts}  # fmt: skip
    rows, columns = _sides(facts["shape"])
    if "nbits" not in facts or "axis" not in facts or len(words.shape) != 2:
        return 0
    bits, axis = int(facts["nbits"]), int(facts["axis"])
    if axis != 1 or bits not in BITS or math.prod(parts["zero"].shape) != groups:
        return 0
    group, in_word = words.shape[1], (32 if words.dtype == "I32" else 8) // bits
    fits = groups * group == rows * columns and columns % max(1, group) == 0
    is_whole = words.shape[0] == -(-groups // max(1, in_word))
    return rows if fits and is_whole and rows > 1 else 0


def _sides(shape: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a weight."""
    sides = [int(side) for side in shape.reshape(-1).tolist()]
    return math.prod(sides[:-1]), sides[-1]


def _bits(parts: Parts) -> int:
    stated = parts.get("nbits")
    bits = parts.bits or 4 if stated is None else int(stated)
    if bits not in BITS:
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
    by_rows=("scale", "zero", "W_q"),
    scattered=("W_q",),
    count_rows=count_rows,
)
