"""Exact value counts: the mergeable summary that every analysis of 16-bit tensors starts from.

A 16-bit tensor has 65,536 values. After one pass that counts them, formats, scales, percentiles and
overflow follow from the counts without reading the tensor again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.errors import QgateError, unknown
from qgate.kernels import proving
from qgate.loading import LateModule
from qgate.stats import bits as _bits
from qgate.stats.direct_values import Values
from qgate.stats.moments import PowerSums
from qgate.stats.summary import Floats, Ints, SummaryOfKinds
from qgate.storage.files import replacing
from qgate.storage.foreign import open_foreign
from qgate.tensor_inputs import usual_arithmetic

if TYPE_CHECKING:
    from qgate.kernels import launching as launching
    from qgate.kernels import reductions as reductions
    from qgate.storage import archives as archives
else:
    archives = LateModule("qgate.storage.archives")
    reductions = LateModule("qgate.kernels.reductions")
    launching = LateModule("qgate.kernels.launching")


Patterns = npt.NDArray[np.uint16]
PAGE = 64
_MORE = 64
_READ = (
    "n", "occurring", "values", "moments", "_figures", "_mean_and_std", "_kinds", "_weighted",
    "_folded",
)  # fmt: skip
_SLAB_ON_DEVICE = 2**30


class Counts(SummaryOfKinds):
    """Counts of each bit pattern of a dtype; `a + b` has the counts of both tensors.

    They are stored in pages of 64 patterns that are made on demand: values of a tensor share a few
    dozen exponents, 50 KB in place of half a megabyte.

    rounded_from  the dtype that was rounded to `dtype` before counting, if any
    """

    def __init__(
        self, dtype: str, counts: Ints | None = None, rounded_from: str | None = None
    ) -> None:
        """Start from `counts`, one number for every pattern, or from none."""
        self.dtype, self.rounded_from = dtype, rounded_from
        self._place = np.full(_size(dtype) // PAGE, -1, dtype=np.int16)
        self._pages = np.zeros((0, PAGE), dtype=np.int64)
        self._used = 0
        if counts is not None:
            pages = np.ascontiguousarray(counts).reshape(-1, PAGE)
            used = np.flatnonzero(torch.from_numpy(pages).sum(1).numpy())
            self._place[used], self._pages = np.arange(len(used)), pages[used]
            self._used = len(used)

    @staticmethod
    def together(parts: Iterable[Counts]) -> Counts:
        """Return the counts of all parts, of which there is at least one."""
        total: Counts | None = None
        for part in parts:
            total = total or Counts(part.dtype)
            total.add(part)
        assert total is not None
        return total

    def add(self, other: Counts) -> None:
        """Add counts of the same dtype to these, in place."""
        if self.dtype != other.dtype:
            raise _bits.mismatch_error("dtypes", self.dtype, other.dtype)
        self.rounded_from = self.rounded_from or other.rounded_from
        used = np.flatnonzero(other._place >= 0)
        new = used[self._place[used] < 0]
        self._place[new] = self._used + np.arange(len(new))
        self._used += len(new)
        if self._used > len(self._pages):
            room = self._used if not len(self._pages) else self._used + _MORE
            pages = np.zeros((room, PAGE), dtype=np.int64)
            pages[: len(self._pages)] = self._pages
            self._pages = pages
        self._pages[self._place[used]] += other._pages[other._place[used]]
        for name in _READ:
            self.__dict__.pop(name, None)

    def __add__(self, other: Counts) -> Counts:
        return Counts.together((self, other)) if isinstance(other, Counts) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Counts):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Counts({self.dtype}, {self.n} elements)"

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in self.__dict__.items() if name not in _READ}
        return state | {"_pages": self._pages[: self._used]}

    @property
    def counts(self) -> Ints:
        """One count for every pattern."""
        dense = np.zeros((len(self._place), PAGE), dtype=np.int64)
        used = self._place >= 0
        dense[used] = self._pages[self._place[used]]
        return dense.reshape(-1)

    @property
    def nbytes(self) -> int:
        return self._place.nbytes + self._pages.nbytes

    @cached_property
    def occurring(self) -> tuple[Patterns, Ints]:
        """The patterns that occur, ascending, and how often each does."""
        used = np.flatnonzero(self._place >= 0)
        pages = self._pages[self._place[used]]
        page, slot = np.nonzero(pages)
        return (used[page] * PAGE + slot).astype(np.uint16), pages[page, slot]

    @cached_property
    def values(self) -> Floats:
        """The value of each pattern that occurs."""
        patterns = self.occurring[0]
        return self._decoded[patterns] if len(patterns) else np.empty(0)

    @property
    def _decoded(self) -> Floats:
        return _bits.decoded(_bits.BY_NAME[self.dtype])

    @cached_property
    def n(self) -> int:  # type: ignore[override]
        return int(self._pages.sum())

    @cached_property
    def _kinds(self) -> tuple[int, int, int]:
        hits = np.isnan(self.values), self.values == np.inf, self.values == -np.inf
        nan, posinf, neginf = (int(self.occurring[1][hit].sum()) for hit in hits)
        return nan, posinf, neginf

    @cached_property
    def _weighted(self) -> tuple[Floats, Ints]:
        values = self.values
        finite = np.isfinite(values)
        values, weights = values[finite] + 0.0, self.occurring[1][finite]
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        zeros = np.flatnonzero(values == 0)
        if len(zeros) == 2:
            weights[zeros[0]] += weights[zeros[1]]
            values, weights = np.delete(values, zeros[1]), np.delete(weights, zeros[1])
        return values, weights

    def weighted(self) -> tuple[Floats, Ints]:
        return self._weighted

    @cached_property
    def _mean_and_std(self) -> dict[str, float]:
        # The same bits as by `_figures`: exact sums, of two powers in place of four.
        return PowerSums.of_counts(*self._weighted, order=2).figures()

    @cached_property
    def _folded(self) -> tuple[Floats, Floats, Floats]:
        # Without its sign bit a pattern is the magnitude, in ascending order.
        patterns, counts = self.occurring
        finite = np.isfinite(self.values)
        half = len(self._place) * PAGE // 2
        below, magnitudes = patterns[finite] >= half, patterns[finite] & (half - 1)
        ranks = np.zeros(half, dtype=np.int64)
        ranks[magnitudes] = 1
        occurring = np.flatnonzero(ranks)
        ranks[occurring] = np.arange(len(occurring))
        by_sign = np.zeros((len(occurring), 2))
        by_sign[ranks[magnitudes], below.view(np.int8)] = counts[finite]
        return self._decoded[occurring], by_sign[:, 0], by_sign[:, 1]

    def folded(self) -> tuple[Floats, Floats, Floats]:
        """Return distinct magnitudes, ascending, and how often each occurs with either sign."""
        return self._folded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a small `.npz` of the patterns that occur and their counts."""
        patterns, counts = self.occurring
        with replacing(Path(path)) as neighbor, neighbor.open("wb") as file:
            np.savez_compressed(
                file,
                qgate=np.array("counts 1"),
                dtype=np.array(self.dtype),
                rounded_from=np.array(self.rounded_from or ""),
                patterns=patterns,
                counts=counts,
            )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Counts:
        """Read a file that `save` wrote; refuse anything else."""
        try:
            with open_foreign(Path(path), "counts", None) as file:
                archives.check_archive(file, repr(str(path)))
                data = np.load(file, allow_pickle=False)
                if str(data["qgate"]) != "counts 1":
                    raise KeyError("qgate")
                dtype, rounded = str(data["dtype"]), str(data["rounded_from"])
                patterns = np.asarray(data["patterns"], dtype=np.int64)
                counts = np.asarray(data["counts"], dtype=np.int64)
        except FileNotFoundError:
            raise QgateError(f"there is no file {str(path)!r}.") from None
        except QgateError:
            raise
        except Exception as error:
            raise QgateError(f"{str(path)!r} is not a file of counts ({error}).") from None
        try:
            return Counts.of_patterns(dtype, patterns, counts, rounded or None)
        except QgateError:
            raise QgateError(
                f"{str(path)!r} is damaged: its counts do not fit dtype {dtype!r}."
            ) from None

    @staticmethod
    def of_patterns(
        dtype: str,
        patterns: npt.ArrayLike,
        counts: npt.ArrayLike,
        rounded_from: str | None = None,
    ) -> Counts:
        """Build from patterns and how often each occurs; refuse numbers that do not fit."""
        places, weights = np.asarray(patterns, np.int64), np.asarray(counts, np.int64)
        size = _size(dtype)
        sound = places.shape == weights.shape and places.ndim == 1 and (weights >= 0).all()
        if not size or not sound or ((places < 0) | (places >= size)).any():
            raise QgateError(f"counts that do not fit {dtype}: patterns and numbers disagree.")
        dense = np.zeros(size, dtype=np.int64)
        np.add.at(dense, places, weights)
        return Counts(dtype, dense, rounded_from)


