"""Weights of torchao in safetensors files: parts by name, and what the head says of each.

The head's metadata has an entry of JSON for each weight: its class, and attributes such as the size
of blocks. Layouts for kernels of GPUs, such as those of Int4Tensor, are named and not read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from qgate.checkpoints.grids import (
    FP4_UNIT,
    QuantizedWeight,
    as_rows,
    decode_e8m0,
    fp8_name,
    from_nibbles,
)
from qgate.checkpoints.recipes import data_of
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.tiles import fit_tile
from qgate.checkpoints.weight_parts import Packing, Parts, StoredWeight
from qgate.errors import QgateError
from qgate.text import one_line

CONFIGURATION = "torchao"
"""The name under which a checkpoint's configuration has the entries of its heads."""
NAMES = "tensor_names"
INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 9)]


@dataclass(frozen=True)
class TorchaoEntry:
    """Entry of a head about one weight: its class, attributes and parts."""

    kind: str
    attributes: Mapping[str, object] = field(default_factory=dict)
    parts: tuple[str, ...] = ()

    @property
    def is_swizzled(self) -> bool:
        """Return True for scales in the order that tensor cores read."""
        return self.attributes.get("is_swizzled_scales") is True

    def part_names(self, weight: str) -> dict[str, str]:
        """Return the tensors of a weight by part."""
        stem, _, last = weight.rpartition(".")
        return {part: f"{stem}._{last}_{part}" for part in self.parts}


def torchao_entries(metadata: Mapping[str, str], path: str) -> dict[str, TorchaoEntry]:
    """Return the entries of quantized weights in the metadata of a head; none of other files."""
    if not isinstance(metadata, dict) or NAMES not in metadata:
        return {}
    entries = {}
    for name, text in metadata.items():
        if name == NAMES or not isinstance(text, str) or not text.startswith("{"):
            continue
        try:
            stated = json.loads(text)
        except (ValueError, RecursionError):
            raise QgateError(
                f"{path!r} is damaged: its head describes {one_line(name)!r} in no JSON."
            ) from None
        kind, data, parts = (stated.get(key) for key in ("_type", "_data", "_tensor_data_names"))
        if isinstance(data, dict) and isinstance(parts, list):
            entries[name] = TorchaoEntry(str(kind), data, tuple(map(str, parts)))
    return entries


# Classes ------------------------------------------------------------------------------------------


