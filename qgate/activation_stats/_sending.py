"""Tensors on their way to another process, in whatever holds them, as plain bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_FEW = 64


@dataclass(frozen=True, eq=False)
class _Bits:
    """Torch itself would send handles of shared memory, good for one process alone."""

    data: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> _Bits:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return _Bits(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> Tensor:
        if not len(self.data):
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.data.copy()).view(self.dtype).reshape(self.shape)


def to_send(value: Any) -> Any:
    return _turned(value, Tensor, _Bits.of)


def received(value: Any) -> Any:
    return _turned(value, _Bits, _Bits.tensor)


def _turned(value: Any, kind: type, turn: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return turn(value)
    if isinstance(value, Mapping):
        return {key: _turned(item, kind, turn) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_turned(item, kind, turn) for item in value)
    return value


def fingerprint(network: nn.Module) -> str:
    """Of names, forms and a few numbers of all weights: other weights have another one."""
    found = hashlib.sha256()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            flat = tensor.detach().reshape(-1)
            few = flat[:: max(len(flat) // _FEW, 1)].contiguous().cpu()
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(few.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