def _size(dtype: str) -> int:
    """Return the number of patterns of a dtype, 0 for one that is not counted."""
    torch_dtype = _bits.BY_NAME.get(dtype)
    return 256**torch_dtype.itemsize if torch_dtype in _bits.COUNTABLE else 0


@usual_arithmetic()
def counts(x: Any, *, via: Literal["bf16", "fp16"] | None = None) -> Counts | Values:
    """Count the values of a tensor, of an iterable of chunks, or of a memory-mapped array.

    float32 and float64 tensors have too many values to count: they come back as `Values`, which
    computes the same statistics by passes over the tensors, and keeps them. With `via` they are
    rounded first; `rounded_from` of the result says so.
    """
    if via is not None and via not in _bits.VIA:
        raise unknown("via", via, _bits.VIA)
    total: Counts | None = None
    direct: list[Tensor] = []
    for tensor in map(_bits.countable, _bits.as_tensors(x)):
        if tensor.dtype in _bits.DIRECT and via is None:
            if isinstance(x, Iterator):
                raise QgateError(
                    "chunks of 32-bit tensors are read several times, which an iterator does not "
                    'allow; give them as a list, or round them with via="bf16".'
                )
            direct.append(tensor)
            continue
        dtype = _bits.VIA[via] if via is not None else tensor.dtype
        with _bits.serial():
            part = _count(tensor, dtype)
        total = part if total is None else total + part
    if direct and total is not None:
        raise _bits.mismatch_error("dtypes", total.dtype, _bits.short_name(direct[0].dtype))
    if direct:
        return Values(direct)
    if total is None:
        raise QgateError("there is nothing to count: no tensor was given.")
    return total


