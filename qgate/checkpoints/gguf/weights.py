"""Weights of GGUF files: rows of blocks, decoded to elements and scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from qgate.checkpoints.gguf.blocks import BLOCK_TYPES, BlockType
from qgate.checkpoints.gguf.codebooks import CODEBOOK_TYPES
from qgate.checkpoints.grids import FP4_UNIT, QuantizedWeight
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import Packing, Parts, StoredWeight
from qgate.errors import QgateError

KINDS: Mapping[str, BlockType] = {**BLOCK_TYPES, **CODEBOOK_TYPES}
UNKNOWN = "GGUF type "
"""The dtype of a tensor whose type has a number that is not listed, with the number after it."""


def block_weights(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Yield tensors of GGUF blocks as weights, with their scales of the whole tensor."""
    for entry in checkpoint.entries.values():
        if entry.dtype not in KINDS and not entry.dtype.startswith(UNKNOWN):
            continue
        stem = entry.name.removesuffix("weight")
        scale = checkpoint.entries.get(f"{stem}scale") if stem != entry.name else None
        parts = {"weight": entry} | ({} if scale is None else {"scale": scale})
        name = f"GGUF {entry.dtype.removeprefix('GGUF ')}"
        by_rows = ("weight",) if entry.dtype in KINDS and len(entry.shape) > 1 else ()
        packing = Packing(name, partial(_decode, entry.dtype), by_rows=by_rows)
        yield StoredWeight(entry.name, packing, parts)


def _decode(dtype: str, parts: Parts) -> QuantizedWeight:
    if dtype not in KINDS:
        raise QgateError(f"it is stored as {dtype}, which is not known")
    weight = decode_blocks(parts.tensors["weight"], KINDS[dtype])
    whole = parts.tensors.get("scale")
    if whole is None:
        return weight
    # One scale of all rows, or one of each expert, whose rows follow one another.
    count = len(weight.elements)
    rows = parts.rows or count
    owners = torch.arange(parts.start, parts.start + count) // (rows // max(1, whole.numel()))
    return replace(weight, scales=weight.scales * whole.float().reshape(-1)[owners, None])


def decode_blocks(raw: Tensor, kind: BlockType) -> QuantizedWeight:
    """Decode rows of bytes."""
    rows = len(raw)
    decoded = kind.decode(raw.reshape(-1, kind.bytes))
    columns = raw.shape[1] // kind.bytes * kind.elements
    scales = decoded.scales.reshape(rows, -1)

    def in_rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(rows, -1)

    return QuantizedWeight(
        "fp4_e2m1" if kind.unit == FP4_UNIT else kind.name.lower(),
        decoded.elements.reshape(rows, columns),
        scales,
        (1, columns // max(1, scales.shape[1])),
        scale_codes=in_rows(decoded.scale_codes),
        unit=kind.unit,
        offsets=in_rows(decoded.offsets),
        blocks=(kind.name, raw),
    )
