"""Weights of bitsandbytes in 4 bits: codes of a table, and the largest magnitude of each block.

Blocks run through the whole weight, row after row. The first code of a byte is the high one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

import torch
from torch import Tensor

from qgate.checkpoints.conventions import BNB_FP4, NF4
from qgate.checkpoints.grids import QuantizedWeight
from qgate.errors import QgateError
from qgate.records.validating import Meta, validate

TABLES: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "nf4": ("nf4", NF4),
    "fp4": ("bnb_fp4", BNB_FP4),
}
"""The element and its values in the order of codes, by quant_type."""
Length = Annotated[int, Meta(ge=1, le=1 << 40)]


@dataclass
class QuantState:
    """The state that bitsandbytes stores as JSON beside a weight."""

    quant_type: str
    blocksize: Length
    shape: list[Length]
    dtype: str = ""
    nested_blocksize: Length = 256
    nested_dtype: str = ""
    nested_offset: float = 0.0


def decode_4bit(tensors: Mapping[str, Tensor], name: str) -> QuantizedWeight:
    """Decode a weight from its tensors by ending."""
    state = _state(tensors, name)
    element = TABLES[state.quant_type][0]
    table = tensors["weight.quant_map"].float()
    _check_table(table, state.quant_type)
    count = math.prod(state.shape)
    packed = tensors["weight"].reshape(-1)
    if packed.numel() != -(-count // 2):
        raise QgateError(
            f"its quant_state has shape {state.shape}, and {packed.numel():,} bytes hold "
            f"{2 * packed.numel():,} codes"
        )
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)
    elements = pairs.index_select(0, packed.int()).reshape(-1)[:count]
    scales = _largest(tensors, state)
    if scales.numel() != -(-count // state.blocksize):
        raise QgateError(
            f"it has {scales.numel():,} absmax for {count:,} elements in blocks of "
            f"{state.blocksize}"
        )
    columns = state.shape[-1]
    if columns % state.blocksize:
        # Blocks do not end with rows: each is a row here.
        columns = state.blocksize if count % state.blocksize == 0 else count
    rows = count // columns
    return QuantizedWeight(
        element, elements.reshape(rows, columns), scales.reshape(rows, -1), (1, state.blocksize)
    )


def _state(tensors: Mapping[str, Tensor], name: str) -> QuantState:
    packed = next(x for ending, x in tensors.items() if "quant_state.bitsandbytes__" in ending)
    try:
        stated = json.loads(bytes(packed.tolist()))
        validate(stated, QuantState)
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{name}: its quant_state is damaged ({error})") from None
    known = {field.name for field in fields(QuantState)}
    state = QuantState(**{key: value for key, value in stated.items() if key in known})
    if not state.shape:
        raise QgateError(f"{name}: its quant_state has no shape")
    if state.quant_type not in TABLES:
        raise QgateError(
            f"its quant_state declares {state.quant_type!r}, which is not known; "
            f"{' and '.join(TABLES)} are"
        )
    return state


def _check_table(table: Tensor, declared: str) -> None:
    """Refuse a quant_map that is not that of the declared type."""
    for kind, (_, values) in TABLES.items():
        if table.shape == (16,) and torch.allclose(table, torch.tensor(values), atol=1e-6):
            if kind != declared:
                raise QgateError(
                    f"its quant_map is that of {kind}, and its quant_state declares {declared}"
                )
            return
    raise QgateError(f"its quant_map is not that of {declared}, which its quant_state declares")


def _largest(tensors: Mapping[str, Tensor], state: QuantState) -> Tensor:
    """Return the largest magnitude of each block, which may be quantized itself."""
    stored = tensors["weight.absmax"]
    nested, table = tensors.get("weight.nested_absmax"), tensors.get("weight.nested_quant_map")
    if stored.dtype != torch.uint8:
        return stored.float().reshape(-1)
    if nested is None or table is None or table.numel() != 256:
        raise QgateError(
            "its absmax are quantized, and nested_absmax and nested_quant_map are not there"
        )
    count = -(-stored.numel() // state.nested_blocksize)
    if nested.numel() != count:
        raise QgateError(
            f"it has {nested.numel():,} nested_absmax for {stored.numel():,} absmax in blocks of "
            f"{state.nested_blocksize}"
        )
    values = table.float().index_select(0, stored.reshape(-1).int())
    owners = torch.arange(stored.numel()) // state.nested_blocksize
    return values * nested.float().reshape(-1)[owners] + state.nested_offset