def _count(x: Tensor, dtype: torch.dtype) -> Counts:
    integer = _bits.COUNTABLE[dtype]
    size = 2 ** (8 * dtype.itemsize)
    name = _bits.short_name(x.dtype)
    rounded_from = name if x.dtype != dtype else None
    if proving.serves(x.device):
        parts = [reductions.count(slab.to(dtype)) for slab in _bits.slabs(x, _SLAB_ON_DEVICE)]
        by_kernel = [part for part in parts if part is not None]
        if parts and len(by_kernel) == len(parts):
            summed = launching.to_host(functools.reduce(Tensor.add, by_kernel))
            return Counts(_bits.short_name(dtype), summed.numpy(), rounded_from)
    total = torch.zeros(size, dtype=torch.int64, device=x.device)
    room = _bits.CHUNK if x.device.type == "cpu" else 2**26
    buffer = torch.empty(min(room, max(x.numel(), 1)), dtype=torch.int32, device=x.device)
    for slab in _bits.slabs(x, room):
        bits = slab.to(dtype).view(integer)
        index = buffer[: bits.numel()].view(bits.shape).copy_(bits)
        if size == 2**16:
            index.bitwise_and_(0xFFFF)
        total += torch.bincount(index.view(-1), minlength=size)
    return Counts(_bits.short_name(dtype), total.cpu().numpy(), rounded_from)
