"""Reference tensors, whole or cut to rows that anyone can draw again from a seed."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from qgate.errors import QgateError
from qgate.hashing import mix_bits

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class BaselineRows:
    """Sample of `count` rows out of `of` by a seed; a row runs along a tensor's last axis."""

    seed: int
    count: int
    of: int

    def indices(self) -> Array:
        """Return the rows, ascending: those with the smallest hashes."""
        start = np.uint64((self.seed * 0x9E37_79B9) % 2**64)
        hashes = mix_bits(np.arange(self.of, dtype=np.uint64) + start)
        return np.sort(np.argsort(hashes, kind="stable")[: self.count])


def row_count(shape: tuple[int, ...]) -> int:
    """Count the rows of a tensor; in a vector every element is one."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def row_sample(array: Array, cap_bytes: int | None, seed: int) -> tuple[Array, BaselineRows | None]:
    """Return an array and None where it fits under the cap, else as many of its rows as fit.

    There is at least one row. Rows come as a matrix, or as a vector where the array is one.
    """
    if cap_bytes is None or array.nbytes <= cap_bytes:
        return array, None
    if seed < 0 or cap_bytes < 0:
        raise QgateError(
            f"seed {seed} and a cap of {cap_bytes} bytes are not allowed; both are from 0."
        )
    of = row_count(array.shape)
    rows = BaselineRows(seed, min(of, max(1, cap_bytes * of // array.nbytes)), of)
    return same_rows(array, rows), rows


def same_rows(array: Array, rows: BaselineRows | None) -> Array:
    """Cut a live tensor to the rows that are stored, so that the two can be compared."""
    if rows is None:
        return array
    if row_count(array.shape) != rows.of:
        raise QgateError(
            f"a tensor of shape {tuple(array.shape)} has {row_count(array.shape)} rows, but the "
            f"stored ones were drawn from {rows.of}: it is not the tensor that was recorded."
        )
    flat = array.reshape(rows.of, array.shape[-1]) if array.ndim > 1 else array.reshape(-1)
    return np.ascontiguousarray(flat[rows.indices()])


@dataclass(frozen=True)
class ReferenceTensor:
    """Stored values of an FP32 tensor, of a sample of its rows or of all of `shape`."""

    values: Array
    shape: tuple[int, ...]
    rows: BaselineRows | None = None

    @classmethod
    def of(cls, array: Array, cap_bytes: int | None = None, seed: int = 0) -> ReferenceTensor:
        """Take a live tensor, sampled where it is above the cap."""
        values, rows = row_sample(array, cap_bytes, seed)
        return cls(values, tuple(array.shape), rows)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape that `values` has to have."""
        if self.rows is None:
            return self.shape
        return (self.rows.count, *self.shape[-1:]) if len(self.shape) > 1 else (self.rows.count,)

    def live(self, array: Array) -> Array:
        """Return the part of a live tensor that `values` is the reference of."""
        if tuple(array.shape) != self.shape:
            raise QgateError(
                f"a tensor of shape {tuple(array.shape)} is compared with a reference of shape "
                f"{self.shape}: it is not the tensor that was recorded."
            )
        return same_rows(array, self.rows)

    def sha256(self) -> str:
        """Hash the bytes of the values, in order."""
        return hashlib.sha256(self.values.astype("<f4", copy=False).tobytes()).hexdigest()
