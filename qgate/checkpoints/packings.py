"""Packings of quantized weights: which tensors belong to one, and how they are decoded.

A packing is one entry of PACKINGS: the endings of its tensors, and a function. Names of tensors and
their dtypes tell which it is; the configuration says what was meant, and is compared later.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from qgate.checkpoints.bnb_weights import PACKINGS_OF_4_BITS
from qgate.checkpoints.grids import (
    AWQ_ORDER,
    FP4_UNIT,
    QuantizedWeight,
    as_rows,
    decode_e8m0,
    fp8_name,
    from_nibbles,
    from_words,
    widen,
)
from qgate.checkpoints.hqq_weights import HQQ
from qgate.checkpoints.recipes import Recipe, gptq_zero_offset
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.tiles import Tile, counts, declared_tile, likely_tiles
from qgate.checkpoints.weight_parts import MisfitError, Packing, Parts, StoredWeight
from qgate.errors import QgateError, first_line

# Packings ----------------------------------------------------------------------------------------


def _packed_integers(parts: Parts) -> QuantizedWeight:
    """Decode pack-quantized of compressed-tensors: offset binary integers in words of 32 bits."""
    columns = int(parts["weight_shape"].reshape(-1)[-1])
    words = as_rows(parts["weight_packed"])
    bits = parts.bits or _bits_of(words.shape[-1], columns, parts.name)
    elements = _signed(from_words(words, bits, columns), bits)
    shape = len(elements), elements.shape[1]
    scales, tile = parts.fit_tile("weight_scale", parts["weight_scale"].float(), shape)
    zeros = None
    packed = parts.get("weight_zero_point")
    if packed is not None:
        # Packed along the rows, so that every column has whole words.
        unpacked = from_words(packed.T, bits, scales.shape[0]).T
        zeros = _signed(unpacked, bits).float()
    return QuantizedWeight(f"int{bits}", elements, scales, tile, zeros)


def _signed(codes: Tensor, bits: int) -> Tensor:
    """Return the integers of offset binary codes; those of 8 bits wrap around."""
    offset = 1 << (bits - 1)
    return codes.view(torch.int8) - (offset if bits < 8 else -offset)


def _bits_of(words: int, columns: int, name: str) -> int:
    for bits in (4, 8, 2):
        if -(-columns // (32 // bits)) == words:
            return bits
    raise QgateError(f"{name}: {words} words do not hold {columns} integers of 2, 4 or 8 bits.")


def _plain(parts: Parts) -> QuantizedWeight:
    """Decode integers or FP8 beside scales by which they are multiplied."""
    weight = parts["weight"]
    ending = "weight_scale" if "weight_scale" in parts.tensors else "weight_scale_inv"
    shape = len(as_rows(weight)), weight.shape[-1]
    element = {torch.int8: "int8", torch.uint8: "uint8"}.get(weight.dtype) or fp8_name(weight)
    scales, tile = parts.fit_tile(ending, parts[ending].float(), shape)
    zeros = parts.get("weight_zero_point")
    return QuantizedWeight(
        element,
        as_rows(weight),
        scales,
        tile,
        None if zeros is None else parts.fit_tile("weight_zero_point", zeros.float(), shape)[0],
    )


def _nvfp4(parts: Parts) -> QuantizedWeight:
    """Decode FP4 in blocks of 16 with E4M3 scales and one more scale of the tensor."""
    packed = parts.get("weight_packed", "weight")
    assert packed is not None
    codes = from_nibbles(as_rows(packed))
    stored = parts["weight_scale"]
    divisor = parts.get("weight_global_scale")
    whole = parts["weight_scale_2"].float() if divisor is None else 1 / divisor.float()
    shape = len(codes), codes.shape[1]
    scales, tile = parts.fit_tile("weight_scale", widen(as_rows(stored)), shape)
    return QuantizedWeight(
        "fp4_e2m1", codes, scales * whole.reshape(-1, 1), tile, scale_codes=as_rows(stored),
        unit=FP4_UNIT,
    )  # fmt: skip


def _mxfp4(parts: Parts) -> QuantizedWeight:
    """Decode FP4 in blocks of 32 with E8M0 scales."""
    blocks = parts.get("weight_packed", "blocks")
    stored = parts.get("weight_scale", "scales")
    assert blocks is not None
    assert stored is not None
    stored = stored.view(torch.uint8)
    codes = from_nibbles(blocks.reshape(stored.numel() // stored.shape[-1], -1))
    ending = "weight_scale" if "weight_scale" in parts.tensors else "scales"
    shape = len(codes), codes.shape[1]
    scales, tile = parts.fit_tile(ending, decode_e8m0(as_rows(stored)), shape)
    return QuantizedWeight(
        "fp4_e2m1", codes, scales, tile, scale_codes=as_rows(stored), unit=FP4_UNIT
    )


def _gptq(parts: Parts) -> QuantizedWeight:
    """Decode GPTQ: words along the inputs, groups by `g_idx`.

    Zero points are stored less one, those of version 2 as they are.
    """
    scales = parts["scales"].float()
    groups, rows = scales.shape
    words = parts["qweight"]
    bits = parts.bits or 4
    columns = words.shape[0] * 32 // bits
    elements = from_words(words.T, bits, columns)
    zeros = from_words(parts["qzeros"], bits, rows) + parts.zero_offset & (1 << bits) - 1
    index = parts.get("g_idx")
    order = None if index is None else _order_of_groups(index, groups, parts.name)
    return QuantizedWeight(
        f"uint{bits}", elements, scales.T.contiguous(), (1, columns // groups),
        zeros.T.float().contiguous(), order=order,
    )  # fmt: skip


def _order_of_groups(index: Tensor, groups: int, name: str) -> Tensor | None:
    """Return the columns in the order of their groups, None if they stand in it."""
    size = -(-len(index) // groups)
    is_enough = len(index) > (groups - 1) * size
    if is_enough and torch.equal(index, torch.arange(len(index), dtype=index.dtype) // size):
        return None
    low, high = int(index.min()), int(index.max())
    is_whole = 0 <= low <= high < groups and is_enough
    if not is_whole or not bool((index.long().bincount(minlength=groups)[:-1] == size).all()):
        raise QgateError(
            f"{name}: g_idx is no list of {groups} groups of {size} columns; it names groups {low} "
            f"to {high}."
        )
    return None if bool((index.diff() >= 0).all()) else index.argsort(stable=True)


def _awq(parts: Parts) -> QuantizedWeight:
    """Decode AWQ: eight outputs in a word, in an order of their own."""
    scales = parts["scales"].float()
    groups, rows = scales.shape

    def unpacked(words: Tensor) -> Tensor:
        words = words.T.contiguous()
        codes = np.empty((len(words), len(AWQ_ORDER), words.shape[1]), np.uint8)
        for output, position in enumerate(AWQ_ORDER):
            codes[:, output] = words.numpy() >> 4 * position
        codes &= 15
        return torch.from_numpy(codes).reshape(-1, words.shape[1])[:rows]

    elements, zeros = unpacked(parts["qweight"]), unpacked(parts["qzeros"]).float()
    tile = (1, elements.shape[1] // groups)
    return QuantizedWeight("uint4", elements, scales.T.contiguous(), tile, zeros)


def _bnb_int8(parts: Parts) -> QuantizedWeight:
    """Decode bitsandbytes' INT8: rows with their largest magnitude beside them."""
    weight = parts["weight"]
    return QuantizedWeight(
        "int8", weight, parts["SCB"].float().reshape(-1, 1) / 127, (1, weight.shape[1])
    )


