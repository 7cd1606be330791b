"""Weights of GGUF files: rows of blocks, decoded to elements and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from qgate.checkpoints.gguf_blocks import BLOCK_TYPES, BlockType
from qgate.checkpoints.gguf_codebooks import CODEBOOK_TYPES
from qgate.checkpoints.grids import FP4_UNIT, QuantizedWeight

KINDS: Mapping[str, BlockType] = {**BLOCK_TYPES, **CODEBOOK_TYPES}
UNKNOWN = "GGUF type "
"""The dtype of a tensor whose type has a number that is not listed, with the number after it."""


def decode_blocks(raw: Tensor, kind: BlockType, whole: Tensor | None = None) -> QuantizedWeight:
    """Decode rows of bytes; `whole` are scales of the whole tensor, or one of each expert."""
    rows = len(raw)
    decoded = kind.decode(raw.reshape(-1, kind.bytes))
    columns = raw.shape[1] // kind.bytes * kind.elements
    scales = decoded.scales.reshape(rows, -1)

    def in_rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(rows, -1)

    weight = QuantizedWeight(
        "fp4_e2m1" if kind.unit == FP4_UNIT else kind.name.lower(),
        decoded.elements.reshape(rows, columns),
        scales,
        (1, columns // max(1, scales.shape[1])),
        scale_codes=in_rows(decoded.scale_codes),
        unit=kind.unit,
        offsets=in_rows(decoded.offsets),
        blocks=(kind.name, raw),
    )
    if whole is None:
        return weight
    factors = whole.float().reshape(-1, 1).repeat_interleave(rows // max(1, whole.numel()), 0)
    return replace(weight, scales=scales * factors)
