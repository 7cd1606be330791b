"""Casts of single numbers and of blocks with their scales, each in one kernel."""

from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from qgate.kernels.launching import bits, launch, tile
from qgate.kernels.shapes import ROUNDINGS, Grid, MemoryLayout, Rounding, kind_of, power_of_two

if TYPE_CHECKING:
    from torch import Tensor


LONGEST = 4096
_WIDE = 128


@dataclass(frozen=True)
class ElementCast:
    """A cast of single numbers, without a scale or with given ones."""

    grid: Grid
    scaled: bool

    def takes(self, memory: MemoryLayout) -> bool:
        return not self.scaled or memory.groups == 1 or memory.block <= LONGEST

    def run(self, x: Tensor, out: Tensor, memory: MemoryLayout, scales: Tensor | None) -> None:
        """Cast contiguous tensors; `scales` is a float64 scale per block in their order."""
        programs = importlib.import_module("qgate.kernels.programs.elements")
        room = tile()
        constants: dict[str, Any] = {
            **self.grid.constants,
            "KIND": kind_of(x.dtype),
            "OUT": kind_of(out.dtype),
        }
        if scales is None:
            n, wide = x.numel(), not self.grid.fits_single
            launch(
                programs.cast_flat, -(-n // room), bits(x), bits(out), n, TILE=room, WIDE=wide,
                **constants,
            )  # fmt: skip
            return
        arguments: tuple[Any, ...] = (bits(out), scales, memory.length)
        if memory.upright:
            shared = memory.groups == 1
            high = max(room // min(power_of_two(memory.inner), _WIDE), 1)
            cut = replace(memory, block=high) if shared else memory
            launch(
                programs.cast_columns, cut.programs(room), bits(x), *arguments, cut.groups,
                cut.inner, SHARED=shared, BLOCK=cut.block, PADDED=cut.padded,
                COLUMNS=cut.across(room), **constants,
            )  # fmt: skip
        elif memory.groups == 1:
            room = min(room, power_of_two(memory.length))
            pieces = memory.outer * -(-memory.length // room)
            launch(programs.cast_long_rows, pieces, bits(x), *arguments, TILE=room, **constants)
        else:
            launch(
                programs.cast_rows, memory.programs(room), bits(x), *arguments, memory.groups,
                memory.outer * memory.groups, BLOCK=memory.block, PADDED=power_of_two(memory.block),
                ROWS=memory.across(room), TAIL=memory.kind[1], **constants,
            )  # fmt: skip


class BlockCast(abc.ABC):
    """A cast of blocks with one scale each, of [outer, length, inner] tensors."""

    family: ClassVar[str]
    any_block: ClassVar[bool] = True
    """True if blocks have any length; those of HiF4 have one."""
    rounding: Rounding
    inf_saturates: bool

    def run(self, x: Tensor, out: Tensor, memory: MemoryLayout) -> None:
        """Cast contiguous tensors."""
        self.launch(x, out, memory)

    def launch(
        self, x: Tensor, out: Tensor, memory: MemoryLayout, *more: Tensor, **constants: Any
    ) -> None:
        programs = importlib.import_module(f"qgate.kernels.programs.{self.family}")
        across, count = memory.across(tile()), memory.programs(tile())
        constants |= {
            "KIND": kind_of(x.dtype),
            "OUT": kind_of(out.dtype),
            "ROUNDING": ROUNDINGS[self.rounding],
            "INF_SATURATES": self.inf_saturates,
        }
        if self.any_block:
            constants |= {"BLOCK": memory.block, "PADDED": memory.padded}
        arguments: tuple[Any, ...] = (bits(out), *more, memory.length, memory.groups)
        if memory.upright:
            launch(
                programs.quantize_columns, count, bits(x), *arguments, memory.inner,
                COLUMNS=across, **constants,
            )  # fmt: skip
            return
        if self.any_block:
            constants["TAIL"] = memory.kind[1]
        blocks = memory.outer * memory.groups
        launch(programs.quantize_rows, count, bits(x), *arguments, blocks, ROWS=across, **constants)


@dataclass(frozen=True)
class MxCast(BlockCast):
    """`carry` is added to the bits of the block's amax so that its exponent is the rule's."""

    grid: Grid
    carry: int
    limit: int
    inf_saturates: bool

    family = "mx"

    @property
    def rounding(self) -> Rounding:  # type: ignore[override]
        return self.grid.rounding

    def run(self, x: Tensor, out: Tensor, memory: MemoryLayout) -> None:
        grid = self.grid
        self.launch(
            x, out, memory, MANTISSA=grid.mantissa, LOWEST=grid.lowest, HIGHEST=grid.highest,
            LARGEST=grid.largest, CARRY=self.carry, LIMIT=self.limit, SIGNED_ZERO=grid.signed_zero,
        )  # fmt: skip


@dataclass(frozen=True)
class Nvfp4Cast(BlockCast):
    """A cast in two passes, of which the first finds the largest finite magnitude."""

    rounding: Rounding
    inf_saturates: bool

    family = "nvfp4"

    def run(self, x: Tensor, out: Tensor, memory: MemoryLayout) -> None:
        programs = importlib.import_module("qgate.kernels.programs.nvfp4")
        room, n = tile(), x.numel()
        amax = x.new_zeros(1, dtype=torch.int32)
        launch(
            programs.largest_finite, -(-n // room), bits(x), amax, n, TILE=room,
            KIND=kind_of(x.dtype),
        )  # fmt: skip
        self.launch(x, out, memory, amax)


@dataclass(frozen=True)
class Hif4Cast(BlockCast):
    """A cast of blocks of 64 with finer levels."""

    rounding: Rounding
    inf_saturates: bool

    family = "hif4"
    any_block = False