NOTHING = Recipe()
SCALES = ("weight_scale", "weight_scale_inv")
_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "BF16", "F16")
PACKINGS = (
    Packing(
        "compressed-tensors NVFP4",
        _nvfp4,
        {"weight_packed": ("U8",), "weight_scale": ("F8_E4M3",), "weight_global_scale": ("F32",)},
        by_rows=("weight_packed", "weight_scale"),
    ),
    Packing(
        "compressed-tensors MXFP4",
        _mxfp4,
        {"weight_packed": ("U8",), "weight_scale": ("U8", "F8_E8M0")},
        by_rows=("weight_scale", "weight_packed"),
    ),
    Packing(
        "compressed-tensors packed integers",
        _packed_integers,
        {
            "weight_packed": ("I32",),
            "weight_scale": _FLOATS,
            "weight_shape": ("I64", "I32"),
            "weight_zero_point": ("I32",),
        },
        optional=("weight_zero_point",),
        by_rows=("weight_packed", "weight_scale", "weight_zero_point"),
    ),
    Packing(
        "ModelOpt NVFP4",
        _nvfp4,
        {"weight": ("U8",), "weight_scale": ("F8_E4M3",), "weight_scale_2": ("F32",)},
        by_rows=("weight", "weight_scale"),
    ),
    Packing(
        "FP8 tiles with inverse scales",
        _plain,
        {"weight": _FP8, "weight_scale_inv": _FLOATS},
        by_rows=("weight", "weight_scale_inv"),
    ),
    Packing(
        "values beside scales",
        _plain,
        {
            "weight": (*_FP8, "I8"),
            "weight_scale": _FLOATS,
            "weight_zero_point": ("I8", "F32", "BF16", "F16"),
        },
        optional=("weight_zero_point",),
        by_rows=("weight", "weight_scale", "weight_zero_point"),
    ),
    Packing(
        "bitsandbytes INT8",
        _bnb_int8,
        {"weight": ("I8",), "SCB": ("F32", "F16"), "weight_format": ("U8",)},
        optional=("weight_format",),
        by_rows=("weight", "SCB"),
    ),
    Packing(
        "GPTQ",
        _gptq,
        {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS, "g_idx": ("I32",)},
        by_columns=("scales", "qweight", "qzeros"),
    ),
    Packing(
        "AWQ",
        _awq,
        {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS},
        by_columns=("scales", "qweight", "qzeros"),
    ),
    Packing(
        "MXFP4 blocks",
        _mxfp4,
        {"blocks": ("U8",), "scales": ("U8",)},
        by_rows=("scales", "blocks"),
    ),
    *PACKINGS_OF_4_BITS,
    HQQ,
)


