"""Bits of torch tensors as small integers, a chunk at a time."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.stats.summary import Floats
from qgate.tensor_inputs import plain_tensor

# The dtypes that are counted by value, with the integer type of the same width.
COUNTABLE = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
DIRECT = (torch.float32, torch.float64)
VIA = {"bf16": torch.bfloat16, "fp16": torch.float16}
BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*COUNTABLE, *DIRECT)}
CHUNK = 2**18
_PIECE = 2**13


@contextlib.contextmanager
def serial() -> Iterator[None]:
    """Use one torch thread inside.

    Counting gains nothing from more, and on a busy machine the barrier after each small operation
    costs a hundred times the operation.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def dot(x: Floats, y: Floats) -> float:
    """Return the dot product of two vectors, in pieces for which BLAS starts no threads.

    On a busy machine their barrier costs a hundred times the product.
    """
    pieces = (slice(start, start + _PIECE) for start in range(0, len(x), _PIECE))
    return float(sum(float(x[piece] @ y[piece]) for piece in pieces))


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_tensors(x: object) -> Iterator[Tensor]:
    """Yield the tensors in x: itself, or each chunk of an iterable; numpy arrays are views."""
    if isinstance(x, np.ndarray):
        yield _from_numpy(x)
    elif isinstance(x, Tensor):
        yield x.detach()
    elif isinstance(x, Iterable) and not isinstance(x, str | bytes):
        for part in x:
            yield from as_tensors(part)
    else:
        raise TypeError(f"expected a tensor or an iterable of tensors, not {type(x).__name__}.")


def _from_numpy(x: npt.NDArray[np.generic]) -> Tensor:
    """Return a view, also of memory-mapped files that are open for reading only."""
    if x.dtype.kind != "f":
        raise TypeError(f"expected floating point numbers, not a numpy array of {x.dtype}.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(x)


def countable(x: Tensor) -> Tensor:
    """Return a tensor whose values can be counted, or summarized directly."""
    return plain_tensor(x, "count the values of", BY_NAME.values())


def slabs(x: Tensor, room: int, unit: int = 1) -> Iterator[Tensor]:
    """Yield views of x of about `room` elements, cut along the first axes.

    They are never cut inside a unit of the last axis.
    """
    if x.dim() == 0:
        yield x.reshape(1)
    elif x.numel() <= room or (x.dim() == 1 and len(x) <= unit):
        if x.numel():
            yield x
    elif x.dim() == 1:
        step = max(room // unit, 1) * unit
        for start in range(0, len(x), step):
            yield x[start : start + step]
    else:
        per_row = x[0].numel()
        step = max(room // max(per_row, 1), 1)
        for start in range(0, len(x), step):
            part = x[start : start + step]
            if step == 1 and per_row > room:
                yield from slabs(part[0], room, unit)
            else:
                yield part


@lru_cache(maxsize=8)
def decoded(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """Return the value of each bit pattern, in the order of the patterns as unsigned integers."""
    if COUNTABLE[dtype] == torch.uint8:
        return (
            torch.arange(256, dtype=torch.uint8, device="cpu")
            .view(dtype)
            .to(torch.float32)
            .numpy()
            .astype(np.float64)
        )
    patterns = np.arange(2**16, dtype=np.uint32)
    if dtype == torch.float16:
        return patterns.astype(np.uint16).view(np.float16).astype(np.float64)
    # By arithmetic: a cast flushes subnormal numbers where a thread has set that.
    field, fraction = (patterns >> 7) & 0xFF, patterns & 0x7F
    tiny = field == 0
    size = np.ldexp(
        (np.where(tiny, 0, 128) + fraction).astype(np.float64),
        np.where(tiny, 1, field).astype(np.int64) - 127 - 7,
    )
    size[field == 255] = np.where(fraction[field == 255] == 0, np.inf, np.nan)
    return np.asarray(np.where(patterns >> 15 == 1, -size, size))


def mismatch_error(quantity: str, a: object, b: object) -> QgateError:
    return QgateError(f"counts of different {quantity} do not add up: {a} and {b}.")


def all_bf16(x: Tensor) -> bool:
    """Tell whether every number is a bf16 number, as in files saved from bf16 tensors."""
    x = plain_tensor(x, "read the values of", None)
    if x.dtype != torch.float32:
        return x.dtype == torch.bfloat16
    flat = x.detach().reshape(-1).view(torch.int32)
    step = 2**20
    return all(not bool((flat[i : i + step] & 0xFFFF).any()) for i in range(0, len(flat), step))
