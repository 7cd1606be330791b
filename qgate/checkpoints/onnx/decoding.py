"""Decode weights of ONNX graphs, all of one or some rows: which parts of tensors belong to rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.onnx.packings import Form, canonical, decode_stored, grid_of
from qgate.checkpoints.onnx.patterns import Stored, StoredBits, StoredCodes
from qgate.checkpoints.onnx.tensors import OnnxTensor, unpacked_codes
from qgate.errors import QgateError

STEP = 1 << 20
"""Elements that are looked at together for the form of a weight."""
SpanReader = Callable[[OnnxTensor, int, int], Tensor]
Roles = tuple[str, ...]


class OnnxDecoder:
    """Decodes a weight of a graph from its tensors, or from those parts that belong to some rows.

    turned      the codes are inputs x outputs
    tensors     the tensors by role: codes, scales and zero points
    read        reads elements of a tensor from one number to another
    """

    def __init__(
        self, stored: Stored, turned: bool, tensors: Mapping[str, OnnxTensor], read: SpanReader
    ) -> None:
        self._stored, self._turned, self._tensors, self._read = stored, turned, tensors, read

    def __call__(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """Decode all rows, or those that the parts belong to."""
        stored = self._stored
        scales = [x.float() for role, x in parts.items() if role.startswith("scale")]
        if len(scales) < len(stored.scales):
            raise QgateError(f"its scale {stored.scales[-1]!r} is no constant of the graph")
        if stored.zero_point and "zero_point" not in parts:
            raise QgateError(f"its zero point {stored.zero_point!r} is no constant of the graph")
        scale = math.prod(scales[1:], start=scales[0]) if scales else None
        shape = self._tensors["scale"].shape if len(scales) == 1 else ()
        shape = shape if scale is None or len(scales) == 1 else tuple(scale.shape)
        zero = parts.get("zero_point")
        weight = decode_stored(stored, parts["codes"], scale, zero, shape, self._turned)
        return canonical(weight, self._form)

    # Rows ----------------------------------------------------------------------------------------

    def layout(self) -> tuple[int, Roles, Roles]:
        """Return how many rows it has, and the tensors whose rows or columns stand for these.

        Nothing where it can only be decoded whole.
        """
        nothing: tuple[int, Roles, Roles] = 0, (), ()
        stored = self._stored
        if len(stored.scales) != 1 or "scale" not in self._tensors:
            return nothing
        if isinstance(stored, StoredBits):
            fits = stored.rows and not any(x.count % stored.rows for x in self._tensors.values())
            return (stored.rows, tuple(self._tensors), ()) if fits else nothing
        return self._layout_of_codes(stored) or nothing

    def _layout_of_codes(self, stored: StoredCodes) -> tuple[int, Roles, Roles] | None:
        codes, scale = self._tensors["codes"], self._tensors["scale"]
        is_turned = self._turned and len(codes.shape) > 1
        if is_turned and len(codes.shape) > 2:
            return None
        try:
            rows, columns, tile, _ = grid_of(stored, codes.shape, scale.shape, self._turned)
        except (QgateError, ValueError):  # is a finding when the weight is judged
            return None
        by_rows = [] if is_turned else ["codes"]
        by_columns = ["codes"] if is_turned else []
        for role, tensor in self._tensors.items():
            if role == "codes" or tensor.count == 1:
                continue
            if tensor.shape != scale.shape:
                return None
            if not stored.block and tile == (rows, 1) and tensor.count == columns:
                continue
            is_shared = stored.block and tile[0] > 1
            if is_shared and (rows % tile[0] or tensor.type.stored == "I32"):
                return None
            if not stored.block and tensor.count != rows:
                return None
            (by_columns if is_turned and len(tensor.shape) > 1 else by_rows).append(role)
        return rows, tuple(by_rows), tuple(by_columns)

    # Form ----------------------------------------------------------------------------------------

    @cached_property
    def _form(self) -> Form:
        """Find what only all codes and zero points tell; mostly a few of them suffice."""
        stored = self._stored
        if isinstance(stored, StoredBits):
            is_centered = all(bool((x == 1 << (stored.bits - 1)).all()) for x in self._zeros())
            bits, is_unsigned = stored.bits, True
        else:
            kind = stored.codes.type
            bits, is_unsigned = kind.bits, kind.element.startswith("uint")
            if "zero_point" in self._tensors:
                is_centered = all(bool((x == kind.middle).all()) for x in self._zeros())
            else:
                is_centered = not is_unsigned
            is_centered = is_centered and not (is_unsigned and bits > 8)
        return Form(is_centered, bits == 8 and self._uses_7_bits(is_unsigned, is_centered))

    def _zeros(self) -> Iterator[Tensor]:
        tensor, stored = self._tensors.get("zero_point"), self._stored
        if tensor is None:
            return
        if not isinstance(stored, StoredBits):
            yield from (x.float() for x in self._spans(tensor, 1))
            return
        blocks = -(-stored.columns // stored.block)
        for part in self._spans(tensor, tensor.count // stored.rows):
            is_packed = not part.dtype.is_floating_point
            yield (unpacked_codes(part, stored.bits) if is_packed else part)[:, :blocks].float()

    def _uses_7_bits(self, is_unsigned: bool, is_centered: bool) -> bool:
        """Return True for integers of 8 bits of which 7 are used."""
        tensor, stored = self._tensors["codes"], self._stored
        if tensor.type.element not in ("int8", "uint8"):
            return False
        width, columns = 1, 1
        if isinstance(stored, StoredBits):
            width, columns = tensor.count // stored.rows, stored.columns
        middle = 128 if is_unsigned and is_centered else 0
        most = 127 if is_unsigned and not is_centered else 64
        largest = 0
        for part in self._spans(tensor, width):
            low, high = (int(end) - middle for end in part[:, :columns].aminmax())
            largest = max(largest, -low, high)
            if largest > most:
                return False
        return largest > 0

    def _spans(self, tensor: OnnxTensor, width: int) -> Iterator[Tensor]:
        """Read a tensor as rows of a width, some rows at a time."""
        step = max(1, STEP // max(1, width)) * width
        for first in range(0, tensor.count, max(1, step)):
            part = self._read(tensor, first, min(first + step, tensor.count))
            yield part.reshape(-1, max(1, width))
