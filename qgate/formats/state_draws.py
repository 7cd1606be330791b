"""Draws of kernels that update Mamba states in fp16: vLLM's and FlashInfer's orders of Philox."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from qgate.errors import QgateError, unknown
from qgate.formats.philox import LARGEST_SEED, philox, unit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Order = Literal["vllm", "vllm-pairs", "flashinfer"]
_WORD = 0xFFFFFFFF
_CUT = 13
"""Bits that float32 has more than fp16."""
_GROUP = 4


@dataclass(frozen=True)
class StatePhilox:
    """Draws of Philox4x32 for the elements of a state by their places in memory.

    seed     the key
    rounds   `mamba_cache_philox_rounds` of vLLM, 10 where that is 0
    order    "vllm": `selective_state_update` on GPUs without `cvt.rs`. Element i has the first word
             of counter i: its upper 23 bits and a half;
             "vllm-pairs": the same on those with it. Two neighbors share the word of the first:
             bits 0 to 12 are for that one, bits 16 to 28 for the second, as carries;
             "flashinfer": four neighbors share the call of the first, pairs its words 0 and 1
    offset   where the tensor begins in the cache, in elements: its slot and its head
    strides  elements from one index of an axis to the next; of a contiguous tensor if left out
    """

    seed: int
    rounds: int = 10
    order: Order = "vllm"
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise unknown("order of states", self.order, get_args(Order))
        for name, low, high in (
            ("seed", 0, LARGEST_SEED), ("rounds", 1, 100), ("offset", 0, 2**62),
        ):  # fmt: skip
            number = getattr(self, name)
            if not isinstance(number, int) or not low <= number <= high:
                raise QgateError(f"{name}={number!r} is not allowed; it is from {low} to {high}.")

    def places(self, shape: tuple[int, ...], device: torch.device | None = None) -> Tensor:
        """Return the place in memory of each element as int64."""
        import torch

        if self.strides is None:
            places = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
            return places.view(shape) + self.offset
        if len(self.strides) != len(shape):
            raise QgateError(
                f"strides {self.strides} do not fit a tensor of shape {tuple(shape)}: give one for "
                "each axis."
            )
        places = torch.full((), self.offset, dtype=torch.int64, device=device)
        for size, stride in zip(shape, self.strides, strict=True):
            along = torch.arange(size, dtype=torch.int64, device=device) * stride
            places = places.unsqueeze(-1) + along
        return places

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return a float64 number for each element of a tensor."""
        import torch

        places = self.places(tuple(shape), device)
        shared = {"vllm": 1, "vllm-pairs": 2, "flashinfer": _GROUP}[self.order]
        if shared > 1 and (not shape or shape[-1] % shared):
            raise QgateError(
                f"a state of shape {tuple(shape)} has no draws in order {self.order!r}; its last "
                f"axis is a multiple of {shared}."
            )
        column = torch.arange(shape[-1] if shape else 1, device=device) % shared
        column = column.expand(places.shape)
        first = places - column * (self.strides[-1] if self.strides else 1)
        zero = torch.zeros_like(first)
        counter = torch.stack([first & _WORD, first >> 32 & _WORD, zero, zero], -1)
        drawn = philox(counter, self.seed, self.rounds)
        if self.order == "vllm":
            return ((drawn[..., 0] >> 9).double() + 0.5) * 2.0**-23
        word = drawn.gather(-1, (column // 2).unsqueeze(-1)).squeeze(-1)
        return unit(word >> 16 * (column % 2), _CUT, carry=True)
