"""Values of arrays and tensors of any library, read piece by piece as float64.

A tensor is read by its own methods, so that a project without torch stays without torch.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

RUN = 32
"""Neighboring elements that a sample keeps together: a block of the usual block formats."""


_EPS_32 = 2.0**-23
_CONVERTED = 1 << 16
"""Elements of a tensor that is small enough to be converted as a whole, once."""


class LeftOut(Exception):
    """A comparison that is not audited; the text is the reason."""


@dataclass(frozen=True)
class TensorReader:
    """One side of a comparison: its shape, and pieces of its elements."""

    source: Any
    shape: tuple[int, ...]
    eps: float

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @functools.cached_property
    def _flat(self) -> Any:
        """The elements in a row; those of a small tensor are converted once."""
        flat = self.source.reshape(-1)
        return _numbers(flat) if self.size <= _CONVERTED else flat

    def at(self, start: int, stop: int) -> Values:
        """Return a slice of the elements in row-major order."""
        return _numbers(self._flat[start:stop])

    def chunk(self, start: int, stop: int) -> npt.NDArray[np.floating[Any]]:
        """Return a slice of the elements as float32, of a float64 tensor as float64."""
        if self.eps < _EPS_32 or self.size <= _CONVERTED:
            return self.at(start, stop)
        piece = self._flat[start:stop]
        if not isinstance(piece, np.ndarray):
            piece = piece.float().cpu().numpy()
        return np.asarray(piece, dtype=np.float32)

    def runs(self, count: int) -> Values:
        """Return runs of neighbors spread evenly over the tensor, all of it if it is small."""
        if self.size <= count * RUN:
            return self.at(0, self.size)
        return self.picked(_spread_runs(self.size, count))

    def picked(self, indices: npt.NDArray[np.int64]) -> Values:
        """Return the elements at flat indices."""
        return _numbers(self._flat[_as_index(indices, self._flat)])


@functools.lru_cache(maxsize=32)
def _spread_runs(size: int, count: int) -> npt.NDArray[np.int64]:
    """Return the flat indices of runs of neighbors, spread evenly over a tensor."""
    starts = np.linspace(0, size // RUN - 1, count).astype(np.int64) * RUN
    return (starts[:, None] + np.arange(RUN)).reshape(-1)


def reader_of(value: Any) -> TensorReader:
    """Return a reader of floating values; anything else is left out."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_reader(value, torch)
    if isinstance(value, int | float | complex | str | bytes) or value is None:
        raise LeftOut("numbers, not tensors")
    array = np.asarray(value)
    if array.dtype.kind != "f" and type(array.dtype.type).__module__ == "builtins":
        name = array.dtype.name
        if "float" not in name or array.dtype.type.__module__ == "numpy":
            raise LeftOut("integers and other types")
    eps = float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 2.0**-8
    return TensorReader(array, tuple(array.shape), eps)


def _tensor_reader(tensor: Any, torch: Any) -> TensorReader:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise LeftOut("sparse tensors and subclasses")
    if not tensor.is_floating_point() or "float4" in str(tensor.dtype):
        raise LeftOut("integers and other types")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise LeftOut("sparse tensors and subclasses")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise LeftOut("inside a function transform")
    if torch._C._len_torch_dispatch_stack():
        raise LeftOut("inside a dispatch mode")
    return TensorReader(tensor.detach(), tuple(tensor.shape), float(torch.finfo(tensor.dtype).eps))


def same_tensor(first: Any, second: Any) -> bool:
    """Tell if both sides are views of the same memory."""
    if first is second:
        return True
    if hasattr(first, "data_ptr") and hasattr(second, "data_ptr"):
        return bool(
            first.data_ptr() == second.data_ptr() != 0
            and first.stride() == second.stride()
            and first.dtype == second.dtype
        )
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        one, other = first.__array_interface__, second.__array_interface__
        return bool(
            one["data"][0] == other["data"][0]
            and first.strides == second.strides
            and first.dtype == second.dtype
        )
    return False


def _numbers(piece: Any) -> Values:
    if isinstance(piece, np.ndarray):
        return piece.astype(np.float64, copy=False)
    if piece.element_size() == 1:  # FP8 has few conversions
        piece = piece.float()
    return np.asarray(piece.cpu().double().numpy(), dtype=np.float64)


def _as_index(indices: npt.NDArray[np.int64], flat: Any) -> Any:
    if isinstance(flat, np.ndarray):
        return indices
    return sys.modules["torch"].from_numpy(indices).to(flat.device)