def decode(
    checkpoint: Checkpoint, weight: StoredWeight, recipe: Recipe = NOTHING
) -> QuantizedWeight:
    """Read and decode a quantized weight as the recipe declares it."""
    weight.check_complete()
    tensors = {ending: checkpoint.read(entry.name) for ending, entry in weight.parts.items()}
    offset = gptq_zero_offset(checkpoint.configuration)
    tile = next(iter(tiles_of(weight, recipe)), None)
    bits = recipe.bits_of(weight.name.removesuffix(".weight"))
    parts = Parts(weight.name, tensors, bits, zero_offset=offset, tile=tile)
    return decode_parts(weight, parts)


def tiles_of(weight: StoredWeight, recipe: Recipe) -> list[Tile]:
    """List the tiles that a weight may have: the declared one, or all that its scales fit.

    None where the shape of the scales tells, or the packing does.
    """
    rows, columns = recipe.tile_of(weight.name.removesuffix(".weight"))
    declared = None if rows is None or columns is None else (rows, columns)
    entry = weight.parts.get("weight")
    if weight.packing is None or weight.packing.decode is not _plain or entry is None:
        return [] if declared is None else [declared]
    scales = next(weight.parts[ending].shape for ending in SCALES if ending in weight.parts)
    height = math.prod(entry.shape[:-1])
    is_told = math.prod(scales) == 1 or len(scales) < 2 or math.prod(scales) == height
    if is_told or not math.prod(entry.shape):
        return [] if declared is None else [declared]
    if declared is not None and declared[0] > 1:
        try:
            return [declared_tile(entry.shape, scales, declared)]
        except QgateError as error:
            raise MisfitError(str(error)) from None
    stored = math.prod(scales[:-1]), scales[-1]
    if declared is not None and counts(height, entry.shape[-1], declared) == stored:
        return [declared]
    return likely_tiles(entry.shape, scales)


def decode_parts(weight: StoredWeight, parts: Parts) -> QuantizedWeight:
    """Decode the tensors of a weight, or some rows of them."""
    assert weight.packing is not None
    try:
        return weight.packing.decode(parts)
    except QgateError as error:
        raise MisfitError(str(error)) from None
    except (RuntimeError, ValueError, IndexError, OverflowError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{ending} {entry.shape}" for ending, entry in weight.parts.items())
        raise MisfitError(
            f"its tensors are no weight in {weight.packing.name}: {shapes} ({first_line(error)})"
        ) from None