def torchao_weights(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Yield the weights that the heads of a checkpoint describe as torchao's."""
    entries = checkpoint.configuration.get(CONFIGURATION)
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        stored = {part: checkpoint.entries.get(key) for part, key in entry.part_names(name).items()}
        parts = {part: tensor for part, tensor in stored.items() if tensor is not None}
        if parts:
            by_rows = ("qdata",) if entry.is_swizzled else ("qdata", "scale")
            has_rows = "qdata" in parts and len(parts["qdata"].shape) > 1
            decode, rows = partial(decode_torchao, entry), by_rows if has_rows else ()
            packing = Packing(f"torchao {entry.kind}", decode, by_rows=rows)
            yield StoredWeight(name, packing, parts)


def decode_torchao(entry: TorchaoEntry, parts: Parts) -> QuantizedWeight:
    """Decode a weight from its tensors by part, or some rows of it."""
    if entry.kind not in _CLASSES:
        raise QgateError(
            f"it is a {one_line(entry.kind)} of torchao, whose layout is not known; "
            f"{', '.join(_CLASSES)} are"
        )
    lacking = [part for part in ("qdata", "scale") if part not in parts.tensors]
    if lacking:
        raise QgateError(f"it is a {entry.kind} of torchao and has no {' and no '.join(lacking)}")
    return _CLASSES[entry.kind](entry, parts)


def _integers(entry: TorchaoEntry, parts: Parts) -> QuantizedWeight:
    elements = as_rows(parts.tensors["qdata"])
    scales, tile = _tiles(entry, parts, elements)
    zeros = parts.tensors.get("zero_point")
    if zeros is not None and bool(zeros.count_nonzero()):
        # Those of all rows, as none is a zero point only if all are zero.
        first = parts.start // tile[0]
        zeros = zeros.reshape(-1, scales.shape[1])[first : first + len(scales)].float()
    else:
        zeros = None
    element = data_of(entry.attributes, "target_dtype") or "int8"
    if element not in INTEGERS:
        raise QgateError(f"its head states integers of type {one_line(element)!r}")
    return QuantizedWeight(element, elements, scales, tile, zeros)


def _tiles(entry: TorchaoEntry, parts: Parts, elements: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Check that blocks have the size that the head states."""
    count, columns = elements.shape
    scales, tile = parts.fit_tile("scale", parts.tensors["scale"].float(), (count, columns))
    stated = entry.attributes.get("block_size")
    if _is_size(stated):
        lengths = parts.rows or count, columns
        sizes = [min(size, length) for size, length in zip(stated[-2:], lengths, strict=True)]
        if sizes[1] != tile[1] or (len(stated) == 2 and sizes[0] != tile[0]):
            raise QgateError(
                f"its head states blocks of {sizes[0]} x {sizes[1]}, and its scales are of "
                f"{tile[0]} x {tile[1]}"
            )
    return scales, tile


def _is_size(stated: object) -> TypeGuard[list[int]]:
    return (
        isinstance(stated, list)
        and len(stated) >= 2
        and all(isinstance(length, int) for length in stated)
    )


def _float8(entry: TorchaoEntry, parts: Parts) -> QuantizedWeight:
    elements = as_rows(parts.tensors["qdata"])
    scales, tile = _tiles(entry, parts, elements)
    return QuantizedWeight(fp8_name(elements), elements, scales, tile)


def _mx(entry: TorchaoEntry, parts: Parts) -> QuantizedWeight:
    data = as_rows(parts.tensors["qdata"])
    is_fp4 = data.dtype == torch.uint8
    elements = from_nibbles(data) if is_fp4 else data
    codes = _in_order(entry, parts, elements, 32)
    scales, tile = fit_tile(decode_e8m0(codes), len(elements), elements.shape[1], parts.name)
    element, unit = ("fp4_e2m1", FP4_UNIT) if is_fp4 else (fp8_name(data), 1.0)
    return QuantizedWeight(element, elements, scales, tile, scale_codes=codes, unit=unit)


def _nvfp4(entry: TorchaoEntry, parts: Parts) -> QuantizedWeight:
    elements = from_nibbles(as_rows(parts.tensors["qdata"]))
    codes = _in_order(entry, parts, elements, 16)
    stored = codes.view(torch.float8_e4m3fn)
    scales, tile = fit_tile(stored.float(), len(elements), elements.shape[1], parts.name)
    whole = parts.tensors.get("per_tensor_scale")
    if whole is not None:
        scales = scales * whole.float().reshape(-1, 1)
    return QuantizedWeight("fp4_e2m1", elements, scales, tile, scale_codes=stored, unit=FP4_UNIT)


def _in_order(entry: TorchaoEntry, parts: Parts, elements: Tensor, size: int) -> Tensor:
    """Return the codes of block scales row by row; those for tensor cores lie in 128 x 4 tiles."""
    codes = as_rows(parts.tensors["scale"].view(torch.uint8))
    count, columns = len(elements), elements.shape[1] // size
    if not entry.is_swizzled:
        if codes.shape != (count, columns):
            raise QgateError(
                f"its scales have shape {tuple(codes.shape)} for {count} x {columns} blocks; if "
                "they are swizzled in tiles of 128 x 4, its head does not state it"
            )
        return codes
    # The scales of all rows are here, of which the elements may be some.
    down, across = -(-(parts.rows or count) // 128), -(-columns // 4)
    start = parts.start % 128
    first, last = parts.start // 128, -(-(parts.start + count) // 128)
    tiled = codes.reshape(down, across, 32, 4, 4)[first:last].permute(0, 3, 2, 1, 4)
    rows = tiled.reshape(128 * (last - first), 4 * across)
    return rows[start : start + count, :columns].contiguous()


_Decoder = Callable[[TorchaoEntry, Parts], QuantizedWeight]
_CLASSES: Mapping[str, _Decoder] = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Float8Tensor": _float8,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
