"""Snapshots of CUDA tensors: read on the device, copied on a separate stream.

Nothing here waits for the device; the writer thread finishes each copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qgate.collecting.values import (
    Array,
    ValueReading,
    all_blocks,
    array_of,
    memory_of,
    sampled_offsets,
)
from qgate.project.options import COUNTED
from qgate.stats.bits import COUNTABLE

_AT_ONCE = 2**26


@dataclass(eq=False)
class PendingCopy:
    """A copy to the host that is under way."""

    dtype: torch.dtype
    elements: int
    figures: Tensor
    counts: Tensor | None
    sample: Tensor | None
    lengths: Array | None
    values: Tensor | None
    done: torch.cuda.Event

    def finish(self) -> tuple[ValueReading, Tensor | None]:
        self.done.synchronize()
        low, high, nan, posinf, neginf, total, squares = self.figures.tolist()
        kinds = {"nan": int(nan), "posinf": int(posinf), "neginf": int(neginf)}
        counts = None if self.counts is None else self.counts.numpy()
        sample = None if self.sample is None else array_of(self.sample)
        reading = ValueReading(
            self.dtype, self.elements, low, high, kinds, self.elements, sample, counts,
            (total, squares), self.lengths,
        )  # fmt: skip
        return reading, self.values


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@lru_cache(maxsize=64)
def _sampled_offsets(
    shape: tuple[int, ...], stride: tuple[int, ...], most: int, seed: int, device: torch.device
) -> tuple[Tensor, Array]:
    offsets, lengths = sampled_offsets(shape, stride, most, seed)
    return torch.from_numpy(offsets).to(device), lengths


def start_on_cuda(x: Tensor, values: torch.dtype | None, seed: int) -> PendingCopy:
    """Read a tensor and, if `values` names a dtype, copy it; the caller may write to it at once.

    Every element is counted here; only figures of blocks come from a share.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured")
    figures, counts, sample, lengths, copied = _figures(x), None, None, None, None
    if x.is_floating_point():
        counts = _counts(x)
        sample, lengths = _blocks(x, COUNTED, seed)
    if values is not None:
        copied = torch.empty(x.shape, dtype=values, device=x.device).copy_(x)
    side, now = _stream(x.device), torch.cuda.current_stream(x.device)
    side.wait_stream(now)
    with torch.cuda.stream(side):
        copies = [_to_host(tensor, side) for tensor in (figures, counts, sample, copied)]
        done = torch.cuda.Event()
        done.record(side)
    if copies[0] is None:
        raise RuntimeError("nothing was read")
    return PendingCopy(
        x.dtype, x.numel(), copies[0], copies[1], copies[2], lengths, copies[3], done
    )


def _to_host(x: Tensor | None, side: torch.cuda.Stream) -> Tensor | None:
    if x is None:
        return None
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    x.record_stream(side)
    return host


def _figures(x: Tensor) -> Tensor:
    """Return finite low and high, NaN, +Inf and -Inf counts, finite sum and sum of squares."""
    if not x.numel():
        empty = [float("nan"), float("nan"), 0.0, 0.0, 0.0, 0.0, 0.0]
        return torch.tensor(empty, dtype=torch.float64, device=x.device)
    wide = x if x.dtype in (torch.float32, torch.float64, torch.bfloat16) else x.double()
    finite = torch.isfinite(wide)
    any_finite = finite.any()
    low = torch.where(finite, wide, float("inf")).amin().double()
    high = torch.where(finite, wide, float("-inf")).amax().double()
    values = torch.where(finite, wide, 0)
    nan = torch.full((), float("nan"), dtype=torch.float64, device=x.device)
    parts = [
        torch.where(any_finite, low, nan),
        torch.where(any_finite, high, nan),
        torch.isnan(wide).sum(),
        (wide == float("inf")).sum(),
        (wide == float("-inf")).sum(),
        values.sum(dtype=torch.float64),
        torch.linalg.vector_norm(values, dtype=torch.float64).square(),
    ]
    return torch.stack([part.double() for part in parts])


def _counts(x: Tensor) -> Tensor:
    """Count how often each bit pattern occurs, of 32-bit tensors after rounding to bf16."""
    target = x.dtype if x.dtype in COUNTABLE else torch.bfloat16
    size = 2 ** (8 * target.itemsize)
    total = torch.zeros(size, dtype=torch.int64, device=x.device)
    flat = x.reshape(-1)
    for start in range(0, len(flat), _AT_ONCE):
        bits = flat[start : start + _AT_ONCE].to(target).view(COUNTABLE[target])
        index = bits.long().bitwise_and_(size - 1)
        total.scatter_add_(0, index, torch.ones_like(index))
    return total


def _blocks(x: Tensor, most: int, seed: int) -> tuple[Tensor, Array]:
    """Return whole blocks of a tensor, at most `most` elements, and their lengths."""
    shape = tuple(x.shape)
    if x.numel() <= most:
        return x.reshape(-1).clone(), all_blocks(shape)
    offsets, lengths = _sampled_offsets(shape, x.stride(), most, seed, x.device)
    line = memory_of(x)
    if x.dtype in COUNTABLE:
        line = line.view(COUNTABLE[x.dtype])
    return line.index_select(0, offsets).view(x.dtype), lengths
