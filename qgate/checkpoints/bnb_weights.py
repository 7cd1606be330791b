"""Weights of bitsandbytes in 4 bits: codes of a table, and the largest magnitude of each block.

Blocks run through the whole weight, row after row. The first code of a byte is the high one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.weight_parts import Packing, Parts
from qgate.errors import QgateError
from qgate.formats.codebook import BNB_FP4, NF4
from qgate.records.validating import Meta, validate

TABLES: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "nf4": ("nf4", NF4),
    "fp4": ("bnb_fp4", BNB_FP4),
}
"""The element and its values in the order of codes, by quant_type."""
STATE = "weight.quant_state.bitsandbytes__"
DTYPES: Mapping[str, tuple[str, ...]] = {
    "weight": ("U8",), "weight.absmax": ("F32", "U8"), "weight.quant_map": ("F32",),
    "weight.nested_absmax": ("F32",), "weight.nested_quant_map": ("F32",),
}  # fmt: skip
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
T = TypeVar("T")
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


def _state_in(parts: Mapping[str, T]) -> T:
    return next(part for ending, part in parts.items() if ending.startswith(STATE))


def count_rows(checkpoint: Checkpoint, parts: Mapping[str, StoredEntry]) -> int:
    """Count the rows of a weight whose tensors fit together; 0 of one to be decoded whole."""
    try:
        state = _state(checkpoint.read(_state_in(parts).name), "")
    except QgateError:
        return 0
    count, columns = math.prod(state.shape), _columns(state)
    absmax, nested = (parts.get(f"weight.{part}") for part in ("absmax", "nested_absmax"))
    blocks = 0 if absmax is None else math.prod(absmax.shape)
    is_whole = (
        parts["weight"].shape in ((count // 2, 1), (count // 2,))
        and blocks * state.blocksize == count
        and columns % 2 == columns % state.blocksize == count % columns == 0
        and (nested is None or math.prod(nested.shape) == -(-blocks // state.nested_blocksize))
    )
    return count // columns if is_whole else 0


def _columns(state: QuantState) -> int:
    """Return the columns of rows of whole blocks: where blocks do not end with rows, one is a row.

    A weight that is not whole blocks is one row.
    """
    count, columns = math.prod(state.shape), state.shape[-1]
    if columns % state.blocksize:
        columns = state.blocksize if count % state.blocksize == 0 else count
    return columns


def decode_4bit(parts: Parts) -> QuantizedWeight:
    """Decode a weight from its tensors by part, or some rows of it."""
    tensors = parts.tensors
    state = _state(_state_in(tensors), parts.name)
    element = TABLES[state.quant_type][0]
    table = tensors["weight.quant_map"].float()
    _check_table(table, state.quant_type)
    columns = _columns(state)
    packed = tensors["weight"].reshape(-1)
    # Some rows are whole bytes and blocks, which was checked.
    count = 2 * packed.numel() if parts.rows else math.prod(state.shape)
    if packed.numel() != -(-count // 2):
        raise QgateError(
            f"its quant_state has shape {state.shape}, and {packed.numel():,} bytes hold "
            f"{2 * packed.numel():,} codes"
        )
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)
    elements = pairs.index_select(0, packed.int()).reshape(-1)[:count]
    scales = _largest(parts, state, parts.start * columns // state.blocksize)
    if scales.numel() != -(-count // state.blocksize):
        raise QgateError(
            f"it has {scales.numel():,} absmax for {count:,} elements in blocks of "
            f"{state.blocksize}"
        )
    rows = count // columns
    return QuantizedWeight(
        element, elements.reshape(rows, columns), scales.reshape(rows, -1), (1, state.blocksize)
    )


def _state(packed: Tensor, name: str) -> QuantState:
    try:
        stated = json.loads(bytes(packed.tolist()))
        validate(stated, QuantState)
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{name}: its quant_state is damaged ({error})") from None
    names = {field.name for field in fields(QuantState)}
    state = QuantState(**{key: value for key, value in stated.items() if key in names})
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


def _largest(parts: Parts, state: QuantState, first: int) -> Tensor:
    """Return the largest magnitude of blocks from `first` on, which may be quantized itself."""
    stored = parts.tensors["weight.absmax"]
    nested, table = (parts.tensors.get(ending) for ending in NESTED)
    if stored.dtype != torch.uint8:
        return stored.float().reshape(-1)
    if nested is None or table is None or table.numel() != 256:
        raise QgateError(
            "its absmax are quantized, and nested_absmax and nested_quant_map are not there"
        )
    owners = torch.arange(first, first + stored.numel()) // state.nested_blocksize
    count = -(-(first + stored.numel()) // state.nested_blocksize)
    if nested.numel() < count or (nested.numel() > count and not parts.rows):
        raise QgateError(
            f"it has {nested.numel():,} nested_absmax for {stored.numel():,} absmax in blocks of "
            f"{state.nested_blocksize}"
        )
    values = table.float().index_select(0, stored.reshape(-1).int())
    return values * nested.float().reshape(-1)[owners] + state.nested_offset


PACKINGS_OF_4_BITS = tuple(
    Packing(
        f"bitsandbytes {kind.upper()}",
        decode_4bit,
        {**DTYPES, f"{STATE}{kind}": ("U8",)},
        optional=NESTED,
        by_rows=("weight", "weight.absmax"),
        count_rows=count_rows,
    )
    for kind in TABLES
)
