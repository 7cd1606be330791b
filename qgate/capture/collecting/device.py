"""Snapshots of CUDA tensors: read on the device, copied on a stream of their own.

Nothing here waits for the device; what was started is finished in the thread that writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qgate.capture.collect_values import Reading
from qgate.stats._bits import COUNTABLE

_AT_ONCE = 2**26


@dataclass(eq=False)
class Pending:
    """What is on its way to the host."""

    dtype: torch.dtype
    elements: int
    figures: Tensor
    counts: Tensor | None
    values: Tensor | None
    done: torch.cuda.Event

    def finish(self) -> tuple[Reading, Tensor | None]:
        self.done.synchronize()
        low, high, nan, posinf, neginf, total, squares = self.figures.tolist()
        kinds = {"nan": int(nan), "posinf": int(posinf), "neginf": int(neginf)}
        counts = None if self.counts is None else self.counts.numpy()
        return Reading(
            self.dtype,
            self.elements,
            low,
            high,
            kinds,
            self.elements,
            counts=counts,
            sums=(total, squares),
        ), self.values


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def start_on_cuda(x: Tensor, values: torch.dtype | None) -> Pending:
    """Read a tensor and, if `values` names a dtype, copy it; the caller may write to it at once."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured")
    figures = _figures(x)
    counts = _counts(x) if x.is_floating_point() else None
    copied = None if values is None else torch.empty(x.shape, dtype=values, device=x.device)
    if copied is not None:
        copied.copy_(x)
    side, now = _stream(x.device), torch.cuda.current_stream(x.device)
    side.wait_stream(now)
    with torch.cuda.stream(side):
        sent = [_to_host(each, side) for each in (figures, counts, copied)]
        done = torch.cuda.Event()
        done.record(side)
    if sent[0] is None:
        raise RuntimeError("nothing was read")
    return Pending(x.dtype, x.numel(), sent[0], sent[1], sent[2], done)


def _to_host(x: Tensor | None, side: torch.cuda.Stream) -> Tensor | None:
    if x is None:
        return None
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    x.record_stream(side)
    return host


def _figures(x: Tensor) -> Tensor:
    """low, high, NaN, +Inf, -Inf, sum and sum of squares of what is finite, as float64."""
    if not x.numel():
        none = [float("nan"), float("nan"), 0.0, 0.0, 0.0, 0.0, 0.0]
        return torch.tensor(none, dtype=torch.float64, device=x.device)
    wide = x if x.dtype in (torch.float32, torch.float64, torch.bfloat16) else x.double()
    finite = torch.isfinite(wide)
    any_finite = finite.any()
    low = torch.where(finite, wide, float("inf")).amin().double()
    high = torch.where(finite, wide, float("-inf")).amax().double()
    kept = torch.where(finite, wide, 0)
    nowhere = torch.full((), float("nan"), dtype=torch.float64, device=x.device)
    parts = [
        torch.where(any_finite, low, nowhere),
        torch.where(any_finite, high, nowhere),
        torch.isnan(wide).sum(),
        (wide == float("inf")).sum(),
        (wide == float("-inf")).sum(),
        kept.sum(dtype=torch.float64),
        torch.linalg.vector_norm(kept, dtype=torch.float64).square(),
    ]
    return torch.stack([part.double() for part in parts])


def _counts(x: Tensor) -> Tensor:
    """How often each bit pattern occurs, of 32-bit tensors after rounding to bf16."""
    target = x.dtype if x.dtype in COUNTABLE else torch.bfloat16
    size = 2 ** (8 * target.itemsize)
    total = torch.zeros(size, dtype=torch.int64, device=x.device)
    flat = x.reshape(-1)
    for start in range(0, len(flat), _AT_ONCE):
        bits = flat[start : start + _AT_ONCE].to(target).view(COUNTABLE[target])
        index = bits.long().bitwise_and_(size - 1)
        total.scatter_add_(0, index, torch.ones_like(index))
    return total
