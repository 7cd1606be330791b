"""Exact value counts: the mergeable summary that every analysis of 16-bit tensors starts from.

A 16-bit tensor has 65,536 values. One pass that counts them answers any later question about
formats, scales, percentiles or overflow without touching the tensor again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qgate.archives import check_archive
from qgate.errors import QgateError, unknown
from qgate.kernels import counting, proving
from qgate.stats import bits as _bits
from qgate.stats.direct_values import Values
from qgate.stats.summary import Floats, Ints, Summary
from qgate.storage.files import replacing

_SLAB_ON_DEVICE = 2**30


@dataclass(frozen=True, eq=False)
class Counts(Summary):
    """How often each bit pattern of a dtype occurs. `a + b` is the counts of both tensors."""

    dtype: str
    counts: Ints = field(repr=False)
    rounded_from: str | None = None
    """The dtype that was rounded to `dtype` before counting, if one was."""

    def __add__(self, other: Counts) -> Counts:
        if not isinstance(other, Counts):
            return NotImplemented
        if self.dtype != other.dtype:
            raise _bits.not_the_same("dtypes", self.dtype, other.dtype)
        rounded = self.rounded_from or other.rounded_from
        return Counts(self.dtype, self.counts + other.counts, rounded)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Counts):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def n(self) -> int:  # type: ignore[override]
        return int(self.counts.sum())

    @cached_property
    def _decoded(self) -> Floats:
        return _bits.decoded(_bits.BY_NAME[self.dtype])

    @property
    def nan(self) -> int:  # type: ignore[override]
        return int(self.counts[np.isnan(self._decoded)].sum())

    @property
    def posinf(self) -> int:  # type: ignore[override]
        return int(self.counts[self._decoded == np.inf].sum())

    @property
    def neginf(self) -> int:  # type: ignore[override]
        return int(self.counts[self._decoded == -np.inf].sum())

    @cached_property
    def _weighted(self) -> tuple[Floats, Ints]:
        there = np.flatnonzero((self.counts > 0) & np.isfinite(self._decoded))
        values, place = np.unique(self._decoded[there], return_inverse=True)
        weights = np.zeros(len(values), dtype=np.int64)
        np.add.at(weights, place, self.counts[there])
        return values, weights

    def weighted(self) -> tuple[Floats, Ints]:
        return self._weighted

    @cached_property
    def _folded(self) -> tuple[Floats, Floats, Floats]:
        """By bit pattern: without its sign bit a pattern is the magnitude, in ascending order."""
        half = len(self.counts) // 2
        sizes = self._decoded[:half]
        there = np.isfinite(sizes) & ((self.counts[:half] > 0) | (self.counts[half:] > 0))
        positive, negative = self.counts[:half][there], self.counts[half:][there]
        return sizes[there], positive.astype(np.float64), negative.astype(np.float64)

    def folded(self) -> tuple[Floats, Floats, Floats]:
        """Distinct magnitudes, ascending, and how often each occurs with either sign."""
        return self._folded

    def save(self, path: str | os.PathLike[str]) -> None:
        """As a small `.npz`: the patterns that occur and their counts."""
        there = np.flatnonzero(self.counts)
        with replacing(Path(path)) as neighbor, neighbor.open("wb") as file:
            np.savez_compressed(
                file,
                qgate=np.array("counts 1"),
                dtype=np.array(self.dtype),
                rounded_from=np.array(self.rounded_from or ""),
                patterns=there.astype(np.uint16),
                counts=self.counts[there],
            )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Counts:
        """What `save` wrote; anything else is refused."""
        try:
            check_archive(Path(path), repr(str(path)))
            with np.load(path, allow_pickle=False) as data:
                if str(data["qgate"]) != "counts 1":
                    raise KeyError("qgate")
                dtype, rounded = str(data["dtype"]), str(data["rounded_from"])
                patterns = np.asarray(data["patterns"], dtype=np.int64)
                found = np.asarray(data["counts"], dtype=np.int64)
        except FileNotFoundError:
            raise QgateError(f"there is no file {str(path)!r}.") from None
        except QgateError:
            raise
        except Exception as error:
            raise QgateError(f"{str(path)!r} is not a file of counts ({error}).") from None
        size = _size(dtype) if dtype in _bits.BY_NAME else 0
        sound = patterns.shape == found.shape and patterns.ndim == 1 and (found > 0).all()
        if not size or not sound or (patterns >= size).any():
            raise QgateError(f"{str(path)!r} is damaged: its counts do not fit dtype {dtype!r}.")
        counts = np.zeros(size, dtype=np.int64)
        np.add.at(counts, patterns, found)
        return Counts(dtype, counts, rounded or None)


def _size(dtype: str) -> int:
    torch_dtype = _bits.BY_NAME[dtype]
    return 2 ** (8 * torch_dtype.itemsize) if torch_dtype in _bits.COUNTABLE else 0


def counts(x: Any, *, via: Literal["bf16", "fp16"] | None = None) -> Counts | Values:
    """The value counts of a tensor, of an iterable of chunks, or of a memory-mapped array.

    float32 and float64 tensors have too many values to count: they come back as `Values`, which
    answers the same questions by going through the tensor, unless `via` says to round them first;
    `rounded_from` of the result then tells. `Values` keeps the tensors it was given.
    """
    targets = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if via is not None and via not in targets:
        raise unknown("via", via, targets)
    total: Counts | None = None
    direct: list[Tensor] = []
    for tensor in _bits.as_tensors(x):
        _bits.require_countable(tensor)
        if tensor.dtype in _bits.DIRECT and via is None:
            if isinstance(x, Iterator):
                raise QgateError(
                    "chunks of 32-bit tensors are gone through several times, so an iterator will "
                    'not do; give them as a list, or round them with via="bf16".'
                )
            direct.append(tensor)
            continue
        dtype = targets[via] if via is not None else tensor.dtype
        with _bits.serial():
            part = _count(tensor, dtype)
        total = part if total is None else total + part
    if direct and total is not None:
        raise _bits.not_the_same("dtypes", total.dtype, _bits.short_name(direct[0].dtype))
    if direct:
        return Values(direct)
    if total is None:
        raise QgateError("there is nothing to count: no tensor was given.")
    return total


def _count(x: Tensor, dtype: torch.dtype) -> Counts:
    integer = _bits.COUNTABLE[dtype]
    size = 2 ** (8 * dtype.itemsize)
    total = torch.zeros(size, dtype=torch.int64, device=x.device)
    name = _bits.short_name(x.dtype)
    rounded_from = name if x.dtype != dtype else None
    if proving.serves(x.device):
        found = [counting.count(slab.to(dtype)) for slab in _bits.slabs(x, _SLAB_ON_DEVICE)]
        known = [each for each in found if each is not None]
        if len(known) == len(found):
            counted = sum(known, total).cpu().numpy()
            return Counts(_bits.short_name(dtype), counted, rounded_from)
    room = _bits.CHUNK if x.device.type == "cpu" else 2**26
    buffer = torch.empty(min(room, max(x.numel(), 1)), dtype=torch.int32, device=x.device)
    for slab in _bits.slabs(x, room):
        bits = slab.to(dtype).view(integer)
        index = buffer[: bits.numel()].view(bits.shape).copy_(bits)
        if size == 2**16:
            index.bitwise_and_(0xFFFF)
        total += torch.bincount(index.view(-1), minlength=size)
    return Counts(_bits.short_name(dtype), total.cpu().numpy(), rounded_from)
